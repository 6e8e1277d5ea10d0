"""Every metric the daemon shows: name, kind, labels and meaning. The page, the OTLP export and docs/metrics.md come from this table.

Names and labels are a frozen surface: a change shows up in tests/data/metrics.golden and in the reference page.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]

CALL = ("job_id", "rank", "comm", "backend", "op")
"""Labels of what belongs to one kind of call. `comm` and `op` are bounded by what a job creates and by kernel.abi.OPS."""

FAULT = ("job_id", "rank", "fault", "pattern", "mechanism")

BOUNDS = tuple(2**power / 1_000_000 for power in range(0, 27, 2))
"""Upper bounds of the histograms, seconds: every second one of the kernel's 27 finite bounds, 1 microsecond to 67 seconds."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric family. The help text is one line; `note` is what only the reference page needs to say."""

    name: str
    """As on the page; counters end in _total."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = "1"
    """UCUM, for OTLP: s, By, or 1."""
    note: str = ""


RANK_INFO = Family(
    name="singularity_rank_info",
    kind="gauge",
    help="Always 1: what is known of a rank of this host and how it is known",
    labels=("job_id", "rank", "world", "local_rank", "source", "confidence", "scheme", "process", "libraries"),
    note="Processes whose rank is unknown are left out. `libraries` names each collective library with its version. Join it by `job_id` "
    "and `rank`.",
)
RANK_UP = Family(
    name="singularity_rank_up",
    kind="gauge",
    help="1 while the rank's process lives (stopped counts as living), 0 from when it dies until it expires",
    labels=("job_id", "rank"),
    note='With rank="unknown": how many such processes live.',
)
RANK_EXITS = Family(
    name="singularity_rank_exits_total",
    kind="counter",
    help="Exits of rank processes by reason",
    labels=("job_id", "rank", "reason"),
)
VISIBILITY = Family(
    name="singularity_visibility",
    kind="gauge",
    help="1 for the level at which the rank's collectives are seen: collectives, enqueue, graph or none",
    labels=("job_id", "rank", "level"),
    note="`enqueue`: a call's duration is the time to enqueue it. `graph`: CUDA-graph replay makes no calls, so silence is not idleness. "
    'With rank="unknown": how many processes are at that level.',
)
FAULT_ACTIVE = Family(
    name="singularity_fault_active",
    kind="gauge",
    help="1 while the fault is armed, 0 from its end until it expires",
    labels=FAULT,
    note="A fault that was refused or is not armed yet has no series.",
)
FAULT_HITS = Family(
    name="singularity_fault_hits_total",
    kind="counter",
    help="Calls that the fault disturbed",
    labels=FAULT,
    note="Armed with 0 hits means that the rank made no such call.",
)
CAPABILITY = Family(
    name="singularity_capability",
    kind="gauge",
    help="1 where this machine can do it, 0 where it cannot, NaN where that could not be tried",
    labels=("name",),
    note="`singularityctl doctor` says what was tried and what to do about it.",
)
PROBES = Family(
    name="singularity_probes_attached",
    kind="gauge",
    help="Probe sites attached",
    labels=("backend",),
)
ATTACH_ERRORS = Family(
    name="singularity_probe_attach_errors_total",
    kind="counter",
    help="Attachments that failed, by reason",
    labels=("reason",),
)
SUBMITTED = Family(
    name="singularity_events_submitted_total",
    kind="counter",
    help="Records offered to a buffer; submitted = received + dropped",
    labels=("buffer",),
)
RECEIVED = Family(
    name="singularity_events_received_total",
    kind="counter",
    help="Records read from a buffer",
    labels=("buffer",),
)
DROPPED = Family(
    name="singularity_events_dropped_total",
    kind="counter",
    help="Records lost because a buffer or table was full",
    labels=("buffer",),
)
BUILD_INFO = Family(
    name="singularity_build_info",
    kind="gauge",
    help="Always 1: the version of the daemon and of its Python",
    labels=("version", "python"),
)
START_TIME = Family(
    name="singularity_start_time_seconds",
    kind="gauge",
    help="Unix time at which the daemon was ready",
    unit="s",
)
RESIDENT = Family(
    name="singularity_process_resident_memory_bytes",
    kind="gauge",
    help="Resident memory of the two halves of the daemon",
    labels=("process",),
    unit="By",
    note="`process` is `executor` (the privileged half) or `front`.",
)
CPU = Family(
    name="singularity_process_cpu_seconds_total",
    kind="counter",
    help="CPU time, user and system, of the two halves of the daemon",
    labels=("process",),
    unit="s",
)
LOOP_LAG = Family(
    name="singularity_event_loop_lag_seconds",
    kind="gauge",
    help="Greatest delay of the front's event loop in the last minute",
    unit="s",
)
QUEUE = Family(
    name="singularity_event_queue",
    kind="gauge",
    help="Events that wait for the slowest subscriber of the event stream",
)
SUBSCRIBERS = Family(
    name="singularity_event_subscribers",
    kind="gauge",
    help="Subscribers of the event stream",
)
SCRAPE = Family(
    name="singularity_scrape_duration_seconds",
    kind="gauge",
    help="Time the previous rendering of this page took",
    unit="s",
    note="Absent until a page has been rendered.",
)
SERIES = Family(
    name="singularity_series",
    kind="gauge",
    help="Series that there are, before the cap",
)
SERIES_DROPPED = Family(
    name="singularity_series_dropped_total",
    kind="counter",
    help="Series left out because of the cap, added up over all renderings",
    note="The setting is `metrics.series`. The families are filled in the order of this page, so the histograms are cut first, and always "
    "the same series of them.",
)
CALLS = Family(
    name="singularity_collective_calls_total",
    kind="counter",
    help="Calls that returned, by result",
    labels=(*CALL, "result"),
    note="`result` is `ok`, `in_progress`, `error` (gloo), `posted` (a send or receive of which only the beginning is seen) or NCCL's own "
    "name such as `invalid_argument`. Calls made before a process was identified stay in `unknown` as well.",
)
BYTES = Family(
    name="singularity_collective_bytes_total",
    kind="counter",
    help="Payload bytes of the calls in singularity_collective_calls_total, as the caller gave them",
    labels=(*CALL, "result"),
    unit="By",
    note="The same labels as the calls, so that one divides by the other: the mean message.",
)
IN_FLIGHT = Family(
    name="singularity_collective_in_flight",
    kind="gauge",
    help="Calls that have begun and not returned",
    labels=CALL,
    note="0 is shown for every kind of call that was ever made.",
)
OLDEST = Family(
    name="singularity_collective_oldest_in_flight_seconds",
    kind="gauge",
    help="Age of the oldest call that has not returned; absent when there is none",
    labels=CALL,
    unit="s",
)
LAST_CALL = Family(
    name="singularity_collective_last_call_timestamp_seconds",
    kind="gauge",
    help="Unix time of the latest return of any call on the communicator",
    labels=("job_id", "rank", "comm", "backend"),
    unit="s",
    note="Without `op`: an operation that is not made any more is no finding, a communicator on which nothing returns is one.",
)
SKEW = Family(
    name="singularity_collective_arrival_skew_seconds",
    kind="gauge",
    help="How much later than the first rank of this host the rank entered the newest collective that all of them entered",
    labels=("job_id", "rank", "comm", "backend"),
    unit="s",
    note="The straggler shows the greatest value here and the shortest call.",
)
ENQUEUE = Family(
    name="singularity_collective_enqueue_seconds",
    kind="histogram",
    help="Time a call of a GPU library took to enqueue its work; not the time of the collective",
    labels=CALL,
    unit="s",
)
SECONDS = Family(
    name="singularity_collective_seconds",
    kind="histogram",
    help="Time a collective took, for libraries where the call is the collective",
    labels=CALL,
    unit="s",
    note="Calls with result `posted` are not in it: their end is not seen.",
)

FAMILIES = (
    BUILD_INFO,
    START_TIME,
    RESIDENT,
    CPU,
    LOOP_LAG,
    QUEUE,
    SUBSCRIBERS,
    SCRAPE,
    SERIES,
    SERIES_DROPPED,
    SUBMITTED,
    RECEIVED,
    DROPPED,
    PROBES,
    ATTACH_ERRORS,
    CAPABILITY,
    RANK_INFO,
    RANK_UP,
    RANK_EXITS,
    VISIBILITY,
    FAULT_ACTIVE,
    FAULT_HITS,
    CALLS,
    BYTES,
    LAST_CALL,
    SKEW,
    OLDEST,
    IN_FLIGHT,
    ENQUEUE,
    SECONDS,
)
"""In the order of the page, which is also the order in which the series cap is spent: what tells most comes first."""

DURATIONS = {"nccl": ENQUEUE, "gloo": SECONDS}
"""What a call's duration means, by backend. A library that is not listed is taken to enqueue, which claims less."""
