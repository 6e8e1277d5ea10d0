"""Agent: what the library inside a rank says and is told.

Anybody on the host may call this, each process for itself: the pid and start time of a request must be those that the caller's token
proves. It names no fault, changes nothing that probes or the environment say, hears only of jobs of its own uid, and every text that it
brings is bounded and marked as the agent's.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from singularityd.api import convert
from singularityd.api.identity.caller import CALLER, Caller
from singularityd.api.limits import Bucket, Buckets, Places
from singularityd.api.ports import Bus, RankRegistry
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc
from singularityd.errors import BadOption, Busy, NoSuchRank, NotAllowed
from singularityd.model import Event, Rank

TOLD = frozenset(
    {
        "rank_dying",
        "rank_stopped",
        "rank_continued",
        "rank_oom_killed",
        "rank_exec",
        "rank_exited",
        "fault_armed",
        "fault_hit",
        "fault_held",
        "fault_released",
        "fault_ended",
        "fault_refused",
    }
)
"""Kinds that a rank is told of the ranks of its job."""
REPORTS = ("round", "snapshot", "bits", "healing", "recovery")
LONGEST_TEXT, LONGEST_JOB = 1000, 1024
MOST_FIELDS, LONGEST_VALUE = 32, 256
REPORT_RATE, REPORT_BURST = 20.0, 200
"""Of one process."""
TOTAL_RATE, TOTAL_BURST = 100.0, 1000
"""Of all: events that anybody may cause must not push everything else out of the recorder within seconds."""
MOST_TOLD = 4096
WATCHES = 4
"""Streams that one process may have open: one, and some that are being given up."""
UNKNOWN_JOB = "unknown"
_KEY = re.compile(r"[a-z][a-z0-9_]{0,31}")
_LARGEST = 2**31 - 1


class _Key(NamedTuple):
    pid: int
    start_time: int


class Agent(node_pb2_grpc.AgentServicer):
    """Register, Watch, Report."""

    def __init__(
        self,
        *,
        ranks: RankRegistry,
        bus: Bus,
        kinds: Mapping[str, str],
        start_time: Callable[[int], Awaitable[int | None]],
        backlog: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ranks = ranks
        self._bus = bus
        self._kinds = kinds
        self._start_time = start_time
        self._backlog = backlog
        self._clock = clock
        self._each = Buckets(REPORT_RATE, REPORT_BURST)
        self._registrations = Bucket(TOTAL_RATE, TOTAL_BURST)
        self._reports = Bucket(TOTAL_RATE, TOTAL_BURST)
        self._told: OrderedDict[_Key, tuple[Rank, bool, str]] = OrderedDict()
        self._watches: dict[_Key, Places] = {}

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:
        """A rank's own word on who it is. Refused words are no error: the answer says what is known instead, and why.

        Raises NoSuchRank for a process that is not there or has another start time, BadOption for words that cannot be.
        """
        _check_claim(request)
        key = _speaker(request, CALLER.get())
        self._count(self._registrations, key, "registers")
        pid = await self._live(key)
        rank = self._ranks.claim(
            pid,
            job=request.job or None,
            rank=request.rank,
            world=request.world,
            local_rank=request.local_rank if request.HasField("local_rank") else None,
        )
        accepted = _taken(rank, request)
        self._tell(rank, request, accepted)
        why = "" if accepted else "; ".join(self._ranks.notes(pid)) or "what is known of the process says otherwise"
        return pb.RegisterReply(rank=convert.rank(rank), accepted=accepted, why=convert.text(why))

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Event]:
        """What happens to the ranks of the caller's job; where that is unknown, to the caller alone.

        Headers are sent when nothing that happens from then on is missed. Raises NoSuchRank, BadOption, ResumeLost and Busy.
        """
        caller = CALLER.get()
        rank = self._known(*_speaker(request, caller))
        after = self._bus.recorder.resume(request.token) if request.token else self._bus.recorder.last
        key = _Key(rank.pid, rank.start_time)
        places = self._watches.setdefault(key, Places(WATCHES, "streams of this process"))
        with places.place():
            subscription = self._bus.subscribe(after=after, kinds=TOLD, limit=self._backlog)
            try:
                await context.send_initial_metadata(())
                async for event in subscription:
                    if self._concerns(event, rank) and (caller is None or self._may_hear(event, caller)):
                        yield convert.event(
                            event, token=self._bus.recorder.token(event.sequence), severity=self._kinds.get(event.kind, "info")
                        )
            finally:
                subscription.close()
                if places.taken == 1:  # the last one: this is still inside its place
                    self._watches.pop(key, None)

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportReply:
        """A round, a snapshot, bit widths, a healing action or a recovery, as an event. Raises NoSuchRank, BadOption, Busy."""
        _check_report(request)
        rank = self._known(*_speaker(request, CALLER.get()))
        self._count(self._reports, _Key(rank.pid, rank.start_time), "reports")
        self._bus.publish(self._event("agent_report", rank, request.text or request.kind, {**request.fields, "report": request.kind}))
        return pb.ReportReply()

    def _count(self, total: Bucket, key: _Key, does: str) -> None:
        """Raises Busy for one process that does it too often, and for all of them together."""
        if not self._each.take((does, key)):
            raise Busy(f"process {key.pid} {does} more than {REPORT_RATE:g} times a second", hint="gather: once a second is enough")
        if not total.take():
            raise Busy(f"this host's agents together ask for more than {TOTAL_RATE:g} of these a second", hint="try again in a moment")

    def _tell(self, rank: Rank, request: pb.RegisterRequest, accepted: bool) -> None:
        """A registration that says nothing new is no event."""
        key, news = _Key(rank.pid, rank.start_time), (rank, accepted, request.agent_version)
        if self._told.get(key) == news:
            return
        self._told[key] = news
        if len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)
        self._bus.publish(self._event("agent_registered", rank, _registered(rank, request, accepted), {"agent": request.agent_version}))

    def _concerns(self, event: Event, watcher: Rank) -> bool:
        """The watcher's job is looked up each time: it may become known, or known better, meanwhile."""
        rank = self._ranks.by_pid(watcher.pid)
        if rank is None or rank.start_time != watcher.start_time:
            rank = watcher
        if event.kind not in TOLD:  # events_dropped: something is missing here
            return True
        return event.pid == rank.pid or (rank.job != UNKNOWN_JOB and event.job == rank.job)

    def _may_hear(self, event: Event, caller: Caller) -> bool:
        """Two users may give their jobs one name: what happens to a process is told to its own user only."""
        if event.kind not in TOLD or event.pid == caller.pid:
            return True
        rank = self._ranks.by_pid(event.pid) if event.pid else None
        return rank is not None and rank.uid == caller.uid

    def _known(self, pid: int, start_time: int) -> Rank:
        """The registry's process of that pid, as the host or as the process itself counts. Raises NoSuchRank."""
        rank = self._ranks.by_pid(pid)
        if rank is not None and rank.start_time == start_time and rank.state != "exited":
            return rank
        inside = [one for one in self._ranks.all() if one.start_time == start_time and pid in one.namespace_pids and one.state != "exited"]
        if len(inside) == 1:
            return inside[0]
        raise NoSuchRank(f"process {pid} with start time {start_time} is not known", hint="register it first")

    async def _live(self, key: _Key) -> int:
        """The host's pid of a live process: one that the registry knows, else one that the executor sees. Raises NoSuchRank."""
        pid, start_time = key
        try:
            return self._known(pid, start_time).pid
        except NoSuchRank:
            seen = await self._start_time(pid)
        if seen is None:
            raise NoSuchRank(f"there is no process {pid} on this host", hint="in a container the daemon must have found the process first")
        if seen != start_time:
            raise NoSuchRank(f"process {pid} did not start at {start_time}", hint="the start time is field 22 of /proc/self/stat, in ticks")
        return pid

    def _event(self, kind: str, rank: Rank, text: str, fields: Mapping[str, str]) -> Event:
        return Event(
            kind=kind,
            at=self._clock(),
            text=text,
            job=rank.job,
            rank=rank.rank,
            pid=rank.pid,
            fields={name: value for name, value in fields.items() if value},
        )


