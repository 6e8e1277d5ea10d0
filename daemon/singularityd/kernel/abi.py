"""The structs of bpf/singularity.h as the Python halves see them; tests/unit/test_abi.py compares the two, field by field."""

from __future__ import annotations

import ctypes as c

BUCKETS = 28
ARRIVALS = 64
SITES = 4096
LAYOUTS = 256

BACKENDS = {1: "nccl", 2: "gloo"}
BACKEND_CODES = {name: code for code, name in BACKENDS.items()}

ACTION_HOLD, ACTION_KILL, ACTION_FREEZE, ACTION_DUTY = 0, 1, 2, 3
"""What is done to a hit: its thread is stopped; the process is killed. To the whole process, without hits: stopped; stopped in turns."""
ACTIONS = (ACTION_HOLD, ACTION_KILL, ACTION_FREEZE, ACTION_DUTY)
SITE_CALL, SITE_RETURN, SITE_END, SITE_POST = 1, 2, 3, 4
COMM_NONE, COMM_ARGUMENT, COMM_GLOO_OPTIONS = 0, 1, 2
ID_NONE, ID_BY_VALUE, ID_POINTER, ID_SPLIT = 0, 1, 2, 3

# What a call does, whatever library it belongs to. The numbers are ABI between the halves and never reused.
OPS = {
    1: "allreduce",
    2: "reduce",
    3: "broadcast",
    4: "allgather",
    5: "reduce_scatter",
    6: "alltoall",
    7: "gather",
    8: "scatter",
    9: "send",
    10: "recv",
    11: "barrier",
    12: "put_signal",
    13: "signal",
    14: "wait_signal",
    20: "group_start",
    21: "group_end",
    30: "comm_init",
    31: "comm_split",
    32: "comm_finalize",
    33: "comm_destroy",
    34: "comm_abort",
    35: "comm_revoke",
    36: "comm_shrink",
    37: "comm_grow",
    63: "other",
}
OP_CODES = {name: code for code, name in OPS.items()}

COUNTERS = (
    "events_submitted",
    "events_dropped",
    "process_submitted",
    "process_dropped",
    "stats_full",
    "inflight_full",
    "comms_full",
    "end_unmatched",
    "signal_failed",
    "duplicate_hits",
)

EVENT_FIRST_CALL, EVENT_INIT, EVENT_ERROR, EVENT_SLOW, EVENT_HIT, EVENT_COMM_END, EVENT_COMM_SEEN = 1, 2, 3, 4, 5, 6, 7
EVENT_DYING, EVENT_STOP, EVENT_CONTINUE, EVENT_OOM, EVENT_EXEC = 16, 17, 18, 19, 20


class Site(c.Structure):
    """struct site: where a call's facts stand among its arguments."""

    _fields_ = (
        ("backend", c.c_uint8),
        ("kind", c.c_uint8),
        ("comm_source", c.c_uint8),
        ("id_source", c.c_uint8),
        ("op", c.c_uint16),
        ("count_arg", c.c_uint8),
        ("dtype_arg", c.c_uint8),
        ("comm_arg", c.c_uint8),
        ("out_arg", c.c_uint8),
        ("size_arg", c.c_uint8),
        ("rank_arg", c.c_uint8),
        ("id_arg", c.c_uint8),
        ("result", c.c_uint8),
        ("elements_offset", c.c_uint16),
        ("width_offset", c.c_uint16),
        ("tag_offset", c.c_uint16),
        ("layout", c.c_uint32),
    )


class Layout(c.Structure):
    """struct layout: offsets in a communicator."""

    _fields_ = (("known", c.c_uint32), ("rank", c.c_uint32), ("size", c.c_uint32), ("identity", c.c_uint32))


class StatKey(c.Structure):
    """struct stat_key."""

    _fields_ = (("tgid", c.c_uint32), ("op", c.c_uint16), ("backend", c.c_uint8), ("result", c.c_uint8), ("comm", c.c_uint64))


class Stat(c.Structure):
    """struct stat: the kernel's aggregate."""

    _fields_ = (
        ("calls", c.c_uint64),
        ("bytes", c.c_uint64),
        ("total_ns", c.c_uint64),
        ("last_ns", c.c_uint64),
        ("buckets", c.c_uint64 * BUCKETS),
    )


