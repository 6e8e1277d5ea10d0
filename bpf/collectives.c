/* Counts, times and, when armed, disturbs the calls of collective libraries. Attached inode-wide by (file, offset); which call a
 * hit means comes with the attach cookie, so one program serves every entry site of every library. */
#include "singularity.h"

#define GLOO_TIMEOUT 16         /* gloo's options of every collective: shared_ptr<Context>, std::chrono::milliseconds timeout */
#define GLOO_BUFFER_SIZE 16     /* gloo::transport::UnboundBuffer: vtable, void *ptr, size_t size */

BPF_ARRAY(sites, struct site, SITES);
BPF_ARRAY(layouts, struct layout, LAYOUTS);
BPF_ARRAY(site_hits, u64, SITES);
BPF_ARRAY(counters, u64, COUNTERS);
BPF_ARRAY(settings, struct settings, 1);
BPF_ARRAY(blank_stat, struct stat, 1);      /* all zero: new values are copied from here, the stack holds 512 bytes only */
BPF_ARRAY(blank_comm, struct comm, 1);
BPF_F_TABLE("hash", struct stat_key, struct stat, stats, 16384, 1);          /* 1: BPF_F_NO_PREALLOC */
BPF_F_TABLE("hash", struct inflight_key, struct inflight, inflight, 16384, 0);
BPF_F_TABLE("hash", struct comm_key, struct comm, comms, 4096, 1);
BPF_F_TABLE("hash", struct group_key, u64, groups, 16384, 1);
BPF_HASH(inject_config, u32, struct fault, 256);
BPF_HASH(held, u32, struct held, 4096);
BPF_RINGBUF_OUTPUT(events, EVENT_PAGES);

static inline void count(u32 which) { u64 *n = counters.lookup(&which); if (n) lock_xadd(n, 1); }

static inline void emit(struct event *e) {
    e->at_ns = bpf_ktime_get_ns();
    bpf_get_current_comm(e->comm_name, sizeof(e->comm_name));
    count(EVENTS_SUBMITTED);
    if (events.ringbuf_output(e, sizeof(*e), 0)) count(EVENTS_DROPPED);
}

/* The n-th integer argument by the C calling convention, 0 for n = 0. Arguments beyond the registers lie on the stack. The registers
 * are copied first: the verifier refuses a context pointer that the compiler has moved to make one load of a switch. */
struct arguments { u64 value[8]; u64 stack; };

static inline void copy_arguments(struct pt_regs *ctx, struct arguments *a) {
    a->value[0] = PT_REGS_PARM1(ctx); a->value[1] = PT_REGS_PARM2(ctx); a->value[2] = PT_REGS_PARM3(ctx);
    a->value[3] = PT_REGS_PARM4(ctx); a->value[4] = PT_REGS_PARM5(ctx); a->value[5] = PT_REGS_PARM6(ctx);
    a->stack = PT_REGS_SP(ctx);
#if defined(__aarch64__)
    a->value[6] = ctx->regs[6]; a->value[7] = ctx->regs[7];
#else
    a->value[6] = a->value[7] = 0;
#endif
}

static inline u64 argument(struct arguments *a, u8 n) {
    if (n >= 1 && n <= 6) return a->value[(n - 1) & 7];
#if defined(__aarch64__)
    if (n == 7 || n == 8) return a->value[(n - 1) & 7];
#else
    u64 v = 0;
    if (n == 7 || n == 8) bpf_probe_read_user(&v, 8, (void *)(a->stack + 8 * (n - 6)));
    return v;
#endif
    return 0;
}

/* ncclDataType_t: the same numbers since NCCL 2.0; 10 and 11 are the 8-bit floats of 2.24. */
static inline u64 nccl_width(u32 t) {
    if (t <= 1 || t == 10 || t == 11) return 1;
    if (t == 6 || t == 9) return 2;
    if (t == 2 || t == 3 || t == 7) return 4;
    if (t == 4 || t == 5 || t == 8) return 8;
    return 0;
}

