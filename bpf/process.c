/* Life and death of the ranks, and of nothing else, by raw tracepoints: no tracefs and no kprobes are needed.
 * TASK_TGID is the offset of task_struct.tgid in the running kernel's own BTF; where there is none the programs that need another
 * task's identity are not compiled, and the executor says so. Nothing is read through a struct of the headers, which are of any version. */
#include "singularity.h"

BPF_HASH(ranks, u32, u32, 4096);            /* tgid of a rank: what to tell of it */
BPF_ARRAY(process_counters, u64, COUNTERS);
BPF_RINGBUF_OUTPUT(process_events, PROCESS_PAGES);

static inline void count(u32 which) { u64 *n = process_counters.lookup(&which); if (n) lock_xadd(n, 1); }

static inline void tell(u16 kind, u32 tgid, s32 value, s32 sender) {
    struct event e = {.kind = kind, .tgid = tgid, .tid = bpf_get_current_pid_tgid(), .value = value, .other = sender};
    e.at_ns = bpf_ktime_get_ns();
    bpf_get_current_comm(e.comm_name, sizeof(e.comm_name));
    count(PROCESS_SUBMITTED);
    if (process_events.ringbuf_output(&e, sizeof(e), 0)) count(PROCESS_DROPPED);
}

int on_exit(struct bpf_raw_tracepoint_args *ctx) {
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32;
    if (tgid == (u32)id && ranks.lookup(&tgid)) tell(EVENT_DYING, tgid, 0, 0);
    return 0;
}

int on_exec(struct bpf_raw_tracepoint_args *ctx) {
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    if (ranks.lookup(&tgid)) tell(EVENT_EXEC, tgid, 0, 0);
    return 0;
}

/* args: int sig, struct kernel_siginfo *, struct k_sigaction *; the receiver is current */
int on_deliver(struct bpf_raw_tracepoint_args *ctx) {
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    if (!ranks.lookup(&tgid)) return 0;
    int sig = ctx->args[0];
    if (sig == 19) tell(EVENT_STOP, tgid, sig, 0);
    else if (sig == 9) tell(EVENT_DYING, tgid, sig, 0);
    return 0;
}

#ifdef TASK_TGID
static inline u32 tgid_of(u64 task) { u32 tgid = 0; bpf_probe_read_kernel(&tgid, 4, (void *)(task + TASK_TGID)); return tgid; }

/* args: int sig, struct kernel_siginfo *, struct task_struct *, int group, int result; the sender is current */
int on_generate(struct bpf_raw_tracepoint_args *ctx) {
    int sig = ctx->args[0];
    if (sig != 9 && sig != 18 && sig != 19) return 0;
    /* 0: TRACE_SIGNAL_DELIVERED. SIGCONT acts when it is sent, also where the program ignores it. */
    if (ctx->args[4] && sig != 18) return 0;
    u32 tgid = tgid_of(ctx->args[2]);
    if (!ranks.lookup(&tgid)) return 0;
    tell(sig == 9 ? EVENT_DYING : sig == 18 ? EVENT_CONTINUE : EVENT_STOP, tgid, sig, bpf_get_current_pid_tgid() >> 32);
    return 0;
}

/* args: struct task_struct * (since 6.8) or int pid: a pid is far below any kernel address */
int on_oom(struct bpf_raw_tracepoint_args *ctx) {
    u64 victim = ctx->args[0];
    u32 tgid = victim >> 32 ? tgid_of(victim) : (u32)victim;
    if (ranks.lookup(&tgid)) tell(EVENT_OOM, tgid, 9, 0);
    return 0;
}
#endif
