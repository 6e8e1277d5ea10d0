"""The ranks of this host: evidence comes in from the executor, the probes, NCCL's RAS and the agents; ranks come out.

All methods run on the front's loop thread. Evidence may come in any order: a call before its process, a child before its parent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import Literal

import msgspec

from singularityd.model import Library, Rank, State

from . import tree
from .evidence import Claim, Comm, CommKind, Evidence, identity
from .memory import RankMemory
from .ras import RasRank
from .resolve import members
from .resolve import resolve as resolve_rank
from .tree import Key

_MOST_EARLY = 4096
# An nccl communicator is told by 8 hex digits of its id's hash, a gloo group by its ordinal.
_NCCL_NAME = re.compile(r"[0-9a-f]{8}")

Callback = Callable[[Rank, Rank | None], None]


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process that maps a collective library, as the executor read it from /proc."""

    pid: int
    start_time: int
    parent: int
    """The parent's pid."""
    uid: int
    name: str
    namespace_pids: tuple[int, ...]
    environ: dict[str, str]
    """Only the allow-listed identity variables."""


class RankRegistry:
    """Which process is which rank of which job, and how we know."""

    def __init__(self, *, memory: RankMemory | None = None, clock: Callable[[], float] = time.time, expire_after: float = 300.0) -> None:
        self._memory = memory
        self._clock = clock
        self._expire_after = expire_after
        self._processes: dict[Key, Evidence] = {}
        self._current: dict[int, Evidence] = {}
        self._early: dict[int, Evidence] = {}
        self._known: dict[Key, Rank] = {}
        self._shown: tuple[Rank, ...] = ()
        self._told: dict[Key, Rank] = {}
        self._callbacks: list[Callback] = []

    # What comes in

    def observe_process(self, facts: ProcessFacts) -> Rank:
        """A process was found, or has exec'ed."""
        process = self._process(facts.pid, facts.start_time)
        if not process.observed:
            process.parent = facts.parent  # the first word: an orphan is given to pid 1, and stays its parent's child
        process.observed = True
        process.uid, process.name, process.namespace_pids = facts.uid, facts.name, facts.namespace_pids
        process.read_environment(facts.environ)
        return self._changed(process)

    def observe_library(self, pid: int, start_time: int, library: Library) -> Rank | None:
        """A library was found in a process, or the state of its probes changed."""
        process = self._process(pid, start_time)
        process.libraries[library.path, library.device, library.inode] = library
        return self._changed(process)

    def observe_init(
        self, pid: int, *, comm: str, comm_rank: int | None, comm_size: int | None, backend: Literal["", "nccl", "gloo"] = ""
    ) -> Rank | None:
        """A communicator was joined (nccl), or a gloo context was seen in a call; without `backend` the form of the name tells."""
        process = self._of(pid)
        if process is None:
            return None
        process.joined = True
        kind: CommKind = backend or ("nccl" if _NCCL_NAME.fullmatch(comm) else "gloo")
        if comm_rank is not None and comm_size is not None:
            self._learn(process, Comm(kind, comm, comm_rank, comm_size))
        return self._changed(process)

    def observe_calls(self, pids: Collection[int]) -> None:
        """These processes make collective calls. Cheap when it is not news."""
        news = [process for pid in pids if (process := self._of(pid)) is not None and not process.calls]
        for process in news:
            process.calls = True
        if news:
            self._refresh()

    def observe_ras(self, ranks: Iterable[RasRank]) -> None:
        """What NCCL's own RAS service says of the processes of this host."""
        for said in ranks:
            process = self._by_any_pid(said.pid)
            if process is not None:
                process.joined = True
                self._learn(process, Comm("ras", said.comm, said.rank, said.size))
        self._refresh()

    def claim(self, pid: int, *, job: str | None, rank: int | None, world: int | None, local_rank: int | None) -> Rank:
        """What an agent says of its own process; it fills what is unknown and overrules nothing. `notes(pid)` says what was refused."""
        process = self._of(pid) or self._begin_early(pid)
        process.claim = Claim(job or "", rank, world, local_rank)
        return self._changed(process)

    def observe_state(self, pid: int, state: State) -> Rank | None:
        """The process was stopped, continued, or has begun to die."""
        process = self._current.get(pid)
        if process is None or process.state == "exited":
            return None
        if state == "exited":
            return self._end(process, "")
        if process.state == "dying":
            return process.rank()  # nothing that is dying runs again
        process.state = state
        return self._changed(process)

    def observe_exit(self, pid: int, start_time: int, reason: str) -> Rank | None:
        """The process exited; `reason` is for people. A start time of 0 means the process that has the pid now."""
        process = self._processes.get((pid, start_time)) if start_time else self._current.get(pid)
        self._early.pop(pid, None)
        if process is None or process.state == "exited":
            return None
        return self._end(process, reason)

    def expire(self) -> list[Rank]:
        """Drop what exited `expire_after` seconds ago; returns the ranks among it."""
        horizon = self._clock() - self._expire_after
        gone = [process for process in self._processes.values() if process.state == "exited" and process.ended_at <= horizon]
        shown = {(rank.pid, rank.start_time) for rank in self._shown}
        dropped = [process.rank() for process in gone if process.key in shown]
        for process in gone:
            del self._processes[process.key]
            self._told.pop(process.key, None)
            if self._current.get(process.pid) is process:
                del self._current[process.pid]
        for pid in [pid for pid, early in self._early.items() if early.since <= horizon]:
            del self._early[pid]
        if gone:
            self._refresh()
        if self._memory is not None:
            self._memory.flush()
        return dropped

    # What comes out

    def by_pid(self, pid: int) -> Rank | None:
        """Any known process, launchers and data-loader workers included; of a pid used twice, the later process."""
        process = self._current.get(pid)
        return self._known.get(process.key) if process is not None else None

    def notes(self, pid: int) -> tuple[str, ...]:
        """What was odd in what is known of a process: unreadable values, contradictions, refused claims, how it ended."""
        process = self._current.get(pid) or self._early.get(pid)
        if process is None:
            return ()
        return (*identity(process).notes, *((f"exited: {process.ending}",) if process.ending else ()))

    def all(self) -> tuple[Rank, ...]:
        """The ranks, by job and rank; an exited one until it expires or another process takes its place."""
        return self._shown

    def jobs(self) -> dict[str, tuple[Rank, ...]]:
        """The ranks of `all()` by job."""
        jobs: dict[str, tuple[Rank, ...]] = {}
        for rank in self._shown:
            jobs[rank.job] = (*jobs.get(rank.job, ()), rank)
        return jobs

    def resolve(self, rank: int, job: str = "") -> Rank:
        """The live process that is that rank. Raises NoSuchRank, NoSuchJob or AmbiguousJob, with what there is and what to do."""
        return resolve_rank(self.jobs(), rank, job, lambda gone: self._processes[gone.pid, gone.start_time].ending)

    def members(self, job: str = "") -> tuple[Rank, ...]:
        """The live ranks of a job, or of the only one. Raises NoSuchRank, NoSuchJob or AmbiguousJob."""
        return members(self.jobs(), job)

    def subscribe(self, callback: Callback) -> None:
        """Call `callback(new, old)` on each change of a rank that is shown; `old` is None when it is shown for the first time."""
        self._callbacks.append(callback)

    # Inside

    def _process(self, pid: int, start_time: int) -> Evidence:
        """The process, made if new; a new holder of a pid ends the old one, whose exit was missed."""
        known = self._processes.get((pid, start_time))
        if known is not None:
            return known
        process = Evidence(pid, start_time, since=self._clock())
        self._processes[process.key] = process
        holder = self._current.get(pid)
        if holder is not None and holder.start_time > start_time:
            process.state, process.ended_at = "exited", self._clock()  # late news of an earlier process
            return process
        if holder is not None and holder.state != "exited":
            self._mark_ended(holder, "its pid has a new process")
        self._current[pid] = process
        if (early := self._early.pop(pid, None)) is not None:
            process.absorb(early)
        if self._memory is not None:
            process.comms |= self._memory.recall(pid, start_time)
            process.joined |= bool(process.comms)
            self._memory.remember(pid, start_time, _lasting(process))
        return process

    def _of(self, pid: int) -> Evidence | None:
        """Where evidence that names only a pid goes; None for a process that exited: tables of the kernel keep rows of the dead."""
        process = self._current.get(pid)
        if process is None:
            return self._begin_early(pid)
        return None if process.state == "exited" else process

    def _begin_early(self, pid: int) -> Evidence:
        """Keep evidence of a pid whose process was not reported yet; the oldest of too many is dropped."""
        if pid not in self._early:
            while len(self._early) >= _MOST_EARLY:
                del self._early[next(iter(self._early))]
            self._early[pid] = Evidence(pid, 0, since=self._clock())
        return self._early[pid]

    def _by_any_pid(self, pid: int) -> Evidence | None:
        """RAS tells the pid that the process itself sees: in a container that is its innermost one, taken only where one process has it."""
        live = [process for process in self._current.values() if process.state != "exited"]
        seen = [process for process in live if (process.namespace_pids or (process.pid,))[-1] == pid]
        return seen[0] if len(seen) == 1 else None

    def _learn(self, process: Evidence, comm: Comm) -> None:
        if not comm.possible() or comm in process.comms:
            return
        process.comms.add(comm)
        if self._memory is not None and process.start_time:
            self._memory.remember(process.pid, process.start_time, _lasting(process))

    def _end(self, process: Evidence, reason: str) -> Rank:
        self._mark_ended(process, reason)
        return self._changed(process)

    def _mark_ended(self, process: Evidence, reason: str) -> None:
        process.state, process.ending, process.ended_at = "exited", reason, self._clock()
        if self._memory is not None:
            self._memory.forget(process.pid, process.start_time)

    def _changed(self, process: Evidence) -> Rank:
        self._refresh()
        return process.rank()

    def _refresh(self) -> None:
        """Choose anew and tell what changed; a host has some hundred processes at most, so this takes well under a millisecond each."""
        known = self._known = {key: process.rank() for key, process in self._processes.items()}
        keys = tree.chosen([_candidate(process, known[key]) for key, process in self._processes.items()])
        self._shown = tuple(sorted((known[key] for key in keys), key=_order))
        changes = [(rank, self._told.get((rank.pid, rank.start_time))) for rank in self._shown]
        changes = [(rank, before) for rank, before in changes if rank != before]
        self._told.update({(rank.pid, rank.start_time): rank for rank, _ in changes})
        for rank, before in changes:
            for callback in self._callbacks:
                callback(rank, before)


def _lasting(process: Evidence) -> set[Comm]:
    """What a probe saw once and would not see again; RAS can be asked again, and gloo tells with every call."""
    return {comm for comm in process.comms if comm.kind == "nccl"}


def _candidate(process: Evidence, rank: Rank) -> tree.Candidate:
    return tree.Candidate(
        key=process.key,
        parent=process.parent,
        name=process.name,
        job=rank.job,
        rank=rank.rank,
        depth=process.environment.depth,
        calls=process.calls or process.joined,
        library=bool(process.libraries),
        exited=process.state == "exited",
    )


def _order(rank: Rank) -> tuple[str, bool, int, int, int]:
    return rank.job, rank.rank is None, rank.rank or 0, rank.start_time, rank.pid
