"""Who is late and who waits: the arrivals of several ranks at one collective, joined.

A straggler shows the shortest wait of all, so durations do not find it; arrivals do. Only ranks of this host are compared: their clock
is one clock. Pure functions; called on the loop thread with each reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from singularityd.model import Arrival, InFlight, Rank, Skew

RankOf = Callable[[int], Rank | None]
_Group = tuple[str, str, str]  # job, backend, comm
_POINT_TO_POINT = frozenset({"send", "recv"})  # they wait for one peer, not for the communicator


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One collective that ranks of this host have entered and not left."""

    job: str
    backend: str
    comm: str
    op: str
    sequence: int
    waiting: tuple[int, ...]
    """Global ranks inside the call, those held by a fault apart."""
    missing: tuple[int, ...]
    """Global ranks of this host and communicator that have not entered it, or have exited."""
    held: dict[int, str]
    """Global rank -> the fault that holds it inside the call."""
    seconds: float
    """Age of the oldest of these calls."""


def skews(arrivals: Iterable[Arrival], rank_of: RankOf) -> tuple[Skew, ...]:
    """For each communicator with two or more local members, the newest collective that all of them have entered."""
    found = []
    for (job, backend, comm), members in sorted(_members(arrivals, rank_of, exited=False).items()):
        calls: dict[tuple[int, str], dict[int, float]] = {}
        for number, entered in members.items():
            for arrival in entered:
                times = calls.setdefault((arrival.sequence, arrival.op), {})
                times[number] = min(arrival.at, times.get(number, arrival.at))
        complete = [call for call, times in calls.items() if len(times) == len(members)]
        if len(members) < 2 or not complete:
            continue
        sequence, op = max(complete)
        times = calls[sequence, op]
        first = min(times.values())
        lateness = {number: times[number] - first for number in sorted(times)}
        found.append(Skew(job=job, backend=backend, comm=comm, op=op, sequence=sequence, lateness=lateness))
    return tuple(found)


def waits(arrivals: Iterable[Arrival], in_flight: Iterable[InFlight], rank_of: RankOf) -> tuple[Wait, ...]:
    """Every collective in flight, the longest first; a short one is an ordinary call, and the caller decides what is long."""
    members = _members(arrivals, rank_of, exited=True)
    calls: dict[tuple[_Group, int, str], list[tuple[Rank, InFlight]]] = {}
    for call in in_flight:
        rank = rank_of(call.pid)
        if rank is None or rank.rank is None or rank.state == "exited" or call.op in _POINT_TO_POINT:
            continue
        calls.setdefault(((rank.job, call.backend, call.comm), call.sequence, call.op), []).append((rank, call))
    found = []
    for (group, sequence, op), inside in calls.items():
        held = {rank.rank: call.fault for rank, call in inside if rank.rank is not None and call.fault}
        entered = {rank.rank for rank, _ in inside if rank.rank is not None}
        missing = {number for number, came in members.get(group, {}).items() if _absent(came, sequence, rank_of)} - entered
        found.append(
            Wait(
                job=group[0],
                backend=group[1],
                comm=group[2],
                op=op,
                sequence=sequence,
                waiting=tuple(sorted(entered - held.keys())),
                missing=tuple(sorted(missing)),
                held=dict(sorted(held.items())),
                seconds=max(call.seconds for _, call in inside),
            )
        )
    return tuple(sorted(found, key=lambda wait: (-wait.seconds, wait.job, wait.backend, wait.comm, wait.sequence, wait.op)))


def _absent(came: list[Arrival], sequence: int, rank_of: RankOf) -> bool:
    """Whether a member has not come to `sequence`, or came and died: what is joined there waits for it all the same."""
    alive = [rank for arrival in came if (rank := rank_of(arrival.pid)) is not None and rank.state != "exited"]
    return not alive or all(arrival.sequence < sequence for arrival in came)


def _members(arrivals: Iterable[Arrival], rank_of: RankOf, *, exited: bool) -> dict[_Group, dict[int, list[Arrival]]]:
    """Arrivals by communicator and global rank, where it is certain that they are of one communicator.

    A gloo group's name is its ordinal, which two disjoint groups may share: then their sizes differ or two ranks have one place, and
    nothing is said of either. `exited`: count ranks that are gone, unless another process has their place.
    """
    groups: dict[_Group, list[tuple[int, Arrival]]] = {}
    for arrival in arrivals:
        rank = rank_of(arrival.pid)
        if rank is None or rank.rank is None or arrival.comm == "unknown" or (rank.state == "exited" and not exited):
            continue
        groups.setdefault((rank.job, arrival.backend, arrival.comm), []).append((rank.rank, arrival))
    return {group: _by_rank(came) for group, came in groups.items() if _one_communicator(came)}


def _one_communicator(came: list[tuple[int, Arrival]]) -> bool:
    sizes = {arrival.comm_size for _, arrival in came}
    places = {(number, arrival.comm_rank) for number, arrival in came}
    distinct = len({number for number, _ in places}) == len({place for _, place in places}) == len(places)
    return len(sizes) == 1 and None not in sizes and distinct and all(place is not None for _, place in places)


def _by_rank(came: list[tuple[int, Arrival]]) -> dict[int, list[Arrival]]:
    members: dict[int, list[Arrival]] = {}
    for number, arrival in came:
        members.setdefault(number, []).append(arrival)
    return members