class InflightKey(c.Structure):
    """struct inflight_key."""

    _fields_ = (("tid", c.c_uint32), ("site", c.c_uint32))


class Inflight(c.Structure):
    """struct inflight: a call that has begun."""

    _fields_ = (
        ("started_ns", c.c_uint64),
        ("comm", c.c_uint64),
        ("bytes", c.c_uint64),
        ("comm_address", c.c_uint64),
        ("out_address", c.c_uint64),
        ("ip", c.c_uint64),
        ("sp", c.c_uint64),
        ("tgid", c.c_uint32),
        ("seq", c.c_uint32),
        ("rank", c.c_int32),
        ("size", c.c_int32),
        ("op", c.c_uint16),
        ("backend", c.c_uint8),
        ("pad", c.c_uint8 * 5),
    )


class CommKey(c.Structure):
    """struct comm_key."""

    _fields_ = (("tgid", c.c_uint32), ("backend", c.c_uint32), ("address", c.c_uint64))


class ArrivalSlot(c.Structure):
    """struct arrival."""

    _fields_ = (("at_ns", c.c_uint64), ("seq", c.c_uint32), ("op", c.c_uint16), ("pad", c.c_uint16))


class Comm(c.Structure):
    """struct comm: a communicator of one process."""

    _fields_ = (
        ("id", c.c_uint64),
        ("born_ns", c.c_uint64),
        ("rank", c.c_int32),
        ("size", c.c_int32),
        ("next", c.c_uint32),
        ("known", c.c_uint8),
        ("ended", c.c_uint8),
        ("aligned", c.c_uint8),
        ("pad", c.c_uint8),
        ("timeout_ms", c.c_uint32),
        ("pad2", c.c_uint32),
        ("arrivals", ArrivalSlot * ARRIVALS),
    )


class GroupKey(c.Structure):
    """struct group_key."""

    _fields_ = (("tgid", c.c_uint32), ("ordinal", c.c_uint32))


class FaultEntry(c.Structure):
    """The value of map inject_config, keyed by tgid."""

    _fields_ = (
        ("id", c.c_uint64),
        ("start_ns", c.c_uint64),
        ("end_ns", c.c_uint64),
        ("seed", c.c_uint64),
        ("seen", c.c_uint64),
        ("hits", c.c_uint64),
        ("max_hits", c.c_uint64),
        ("after", c.c_uint64),
        ("on_ns", c.c_uint64),
        ("period_ns", c.c_uint64),
        ("ms", c.c_uint32),
        ("ppm", c.c_uint32),
        ("rank", c.c_uint32),
        ("point", c.c_uint16),
        ("backend", c.c_uint8),
        ("signal", c.c_uint8),
        ("action", c.c_uint32),
        ("pad", c.c_uint32),
    )


class Held(c.Structure):
    """The value of map held, keyed by tid: the call whose thread was asked to stop."""

    _fields_ = (
        ("at_ns", c.c_uint64),
        ("fault", c.c_uint64),
        ("ip", c.c_uint64),
        ("sp", c.c_uint64),
        ("index", c.c_uint64),
        ("tgid", c.c_uint32),
        ("op", c.c_uint16),
        ("backend", c.c_uint8),
        ("pad", c.c_uint8),
    )


class KernelEvent(c.Structure):
    """One record of the ring buffers."""

    _fields_ = (
        ("at_ns", c.c_uint64),
        ("comm", c.c_uint64),
        ("bytes", c.c_uint64),
        ("duration_ns", c.c_uint64),
        ("fault", c.c_uint64),
        ("tgid", c.c_uint32),
        ("tid", c.c_uint32),
        ("site", c.c_uint32),
        ("seq", c.c_uint32),
        ("rank", c.c_int32),
        ("size", c.c_int32),
        ("value", c.c_int32),
        ("other", c.c_int32),
        ("kind", c.c_uint16),
        ("op", c.c_uint16),
        ("backend", c.c_uint8),
        ("result", c.c_uint8),
        ("pad", c.c_uint8 * 2),
        ("comm_name", c.c_char * 16),
    )


class Settings(c.Structure):
    """struct settings."""

    _fields_ = (("slow_ns", c.c_uint64),)
