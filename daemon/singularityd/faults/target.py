"""From the words of a request to the one process they mean, and whether a fault can reach it."""

from __future__ import annotations

from typing import Protocol

from singularityd.errors import RankGone, Refused
from singularityd.faults import spec as wording
from singularityd.faults import telling
from singularityd.model import FaultSpec, Rank


class Ranks(Protocol):
    """What is asked of the rank registry."""

    def resolve(self, rank: int, job: str = "") -> Rank:
        """Raises NoSuchRank, NoSuchJob, AmbiguousJob."""

    def jobs(self) -> dict[str, tuple[Rank, ...]]:
        """Job -> its processes on this host."""


def find(registry: Ranks, spec: FaultSpec) -> Rank:
    """The rank's process. Raises the registry's errors, RankGone for one that is ending, Refused for calls that no probe sees."""
    rank = registry.resolve(spec.rank, spec.job)
    whom = telling.whom(spec.rank, rank.job)
    if rank.state in ("exited", "dying"):
        word = "has exited" if rank.state == "exited" else "is exiting"
        raise RankGone(f"{whom} (process {rank.pid}) {word}", hint="singularityctl ranks shows which ranks run")
    _check_reach(whom, rank, spec)
    return rank


def _check_reach(whom: str, rank: Rank, spec: FaultSpec) -> None:
    """A fault that cannot hit is refused here; a process whose libraries are not known yet may load one before the deadline."""
    pattern = wording.find(spec.pattern)
    if not pattern.needs_calls:
        return
    mapped = [library for library in rank.libraries if spec.backend in ("", library.backend)]
    if rank.libraries and not mapped and (spec.result or not any(library.backend in pattern.backends for library in rank.libraries)):
        raise wording.not_for(spec, rank.libraries[0].backend)
    if rank.libraries and not mapped:
        there = ", ".join(sorted({library.backend for library in rank.libraries}))
        raise Refused(f"{whom} does not use {spec.backend}: it has {there} mapped", hint=f"leave backend out, or write backend={there}")
    if mapped and not any(library.sites for library in mapped):
        problems = "; ".join(f"{library.backend} ({library.path}): {library.problem or 'no probe attached'}" for library in mapped)
        raise Refused(f"no call of {whom} can be hit: {problems}", hint="singularityctl doctor says what is missing")