def _speaker(request: Any, caller: Caller | None) -> _Key:
    """The process that speaks: the proven one; the named one where root speaks by the control socket without a token.

    Raises NotAllowed for a request in another's name. In a container a process may name itself by any of the pids it has.
    """
    if caller is None:
        return _Key(request.pid, request.start_time_ticks)
    if request.pid not in (caller.pid, *caller.namespace_pids) or request.start_time_ticks != caller.start_time:
        raise NotAllowed(
            f"process {caller.pid} speaks for process {request.pid} with start time {request.start_time_ticks}",
            hint="each process registers itself: getpid() and field 22 of /proc/self/stat",
        )
    return _Key(caller.pid, caller.start_time)


def _taken(rank: Rank, request: pb.RegisterRequest) -> bool:
    """Whether everything that was claimed is what is known now; the registry takes a claim whole or not at all."""
    claimed: dict[str, object] = {"rank": request.rank, "world": request.world}
    if request.job:
        claimed["job"] = request.job
    if request.HasField("local_rank"):
        claimed["local_rank"] = request.local_rank
    return all(getattr(rank, name) == value for name, value in claimed.items())


def _registered(rank: Rank, request: pb.RegisterRequest, accepted: bool) -> str:
    says = f"the agent of process {rank.pid} registered as rank {request.rank} of {request.world}"
    if accepted:
        return f"{says} in job {rank.job}"
    return f"{says}, which is not believed: it is known as {'no rank' if rank.rank is None else f'rank {rank.rank}'} of job {rank.job}"


