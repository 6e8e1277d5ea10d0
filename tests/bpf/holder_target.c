/* What the holder's tests trace: threads that count in shared memory, threads that wait in the kernel, and orders to do what ranks do. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    READY, WOKEN, USR1, RT_COUNT, RT_VALUE, RT_CODE, RT_SENDER, URG, CHURN, CHURNED, FORK, FORKED, EXEC, LEAVE, SPAWN, SPAWNED, CLONE, ROUNDS,
    CALLED, RETURNED, CALL, LOW
};
struct slot { _Atomic uint64_t count, tid; };
static struct { _Atomic uint64_t order[64]; struct slot slot[1024]; } *shared;
static _Atomic int slots;
static long tick_us = 2000;

static void nap(long us) { struct timespec t = {us / 1000000, us % 1000000 * 1000}; nanosleep(&t, NULL); }

static void *count(void *spin) {
    struct slot *s = &shared->slot[atomic_fetch_add(&slots, 1)];
    s->tid = syscall(SYS_gettid);
    for (;;) { s->count++; if (!spin) nap(tick_us); }
    return spin;
}

static void start(void *(*work)(void *), void *argument) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 65536);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, work, argument)) abort();
    pthread_attr_destroy(&attributes);
}

static void *brief(void *unused) { shared->order[CHURNED]++; return unused; }
static void *churn(void *unused) { for (;;) { if (shared->order[CHURN]) start(brief, NULL); nap(500); } return unused; }

/* Each of these waits for ever; to come back at all is to have been disturbed. */
static void *wait_epoll(void *unused) {
    struct epoll_event event = {.events = EPOLLIN};
    int poll = epoll_create1(0);
    epoll_ctl(poll, EPOLL_CTL_ADD, eventfd(0, 0), &event);
    for (;;) { shared->order[ROUNDS]++; epoll_wait(poll, &event, 1, -1); shared->order[WOKEN]++; }
    return unused;
}
static void *wait_sleep(void *unused) {
    for (;;) { shared->order[ROUNDS]++; nap(3600L * 1000000); shared->order[WOKEN]++; }
    return unused;
}
static void *wait_futex(void *unused) {
    static int word;
    for (;;) { shared->order[ROUNDS]++; syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0); shared->order[WOKEN]++; }
    return unused;
}
static void *wait_receive(void *unused) {
    int pair[2];
    char byte;
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    for (;;) { shared->order[ROUNDS]++; recv(pair[0], &byte, 1, 0); shared->order[WOKEN]++; }
    return unused;
}

static void block(int number) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}
static void *blocking(void *unused) { block(SIGURG); return count(unused); }

static void on_usr1(int number) { (void)number; shared->order[USR1]++; }
static void on_urg(int number) { (void)number; shared->order[URG]++; }
static void on_rt(int number, siginfo_t *info, void *context) {
    (void)number; (void)context;
    shared->order[RT_VALUE] = info->si_value.sival_int;
    shared->order[RT_CODE] = (uint64_t)(int64_t)info->si_code;
    shared->order[RT_SENDER] = info->si_pid;
    shared->order[RT_COUNT]++;
}
static void handle(int number, void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(number, &action, NULL);
}

static void *execute(void *path) { execl(path, path, "600", NULL); abort(); }

/* The call to be skipped: volatile, so that nobody inlines it. */
__attribute__((noinline, noclone)) uint64_t victim(uint64_t value) { shared->order[CALLED]++; return value + 1; }
static uint64_t (*volatile call)(uint64_t) = victim;

static void orders(void) {
    if (atomic_exchange(&shared->order[FORK], 0)) {
        pid_t child = fork();
        if (!child) { for (;;) nap(1000000); }
        shared->order[FORKED] = child;
    }
    if (atomic_exchange(&shared->order[CLONE], 0)) { /* a process, but one whose end raises no SIGCHLD */
        pid_t child = syscall(SYS_clone, 0, NULL, NULL, NULL, NULL);
        if (!child) { for (;;) nap(1000000); }
        shared->order[FORKED] = child;
    }
    if (atomic_exchange(&shared->order[SPAWN], 0)) { start(count, NULL); shared->order[SPAWNED]++; }
    if (atomic_exchange(&shared->order[CALL], 0)) shared->order[RETURNED] = call(41);
    uint64_t exec = atomic_exchange(&shared->order[EXEC], 0);
    if (exec == 1) execute("/bin/sleep");
    if (exec == 2) start(execute, "/bin/sleep");
    if (atomic_exchange(&shared->order[LEAVE], 0)) pthread_exit(NULL);
}

int main(int argc, char **argv) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
    shared->order[LOW] = (uint64_t)(uintptr_t)victim;
    handle(SIGUSR1, on_usr1);
    struct sigaction queued = {.sa_sigaction = on_rt, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGRTMIN + 3, &queued, NULL);
    int leader = atomic_fetch_add(&slots, 1);
    shared->slot[leader].tid = getpid();
    for (int i = 3; i < argc; i++) {
        char *word = argv[i];
        if (!strncmp(word, "tick=", 5)) tick_us = atol(word + 5);
        if (!strcmp(word, "spin")) start(count, "spin");
        if (!strcmp(word, "waiters")) { start(wait_epoll, NULL); start(wait_sleep, NULL); start(wait_futex, NULL); start(wait_receive, NULL); }
        if (!strcmp(word, "churn")) { shared->order[CHURN] = 1; for (int n = 0; n < 3; n++) start(churn, NULL); }
        if (!strcmp(word, "urg")) handle(SIGURG, on_urg);
        if (!strcmp(word, "winch")) handle(SIGWINCH, on_urg);
        if (!strcmp(word, "blocking")) start(blocking, NULL);
        if (!strcmp(word, "signalfd")) { sigset_t set; sigemptyset(&set); sigaddset(&set, SIGURG); signalfd(-1, &set, 0); }
    }
    for (int n = atoi(argv[2]); n > 0; n--) start(count, NULL);
    while (atomic_load(&slots) < atoi(argv[2]) + 1) nap(1000);
    nap(5000);
    shared->order[READY] = 1;
    for (;;) { shared->slot[leader].count++; orders(); nap(tick_us); }
}
