"""The values that cross borders inside the front: what was seen, who is who, what was asked.

Everything here is immutable and holds no behaviour beyond naming. `kernel` does not import this module (it stays free of
third-party packages); `probes` turns the kernel's structs into these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["running", "stopped", "dying", "exited"]
Source = Literal["probe", "ras", "environment", "agent", "unknown"]
Confidence = Literal["high", "medium", "low"]
Visibility = Literal["collectives", "enqueue", "graph", "none"]


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """One collective library mapped by a process, as the executor found it."""

    backend: str
    """`nccl` or `gloo`."""
    path: str
    """As the process sees it, ` (deleted)` included; for people only."""
    device: int
    inode: int
    version: str
    """For example `2.32.3`; empty where it is not known."""
    sites: int
    """Probe sites attached in this file; 0 with a `problem` where attaching failed."""
    problem: str = ""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this host that takes part, or may take part, in a job's collectives."""

    pid: int
    start_time: int
    """Clock ticks after boot, field 22 of /proc/PID/stat: with the pid it names one process for ever."""
    job: str = "unknown"
    rank: int | None = None
    """Global rank in the job; None is unknown and is never shown as 0."""
    world: int | None = None
    local_rank: int | None = None
    uid: int = -1
    name: str = ""
    """The kernel's short name of the process."""
    namespace_pids: tuple[int, ...] = ()
    """NSpid: the pid in each namespace, outermost first; the last is what the process calls itself."""
    source: Source = "unknown"
    confidence: Confidence = "low"
    scheme: str = ""
    """What wrote the environment: torchrun, slurm, openmpi, pmi, jax; empty for other sources."""
    libraries: tuple[Library, ...] = ()
    state: State = "running"
    visibility: Visibility = "none"
    drill: bool = False
    """The job asks to be disturbed in drills: SINGULARITY_DRILL=1 in its environment."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, worth telling a person. Kinds are listed in `observe.kinds`."""

    kind: str
    at: float
    """Unix time, seconds."""
    text: str
    """One line for a person, complete without the other fields."""
    sequence: int = 0
    """Set by the recorder, from 1; a client resumes after the last one it saw."""
    job: str = ""
    rank: int | None = None
    pid: int | None = None
    backend: str = ""
    op: str = ""
    fault: str = ""
    fields: dict[str, str] = {}


class CallStats(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's aggregate of one (process, backend, op, communicator, result) since the probes were attached."""

    pid: int
    backend: str
    op: str
    comm: str
    """First 8 hex digits of the hash of the unique id (nccl), the group's ordinal (gloo), or `unknown`."""
    result: str
    """`ok`, `in_progress`, `error` (gloo), `posted`, or NCCL's own name such as `invalid_argument`."""
    calls: int
    bytes: int
    seconds: float
    """Sum of the durations."""
    last_call: float
    """Unix time of the latest end."""
    buckets: tuple[int, ...]
    """Bucket i: calls that took less than 2**i microseconds and not less than 2**(i-1); the last is open. Not cumulative."""


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A call that has begun and not returned."""

    pid: int
    tid: int
    backend: str
    op: str
    comm: str
    sequence: int
    bytes: int
    seconds: float
    """Age when it was read."""
    fault: str = ""
    """The fault that holds this thread, if one does."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """When one process entered one collective of one communicator; `at` is CLOCK_MONOTONIC in seconds."""

    pid: int
    backend: str
    comm: str
    comm_rank: int | None
    comm_size: int | None
    sequence: int
    op: str
    at: float


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the kernel's tables."""

    stats: tuple[CallStats, ...] = ()
    in_flight: tuple[InFlight, ...] = ()
    arrivals: tuple[Arrival, ...] = ()


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How late each rank of this host entered the newest collective that all of them have entered."""

    job: str
    backend: str
    comm: str
    op: str
    sequence: int
    lateness: dict[int, float]
    """Global rank -> seconds after the first of them."""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What was tried on this machine and what came of it."""

    name: str
    state: Literal["yes", "no", "unknown"]
    detail: str
    """What was done and what the kernel answered."""
    remedy: str = ""
    """What an administrator can do; empty where nothing is needed."""


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request for a fault; the customer's triple is (point, milliseconds, probability)."""

    pattern: str
    rank: int
    job: str = ""
    """Empty: the host's only job."""
    point: str = "any"
    """An op (`allreduce`) or `any`."""
    backend: str = ""
    """`nccl`, `gloo`, or empty for any."""
    milliseconds: int = 0
    """How long each hit call is held; 0: until the fault's deadline."""
    probability: float = 100.0
    """Percent of the calls, greater than 0 and at most 100."""
    duration: float = 10.0
    """Seconds from arming to the deadline."""
    seed: int = 0
    count: int = 0
    """At most so many hits; 0: no limit."""
    after: int = 0
    """So many of the meant calls are left alone first."""
    jitter: int = 0
    """Milliseconds around `milliseconds`."""
    distribution: str = "fixed"
    """Of the delays: `fixed`, `uniform`, `normal` or `exponential`."""
    result: str = ""
    """The call is skipped and returns this result of its library, for example `ncclSystemError`; empty: it is made."""
    on: int = 0
    """Milliseconds of each turn in which the fault is in force; 0: always."""
    off: int = 0
    """Milliseconds of each turn in which it is not."""
    percent: float = 0.0
    """Share of its speed that a slowed rank keeps."""
    period: int = 0
    """Milliseconds of one turn of a slowed rank; 0: by its number of threads."""
    may_kill_job: bool = False
    """Whoever asked knows that the job's own time-out may come first."""
    reason: str = ""


FaultMode = Literal["off", "admin", "drill", "open"]
"""Setting `faults.mode`: who may inject into what."""
FaultState = Literal["arming", "armed", "ended", "refused"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault as the journal knows it."""

    id: str
    """`f` and a number, for example `f12`; never used again on this host."""
    spec: FaultSpec
    state: FaultState
    job: str = ""
    pid: int = 0
    start_time: int = 0
    mechanism: str = ""
    who: str = ""
    """uid and pid of the caller as the kernel gives them, or the socket's role where it does not."""
    created_at: float = 0.0
    armed_at: float = 0.0
    ended_at: float = 0.0
    hits: int = 0
    seen: int = 0
    """Calls at the fault's point while it was armed, hit or not; known when it has ended."""
    ending: str = ""
    """Why it ended: `deadline`, `cleared`, `rank exited`, `executor died`, `front restarted`, ... ; or why it was refused."""
    campaign: str = ""
    """The campaign it belongs to, for example `c3`; empty: asked for by itself."""
