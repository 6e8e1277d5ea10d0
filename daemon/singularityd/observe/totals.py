"""Turns the kernel's counts by process into counts by rank that only ever grow while they are shown.

The kernel counts by pid; a page counts by (job, rank). Processes come and go under one rank: they exit, are replaced after a restart, or
are identified only after their first calls. A Prometheus counter that falls is read as a restart and its whole remaining value as new
calls, so what a process had counted stays in the series for as long as the series is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from singularityd.kernel.abi import BUCKETS
from singularityd.model import CallStats


class Owner(NamedTuple):
    """Whose calls they are, as labels."""

    job: str
    rank: str


class Key(NamedTuple):
    """A series of counts, as labels."""

    job: str
    rank: str
    comm: str
    backend: str
    op: str
    result: str


class Total:
    """The sums of one series. Changed only while it is being built."""

    __slots__ = ("buckets", "bytes", "calls", "last_call", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.seconds = 0.0
        self.last_call = 0.0
        self.buckets = [0] * BUCKETS

    def add(self, other: CallStats | Total) -> None:
        """Add what one process counted, or what was carried over."""
        self.calls += other.calls
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.last_call = max(self.last_call, other.last_call)
        self.buckets = [mine + its for mine, its in zip(self.buckets, other.buckets, strict=True)]


_Source = tuple[int, str, str, str, str]


class _Seen(NamedTuple):
    stats: CallStats
    key: Key
    known: bool


class Totals:
    """Remembers the last reading of each process. Readings are given in the order in which they were taken, by one thread at a time."""

    def __init__(self) -> None:
        self._seen: dict[_Source, _Seen] = {}
        self._carried: dict[Key, Total] = {}
        self._retired: dict[_Source, int] = {}

    def fold(
        self,
        stats: Iterable[CallStats],
        owners: Mapping[int, Owner],
        label: Callable[[str], str],
        alive: frozenset[Owner],
        pace: Callable[[], None],
    ) -> dict[Key, Total]:
        """The sums by series: of the processes in `stats`, plus what earlier processes left in the same series.

        `owners` names the rank of a pid; other pids are summed as unknown. A series is kept while its owner is in `alive` or a process
        adds to it.
        """
        now: dict[_Source, _Seen] = {}
        retired: dict[_Source, int] = {}
        for entry in stats:
            pace()
            source = (entry.pid, entry.backend, entry.op, entry.comm, entry.result)
            owner = owners.get(entry.pid)
            if owner is None and self._is_retired(source, entry):
                retired[source] = entry.calls
                continue
            job, rank = owner or _NOBODY
            key = Key(job, rank, label(entry.comm), label(entry.backend), label(entry.op), label(entry.result))
            now[source] = _Seen(entry, key, owner is not None)
        self._carry(now)
        self._seen, self._retired = now, retired
        return self._sum(alive, pace)

    def _is_retired(self, source: _Source, entry: CallStats) -> bool:
        """Whether the entry is what an expired rank left in the kernel's table: it must not turn up as an unknown process's."""
        seen = self._seen.get(source)
        calls = seen.stats.calls if seen is not None and seen.known else self._retired.get(source)
        return calls == entry.calls

    def _carry(self, now: Mapping[_Source, _Seen]) -> None:
        """Keep what was counted by processes that are gone, replaced under the same pid, or known under another name since."""
        for source, before in self._seen.items():
            after = now.get(source)
            if after is None or after.stats.calls < before.stats.calls or after.key != before.key:
                self._carried.setdefault(before.key, Total()).add(before.stats)

    def _sum(self, alive: frozenset[Owner], pace: Callable[[], None]) -> dict[Key, Total]:
        shown = {seen.key for seen in self._seen.values()}
        self._carried = {key: total for key, total in self._carried.items() if key in shown or Owner(key.job, key.rank) in alive}
        sums: dict[Key, Total] = {}
        for key, total in self._carried.items():
            sums.setdefault(key, Total()).add(total)
        for seen in self._seen.values():
            pace()
            sums.setdefault(seen.key, Total()).add(seen.stats)
        return sums


_NOBODY = Owner("unknown", "unknown")