def _check_process(pid: int, start_time: int) -> None:
    if not 0 < pid <= _LARGEST or start_time <= 0:
        raise BadOption(f"process {pid} with start time {start_time} cannot be", hint="send getpid() and field 22 of /proc/self/stat")


def _check_claim(request: pb.RegisterRequest) -> None:
    _check_process(request.pid, request.start_time_ticks)
    if not 0 <= request.rank < request.world <= _LARGEST:
        raise BadOption(f"rank {request.rank} of {request.world} cannot be", hint="ranks count from 0 to world - 1")
    if request.HasField("local_rank") and not 0 <= request.local_rank < request.world:
        raise BadOption(f"local rank {request.local_rank} of {request.world} cannot be", hint="leave it out where it is not known")
    _check_line("job", request.job, LONGEST_JOB)
    _check_line("agent_version", request.agent_version, LONGEST_VALUE)


def _check_report(request: pb.ReportRequest) -> None:
    _check_process(request.pid, request.start_time_ticks)
    if request.kind not in REPORTS:
        raise BadOption(f"{request.kind[:40]!r} is no kind of report", hint=f"there are: {', '.join(REPORTS)}")
    _check_line("text", request.text, LONGEST_TEXT)
    if len(request.fields) > MOST_FIELDS:
        raise BadOption(f"a report of {len(request.fields)} fields is too large", hint=f"send at most {MOST_FIELDS}")
    for key, value in request.fields.items():
        if not _KEY.fullmatch(key) or key == "report":
            raise BadOption(f"{key[:40]!r} cannot name a field", hint="a name has a-z, 0-9 and _, at most 32; `report` is taken")
        _check_line(key, value, LONGEST_VALUE)


def _check_line(name: str, text: str, longest: int) -> None:
    if len(text) > longest or not text.isprintable():
        raise BadOption(f"{name} is no line of at most {longest} characters", hint="send one line of plain text")
