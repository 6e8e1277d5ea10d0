"""What is known of one process, and the identity that follows from it.

The identity is computed from all the evidence each time, so the order in which evidence arrives cannot matter. Who wins: a communicator
of the world's size (probe, then RAS), then the environment, then the agent's word; what lost is told in the notes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from singularityd.model import Confidence, Library, Rank, Source, State, Visibility

from .environment import UNKNOWN_JOB, Identity, identify
from .tree import Key

CommKind = Literal["nccl", "ras", "gloo"]
_TRUST: dict[CommKind, int] = {"nccl": 2, "ras": 1, "gloo": 0}


class Comm(msgspec.Struct, frozen=True):
    """One communicator that a process joined, with what it is there."""

    kind: CommKind
    name: str
    rank: int
    size: int

    def possible(self) -> bool:
        """Whether the numbers can be: a probe that read a wrong register must not name a rank."""
        return 0 <= self.rank < self.size


class Claim(msgspec.Struct, frozen=True):
    """What the agent inside the process says of it; None and empty are "says nothing"."""

    job: str
    rank: int | None
    world: int | None
    local_rank: int | None


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that follows from the evidence."""

    job: str = UNKNOWN_JOB
    rank: int | None = None
    world: int | None = None
    local_rank: int | None = None
    source: Source = "unknown"
    confidence: Confidence = "low"
    scheme: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class Evidence:
    """All that was seen of one process. Mutable; the registry owns it, on the loop's thread."""

    pid: int
    start_time: int
    parent: int = 0
    uid: int = -1
    name: str = ""
    namespace_pids: tuple[int, ...] = ()
    environment: Identity = field(default_factory=Identity)
    drill: bool = False
    observed: bool = False
    """Whether the process itself was reported, not only a library or a call of it."""
    libraries: dict[tuple[str, int, int], Library] = field(default_factory=dict)
    comms: set[Comm] = field(default_factory=set)
    joined: bool = False
    """A communicator was joined, its numbers known or not."""
    calls: bool = False
    claim: Claim | None = None
    state: State = "running"
    ending: str = ""
    ended_at: float = 0.0
    since: float = 0.0

    @property
    def key(self) -> Key:
        """(pid, start_time)."""
        return self.pid, self.start_time

    def read_environment(self, environ: dict[str, str]) -> None:
        """Take the variables in; an exec replaces what an earlier image had."""
        self.environment = identify(environ)
        self.drill = environ.get("SINGULARITY_DRILL") == "1"

    def absorb(self, early: Evidence) -> None:
        """Take over what was seen of this pid before the process was reported."""
        self.comms |= early.comms
        self.joined |= early.joined
        self.calls |= early.calls
        self.claim = self.claim or early.claim

    def rank(self) -> Rank:
        """The value that the rest of the front sees."""
        who = identity(self)
        return Rank(
            pid=self.pid,
            start_time=self.start_time,
            job=who.job,
            rank=who.rank,
            world=who.world,
            local_rank=who.local_rank,
            uid=self.uid,
            name=self.name,
            namespace_pids=self.namespace_pids,
            source=who.source,
            confidence=who.confidence,
            scheme=who.scheme,
            libraries=tuple(self.libraries[key] for key in sorted(self.libraries)),
            state=self.state,
            visibility=visibility(self.libraries.values()),
            drill=self.drill,
        )


def visibility(libraries: Iterable[Library]) -> Visibility:
    """`collectives` where whole collectives are seen (gloo), `enqueue` where only the API calls are (nccl), else `none`."""
    backends = {library.backend for library in libraries if library.sites > 0}
    if "gloo" in backends:
        return "collectives"
    return "enqueue" if "nccl" in backends else "none"


def identity(evidence: Evidence) -> Who:
    """Weigh the evidence."""
    notes = list(evidence.environment.problems)
    who = _from_environment(evidence.environment)
    comm = _largest(evidence.comms)
    if comm is not None:
        who = _with_comm(who, comm, notes)
    if evidence.claim is not None:
        who = _with_claim(who, evidence.claim, notes)
    return msgspec.structs.replace(who, notes=tuple(notes))


def _from_environment(said: Identity) -> Who:
    """A number and a job's name together are fair evidence; a number alone could be anybody's."""
    if said.rank is None:
        return Who(job=said.job)
    confidence: Confidence = "low" if said.job == UNKNOWN_JOB else "medium"
    return Who(
        job=said.job,
        rank=said.rank,
        world=said.world,
        local_rank=said.local_rank,
        source="environment",
        confidence=confidence,
        scheme=said.scheme,
    )


def _largest(comms: set[Comm]) -> Comm | None:
    """The communicator that is most likely the world; ties go to the better source, then to the name, so that order never decides."""
    return max(comms, key=lambda comm: (comm.size, _TRUST[comm.kind], comm.name, comm.rank), default=None)


def _with_comm(who: Who, comm: Comm, notes: list[str]) -> Who:
    source: Source = "ras" if comm.kind == "ras" else "probe"
    confidence: Confidence = "medium" if comm.kind == "gloo" else "high"
    if who.rank is None:
        # A gloo group's ordinal names nothing outside its process.
        job = f"nccl-{comm.name}" if who.job == UNKNOWN_JOB and comm.kind != "gloo" and comm.name else who.job
        return Who(job=job, rank=comm.rank, world=comm.size, source=source, confidence=confidence)
    if who.world is None or comm.size < who.world:
        return who  # a group within the world: its ranks are others by right
    if (comm.rank, comm.size) == (who.rank, who.world):
        return msgspec.structs.replace(who, confidence="high")
    notes.append(
        f"the environment says rank {who.rank} of {who.world}, communicator {comm.name} ({comm.kind}) "
        f"says rank {comm.rank} of {comm.size}: the communicator is believed"
    )
    return msgspec.structs.replace(who, rank=comm.rank, world=comm.size, local_rank=None, source=source, confidence=confidence, scheme="")


def _with_claim(who: Who, claim: Claim, notes: list[str]) -> Who:
    if claim.rank is not None and (claim.rank < 0 or (claim.world is not None and claim.rank >= claim.world)):
        notes.append(f"the agent says rank {claim.rank} of {claim.world}, which cannot be: its claim is not taken")
        return who
    made_up = who.job == UNKNOWN_JOB or (who.source in {"probe", "ras"} and who.job.startswith("nccl-"))
    pairs = [("rank", claim.rank, who.rank), ("world", claim.world, who.world), ("local rank", claim.local_rank, who.local_rank)]
    wrong = [
        f"{what} {said} where it is {known}" for what, said, known in pairs if said is not None and known is not None and said != known
    ]
    if claim.job and not made_up and claim.job != who.job:
        wrong.append(f"job {claim.job} where it is {who.job}")
    if wrong:
        notes.append(f"the agent says {', '.join(wrong)} ({who.source}): its claim is not taken")
        return who
    if claim.rank is None:
        return who if not claim.job else msgspec.structs.replace(who, job=claim.job)
    return msgspec.structs.replace(
        who,
        job=claim.job or who.job,
        rank=claim.rank,
        world=claim.world if claim.world is not None else who.world,
        local_rank=claim.local_rank if claim.local_rank is not None else who.local_rank,
        source="agent",
        confidence="high",
    )