/* ncclUniqueId is 128 bytes that no two communicators share; an FNV-1a over its words names the communicator on every host. */
static inline u64 hash_unique_id(u64 address) {
    u64 word = 0, h = 0xcbf29ce484222325ULL;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (bpf_probe_read_user(&word, 8, (void *)(address + 8 * i))) return 0;
        h = (h ^ word) * 0x100000001b3ULL;
    }
    return h ? h : 1;
}

/* splitmix64's finalizer: the same decision for the same (seed, rank, hit index), which bpf_get_prandom_u32 cannot promise. */
static inline u64 mix(u64 x) {
    x ^= x >> 30; x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27; x *= 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

static inline u32 bucket(u64 ns) {
    u64 us = ns / 1000;
    u32 b = us ? bpf_log2l(us) : 0;         /* bcc: position of the highest bit, counted from 1 */
    return b < BUCKETS ? b : BUCKETS - 1;
}

/* Which of this process's gloo contexts, in the order of their first call. Decided by insertion, so that two worker threads that
 * meet a new context at once agree. */
static inline u64 gloo_ordinal(u32 tgid, u64 context) {
    struct group_key key = {.tgid = tgid};
    for (int i = 0; i < GROUPS; i++) {
        key.ordinal = i;
        u64 *there = groups.lookup(&key);
        if (!there) {
            if (groups.insert(&key, &context) == 0) return i + 1;
            there = groups.lookup(&key);
        }
        if (there && *there == context) return i + 1;
    }
    return 0;
}

static inline struct comm *find_comm(u32 tgid, u8 backend, u64 address) {
    struct comm_key key = {.tgid = tgid, .backend = backend, .address = address};
    struct comm *c = comms.lookup(&key);
    if (c) return c;
    int zero = 0;
    struct comm *blank = blank_comm.lookup(&zero);
    if (!blank || comms.insert(&key, blank)) {
        c = comms.lookup(&key);
        if (!c) { count(COMMS_FULL); return 0; }
    } else c = comms.lookup(&key);
    if (!c || c->born_ns) return c;
    c->born_ns = bpf_ktime_get_ns();
    c->rank = c->size = -1;
    if (backend == BACKEND_GLOO && address) {
        s32 pair[2] = {-1, -1};             /* gloo::Context begins with const int rank, const int size */
        bpf_probe_read_user(pair, sizeof(pair), (void *)address);
        c->rank = pair[0]; c->size = pair[1];
        c->id = gloo_ordinal(tgid, address);
        c->known = c->id != 0;
        c->aligned = 1;                     /* the tag of c10d counts collectives alike on every rank */
    }
    return c;
}

/* A communicator that began before the probes: the library's debug information says where it keeps its rank. */
static inline void recognise(struct comm *c, struct site *s, struct inflight *f) {
    u32 number = s->layout;
    struct layout *l = layouts.lookup(&number);
    if (!l || !l->known) return;
    u64 identity = 0;
    s32 rank = -1, size = -1;
    if (bpf_probe_read_user(&identity, 8, (void *)(f->comm_address + l->identity))) return;
    bpf_probe_read_user(&rank, 4, (void *)(f->comm_address + l->rank));
    bpf_probe_read_user(&size, 4, (void *)(f->comm_address + l->size));
    if (!identity || rank < 0 || size <= 0 || rank >= size) return;      /* not what the debug information promised */
    c->id = identity; c->rank = rank; c->size = size; c->known = 1;
    struct event e = {.kind = EVENT_COMM_SEEN, .op = f->op, .backend = f->backend, .tgid = f->tgid, .tid = bpf_get_current_pid_tgid(),
        .comm = identity, .rank = rank, .size = size};
    emit(&e);
}

static inline void arrive(struct comm *c, struct inflight *f, struct site *s, u64 options) {
    u32 seq = c->next;
    if (s->tag_offset) bpf_probe_read_user(&seq, 4, (void *)(options + s->tag_offset));
    c->next = seq + 1;
    f->seq = seq;
    struct arrival *a = &c->arrivals[seq & (ARRIVALS - 1)];
    a->at_ns = f->started_ns; a->seq = seq; a->op = s->op;
}

static inline void record(struct inflight *f, u8 result, u64 now) {
    struct stat_key key = {.tgid = f->tgid, .op = f->op, .backend = f->backend, .result = result, .comm = f->comm};
    struct stat *v = stats.lookup(&key);
    if (!v) {
        int zero = 0;
        struct stat *blank = blank_stat.lookup(&zero);
        if (!blank) return;
        int refused = stats.insert(&key, blank);
        v = stats.lookup(&key);
        if (!v) { count(STATS_FULL); return; }
        if (!refused) {
            struct event e = {.kind = EVENT_FIRST_CALL, .op = f->op, .backend = f->backend, .result = result, .tgid = f->tgid,
                .tid = bpf_get_current_pid_tgid(), .comm = f->comm, .bytes = f->bytes, .seq = f->seq};
            emit(&e);
        }
    }
    u64 took = now - f->started_ns;
    lock_xadd(&v->calls, 1);
    lock_xadd(&v->bytes, f->bytes);
    lock_xadd(&v->total_ns, took);
    u32 b = bucket(took);
    if (b < BUCKETS) lock_xadd(&v->buckets[b], 1);
    v->last_ns = now;
}

/* The n-th of the matching calls that is to be disturbed, or -1: by schedule, by count and by the hash of (seed, rank, index). The
 * counters are taken with fetch-and-add, for the threads of a rank call at the same time and `after` and `count` are exact. */
static inline s64 choose(struct fault *x, struct site *s, u64 now) {
    if (now < x->start_ns || now >= x->end_ns) return -1;
    if (x->point && x->point != s->op) return -1;
    if (x->backend && x->backend != s->backend) return -1;
    if (x->period_ns && (now - x->start_ns) % x->period_ns >= x->on_ns) return -1;
    u64 index = __sync_fetch_and_add(&x->seen, 1);
    if (index < x->after) return -1;
    if (x->ppm < 1000000 && mix(x->seed ^ mix((((u64)x->rank << 32) ^ index) + 0x9e3779b97f4a7c15ULL)) % 1000000 >= x->ppm) return -1;
    if (!x->max_hits) { lock_xadd(&x->hits, 1); return index; }
    if (x->hits >= x->max_hits) return -1;
    if (__sync_fetch_and_add(&x->hits, 1) < x->max_hits) return index;
    lock_xadd(&x->hits, -1);
    return -1;
}

/* Asks for this thread by a signal that the tracer swallows, or ends the process in its call. */
static inline void disturb(struct pt_regs *ctx, struct site *s, u32 tgid, u32 tid, u32 site_id, struct inflight *f) {
    struct fault *x = inject_config.lookup(&tgid);
    if (!x) return;
    u64 now = bpf_ktime_get_ns();
    s64 index = choose(x, s, now);
    if (index < 0) return;
    struct event e = {.kind = EVENT_HIT, .op = s->op, .backend = s->backend, .tgid = tgid, .tid = tid, .site = site_id, .fault = x->id,
        .comm = f->comm, .bytes = f->bytes, .seq = f->seq, .rank = x->rank, .other = index};
    if (x->action == ACTION_KILL) {
        emit(&e);
        if (bpf_send_signal(9)) { lock_xadd(&x->hits, -1); count(SIGNAL_FAILED); }
        return;
    }
    struct held h = {.at_ns = now, .fault = x->id, .ip = PT_REGS_IP(ctx), .sp = PT_REGS_SP(ctx), .index = index, .tgid = tgid, .op = s->op, .backend = s->backend};
    held.update(&tid, &h);
    if (bpf_send_signal_thread(x->signal)) { held.delete(&tid); lock_xadd(&x->hits, -1); count(SIGNAL_FAILED); return; }
    emit(&e);
}

static inline void note_init(struct arguments *a, struct site *s, struct inflight *f) {
    u64 id = 0;
    f->out_address = argument(a, s->out_arg);
    f->size = s->size_arg ? (s32)argument(a, s->size_arg) : -1;
    f->rank = s->rank_arg ? (s32)argument(a, s->rank_arg) : -1;
    if (s->id_source == ID_BY_VALUE) {
        /* x86-64: 128 bytes by value lie in the caller's outgoing area, no register; aarch64: by pointer in the argument's place */
#if defined(__aarch64__)
        id = hash_unique_id(argument(a, s->id_arg));
#else
        id = hash_unique_id(a->stack + 8);
#endif
    } else if (s->id_source == ID_POINTER) id = hash_unique_id(argument(a, s->id_arg));
    else if (s->id_source == ID_SPLIT) {
        struct comm_key key = {.tgid = f->tgid, .backend = f->backend, .address = argument(a, s->comm_arg)};
        struct comm *parent = comms.lookup(&key);
        if (parent && parent->known) { id = mix(parent->id ^ mix(argument(a, s->id_arg) + ((u64)parent->next << 32))) | 1; parent->next++; }
    }
    f->comm = id;
}

int on_call(struct pt_regs *ctx) {
    u32 site_id = bpf_get_attach_cookie(ctx);
    struct site *s = sites.lookup(&site_id);
    u64 *hits = site_hits.lookup(&site_id);
    if (!s || !hits) return 0;
    lock_xadd(hits, 1);
    u64 id = bpf_get_current_pid_tgid();
    u32 tgid = id >> 32, tid = id;
    struct inflight_key key = {.tid = tid, .site = s->backend == BACKEND_GLOO ? 0 : site_id};
    struct inflight *open = inflight.lookup(&key);
    if (open && open->ip == PT_REGS_IP(ctx) && open->sp == PT_REGS_SP(ctx) && bpf_ktime_get_ns() - open->started_ns < 4000) {
        count(DUPLICATE_HITS);              /* the same file reached by two overlay mounts has two links on one breakpoint */
        return 0;
    }
    /* a collective posts its own sends and receives; those outside any collective are the user's */
    if (open && s->kind == SITE_POST && s->backend == BACKEND_GLOO) return 0;
    struct inflight f = {.started_ns = bpf_ktime_get_ns(), .tgid = tgid, .op = s->op, .backend = s->backend, .ip = PT_REGS_IP(ctx),
        .sp = PT_REGS_SP(ctx), .rank = -1, .size = -1};
    /* gloo only ends a unit of work; a work of several collectives (sparse all-reduce) ends one by beginning the next */
    if (open && s->backend == BACKEND_GLOO) record(open, 0, f.started_ns);
    struct arguments a;
    copy_arguments(ctx, &a);
    u64 first = a.value[0];
    if (s->comm_source == COMM_GLOO_OPTIONS) {
        u64 elements = 0, width = 0;
        bpf_probe_read_user(&f.comm_address, 8, (void *)first);
        if (s->elements_offset) bpf_probe_read_user(&elements, 8, (void *)(first + s->elements_offset));
        if (s->width_offset) {
            bpf_probe_read_user(&width, 8, (void *)(first + s->width_offset));
            f.bytes = elements * width;
        } else if (elements) bpf_probe_read_user(&f.bytes, 8, (void *)(elements + GLOO_BUFFER_SIZE));
    } else {
        if (s->comm_source == COMM_ARGUMENT) f.comm_address = argument(&a, s->comm_arg);
        if (s->count_arg) f.bytes = argument(&a, s->count_arg) * (s->dtype_arg ? nccl_width(argument(&a, s->dtype_arg)) : 1);
    }
    /* gloo posts a whole buffer as size -1; its first argument is the buffer itself */
    if (s->kind == SITE_POST && f.bytes == ~0ULL) bpf_probe_read_user(&f.bytes, 8, (void *)(first + GLOO_BUFFER_SIZE));
    if (s->id_source) note_init(&a, s, &f);
    else if (f.comm_address) {
        struct comm *c = find_comm(tgid, s->backend, f.comm_address);
        if (c && !c->known && s->layout && s->op < FIRST_LIFE_OP) recognise(c, s, &f);
        if (c) { f.comm = c->id; if (s->op < FIRST_LIFE_OP) arrive(c, &f, s, first); }
        if (c && !c->timeout_ms && s->comm_source == COMM_GLOO_OPTIONS) bpf_probe_read_user(&c->timeout_ms, 4, (void *)(first + GLOO_TIMEOUT));
    }
    if (s->kind == SITE_POST) record(&f, s->result, f.started_ns);
    else if (inflight.update(&key, &f)) count(INFLIGHT_FULL);
    disturb(ctx, s, tgid, tid, site_id, &f);
    return 0;
}

static inline void end_comm(struct inflight *f) {
    struct comm_key key = {.tgid = f->tgid, .backend = f->backend, .address = f->comm_address};
    struct comm *c = comms.lookup(&key);
    if (c) { c->ended = 1; c->known = 0; c->id = 0; c->aligned = 0; }   /* the address may be another communicator's next */
}

static inline void finish(struct inflight *f, struct site *s, u32 site_id, s32 value, u8 result) {
    u64 now = bpf_ktime_get_ns();
    int zero = 0;
    struct settings *set = settings.lookup(&zero);
    u64 took = now - f->started_ns;
    record(f, result, now);
    struct event e = {.op = f->op, .backend = f->backend, .result = result, .tgid = f->tgid, .tid = bpf_get_current_pid_tgid(), .site = site_id,
        .comm = f->comm, .bytes = f->bytes, .duration_ns = took, .seq = f->seq, .rank = f->rank, .size = f->size, .value = value};
    int bad = f->backend == BACKEND_NCCL ? value != 0 && value != 7 : result != 0;
    if (f->out_address) e.kind = EVENT_INIT;
    else if (f->op == OP_COMM_DESTROY || f->op == OP_COMM_ABORT) { end_comm(f); e.kind = EVENT_COMM_END; }
    else if (bad) e.kind = EVENT_ERROR;
    else if (set && set->slow_ns && took >= set->slow_ns) e.kind = EVENT_SLOW;
    else return;
    emit(&e);
}

/* NCCL: a C function with a result; no exception crosses it, so a return probe is safe here and only here. */
int on_return(struct pt_regs *ctx) {
    u32 site_id = bpf_get_attach_cookie(ctx);
    struct site *s = sites.lookup(&site_id);
    if (!s) return 0;
    struct inflight_key key = {.tid = bpf_get_current_pid_tgid(), .site = site_id};
    struct inflight *open = inflight.lookup(&key);
    if (!open) { count(END_UNMATCHED); return 0; }
    struct inflight f = *open;
    s32 value = PT_REGS_RC(ctx);
    inflight.delete(&key);
    if (f.out_address && (value == 0 || value == 7)) {
        u64 address = 0;
        bpf_probe_read_user(&address, 8, (void *)f.out_address);
        struct comm *c = address ? find_comm(f.tgid, f.backend, address) : 0;
        if (c) {
            c->id = f.comm; c->known = f.comm != 0; c->rank = f.rank; c->size = f.size; c->ended = 0; c->next = 0; c->aligned = 1;
        }
    }
    finish(&f, s, site_id, value, value < 0 || value > 250 ? 250 : value);
    return 0;
}

/* gloo: the work's own bookkeeping function, entered on the thread that ran the collective, after success or failure. */
int on_end(struct pt_regs *ctx) {
    u32 site_id = bpf_get_attach_cookie(ctx);
    struct site *s = sites.lookup(&site_id);
    if (!s) return 0;
    struct inflight_key key = {.tid = bpf_get_current_pid_tgid(), .site = 0};
    struct inflight *open = inflight.lookup(&key);
    if (!open) { count(END_UNMATCHED); return 0; }
    struct inflight f = *open;
    inflight.delete(&key);
    finish(&f, s, site_id, s->result, s->result);
    return 0;
}
