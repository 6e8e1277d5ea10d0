/* What the programs and the Python halves agree on. Mirrored by daemon/singularityd/kernel/abi.py; tests/unit/test_abi.py
 * compares the two, field by field, so change both together. Every struct is packed by hand: no padding that a compiler chooses. */
#ifndef SINGULARITY_H
#define SINGULARITY_H
#include <uapi/linux/ptrace.h>

#define SITES 4096          /* sites in all attached files of the host */
#define LAYOUTS 256
#define BUCKETS 28          /* durations: bucket i counts calls shorter than 2^i microseconds, the last one all longer */
#define ARRIVALS 64         /* arrivals kept for each communicator, by sequence number modulo this */
#define GROUPS 32           /* gloo contexts of one process that get an ordinal */

enum backend { BACKEND_NCCL = 1, BACKEND_GLOO = 2 };
enum site_kind { SITE_CALL = 1, SITE_RETURN = 2, SITE_END = 3, SITE_POST = 4 };
enum op { FIRST_LIFE_OP = 20, OP_COMM_DESTROY = 33, OP_COMM_ABORT = 34 };     /* all of them: kernel/abi.py */
enum comm_source { COMM_NONE = 0, COMM_ARGUMENT = 1, COMM_GLOO_OPTIONS = 2 };
enum id_source { ID_NONE = 0, ID_BY_VALUE = 1, ID_POINTER = 2, ID_SPLIT = 3 };
enum action { ACTION_HOLD = 0, ACTION_KILL = 1, ACTION_FREEZE = 2, ACTION_DUTY = 3 };   /* the last two need no probe */
enum counter { EVENTS_SUBMITTED = 0, EVENTS_DROPPED = 1, PROCESS_SUBMITTED = 2, PROCESS_DROPPED = 3, STATS_FULL = 4,
    INFLIGHT_FULL = 5, COMMS_FULL = 6, END_UNMATCHED = 7, SIGNAL_FAILED = 8, DUPLICATE_HITS = 9, COUNTERS = 10 };
enum event_kind { EVENT_FIRST_CALL = 1, EVENT_INIT = 2, EVENT_ERROR = 3, EVENT_SLOW = 4, EVENT_HIT = 5, EVENT_COMM_END = 6, EVENT_COMM_SEEN = 7,
    EVENT_DYING = 16, EVENT_STOP = 17, EVENT_CONTINUE = 18, EVENT_OOM = 19, EVENT_EXEC = 20 };

/* Where a call's facts stand among its arguments; filled by user space from the library's table (kernel/libraries). Argument
 * numbers count from 1; 0 means absent. */
struct site {
    u8 backend, kind, comm_source, id_source;
    u16 op;
    u8 count_arg, dtype_arg, comm_arg, out_arg, size_arg, rank_arg, id_arg, result;
    u16 elements_offset, width_offset, tag_offset;   /* into gloo's options, 0: this version's layout is unknown */
    u32 layout;                                      /* the file's entry in map layouts; 0: none */
};

/* Where a communicator keeps who it is, from the file's own debug information. */
struct layout { u32 known, rank, size, identity; };

struct stat_key { u32 tgid; u16 op; u8 backend; u8 result; u64 comm; };
struct stat { u64 calls, bytes, total_ns, last_ns, buckets[BUCKETS]; };

struct inflight_key { u32 tid; u32 site; };
struct inflight { u64 started_ns, comm, bytes, comm_address, out_address, ip, sp; u32 tgid; u32 seq; s32 rank; s32 size; u16 op; u8 backend; u8 pad[5]; };

struct comm_key { u32 tgid; u32 backend; u64 address; };
struct arrival { u64 at_ns; u32 seq; u16 op; u16 pad; };
struct comm { u64 id, born_ns; s32 rank, size; u32 next; u8 known, ended, aligned, pad; u32 timeout_ms, pad2; struct arrival arrivals[ARRIVALS]; };

struct group_key { u32 tgid; u32 ordinal; };

/* The customer's map: which rank, at which point, from when till when, how long (ms) and how often (ppm). Keyed by tgid. */
struct fault {
    u64 id, start_ns, end_ns, seed, seen, hits, max_hits, after;
    u64 on_ns, period_ns;   /* 0: always; else in force for the first on_ns of each period */
    u32 ms, ppm, rank;
    u16 point;      /* an op, or 0: any */
    u8 backend;     /* 0: any */
    u8 signal;
    u32 action;
    u32 pad;
};

struct held { u64 at_ns, fault, ip, sp, index; u32 tgid; u16 op; u8 backend; u8 pad; };

struct event {
    u64 at_ns, comm, bytes, duration_ns, fault;
    u32 tgid, tid, site, seq;
    s32 rank, size, value, other;    /* value: result or signal; other: the sender's tgid, or the index of a hit */
    u16 kind, op;
    u8 backend, result;
    u8 pad[2];
    char comm_name[16];
};

struct settings { u64 slow_ns; };
#endif
