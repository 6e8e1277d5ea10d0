"""What is observed while a campaign runs: the events of its job, and the counters of its ranks once a second. Loop thread only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from singularityd.faults.campaign.record import MOST_EVENTS, Seen
from singularityd.model import Calls, Event, Rank

_FINE = ("ok", "in_progress", "posted")
_ALWAYS = frozenset({"executor_lost", "executor_back", "events_dropped", "probe_shed"})
"""Events that belong to no job and matter to each."""


class Reading(Protocol):
    """What is read once a second."""

    @property
    def calls(self) -> Calls:
        """The kernel's tables."""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks at that moment."""


class _Tally:
    """The counters of one rank."""

    def __init__(self) -> None:
        self.samples = 0
        self.first_at = self.last_at = self.moved_at = 0.0
        self.before: dict[int, tuple[int, int]] = {}
        self.calls = self.errors = 0
        self.oldest = self.standstill = 0.0

    def add(self, at: float, counts: Mapping[int, tuple[int, int]], oldest: float) -> None:
        """`counts`: process -> calls and errors since its probes were attached. A process first seen later counts from 0."""
        moved = False
        for pid, (calls, errors) in counts.items():
            known = self.before.get(pid, (calls, errors) if not self.samples else (0, 0))
            self.calls += max(0, calls - known[0])
            self.errors += max(0, errors - known[1])
            moved = moved or calls != known[0]
            self.before[pid] = (calls, errors)
        if not self.samples:
            self.first_at = self.moved_at = at
        if moved:
            self.moved_at = at
        self.standstill = max(self.standstill, at - self.moved_at)
        self.oldest = max(self.oldest, oldest)
        self.last_at = at
        self.samples += 1

    def seen(self, rank: int) -> Seen:
        """The sums, rounded to what a person reads."""
        lasted = self.last_at - self.first_at
        return Seen(
            rank=rank,
            samples=self.samples,
            calls=self.calls,
            errors=self.errors,
            calls_a_second=round(self.calls / lasted, 3) if lasted > 0 else 0.0,
            oldest_in_flight=round(self.oldest, 3),
            longest_standstill=round(self.standstill, 3),
        )


class Watcher:
    """Gathers for one campaign."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._tallies: dict[int, _Tally] = {}
        self.events: list[Event] = []
        self.left_out = 0

    def event(self, event: Event) -> None:
        """Keep what concerns the job."""
        if event.job != self._job and event.kind not in _ALWAYS:
            return
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        else:
            self.left_out += 1

    def sample(self, reading: Reading, at: float) -> None:
        """Add one reading, taken at a monotonic time in seconds."""
        owners = {rank.pid: rank.rank for rank in reading.ranks if rank.job == self._job and rank.rank is not None}
        counts: dict[int, dict[int, tuple[int, int]]] = {number: {} for number in owners.values()}
        for stats in reading.calls.stats:
            if (number := owners.get(stats.pid)) is not None:
                calls, errors = counts[number].get(stats.pid, (0, 0))
                bad = 0 if stats.result in _FINE else stats.calls
                counts[number][stats.pid] = (calls + stats.calls, errors + bad)
        oldest: dict[int, float] = {}
        for flight in reading.calls.in_flight:
            if (number := owners.get(flight.pid)) is not None:
                oldest[number] = max(oldest.get(number, 0.0), flight.seconds)
        for number, by_process in counts.items():
            self._tallies.setdefault(number, _Tally()).add(at, by_process, oldest.get(number, 0.0))

    def seen(self) -> tuple[Seen, ...]:
        """By rank."""
        return tuple(tally.seen(rank) for rank, tally in sorted(self._tallies.items()))
