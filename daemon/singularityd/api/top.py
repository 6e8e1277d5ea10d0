"""The rows of `Ranks.Top`: the kernel's tables by rank, library, operation and communicator. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from singularityd.api import convert
from singularityd.api.ports import Reading
from singularityd.api.v1 import node_pb2 as pb
from singularityd.model import Rank

_FINE = frozenset({"ok", "in_progress", "posted"})
"""Results that are no errors; `in_progress` is NCCL's answer from a non-blocking communicator, `posted` that of an asynchronous call."""


class _Key(NamedTuple):
    pid: int
    backend: str
    op: str
    comm: str


@dataclass(slots=True)
class _Row:
    calls: int = 0
    bytes: int = 0
    errors: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=list)
    in_flight: int = 0
    oldest: float = 0.0

    def add_buckets(self, more: Collection[int]) -> None:
        self.buckets += [0] * (len(more) - len(self.buckets))
        for index, count in enumerate(more):
            self.buckets[index] += count


def rows(reading: Reading, chosen: Collection[Rank]) -> list[pb.TopRow]:
    """The rows of the live processes among `chosen`; a call that never returned has one too, from its first moment."""
    live = {rank.pid: rank for rank in chosen if rank.state != "exited"}
    found: dict[_Key, _Row] = {}
    for stats in reading.calls.stats:
        if stats.pid in live:
            row = found.setdefault(_Key(stats.pid, stats.backend, stats.op, stats.comm), _Row())
            row.calls += stats.calls
            row.bytes += stats.bytes
            row.seconds += stats.seconds
            row.errors += 0 if stats.result in _FINE else stats.calls
            row.add_buckets(stats.buckets)
    for call in reading.calls.in_flight:
        if call.pid in live:
            row = found.setdefault(_Key(call.pid, call.backend, call.op, call.comm), _Row())
            row.in_flight += 1
            row.oldest = max(row.oldest, call.seconds)
    faults = {fault.pid: fault.id for fault in reading.faults if fault.state == "armed"}
    late = {(skew.job, skew.backend, skew.comm, skew.op): skew.lateness for skew in reading.skews}
    return [_message(key, found[key], live[key.pid], faults.get(key.pid, ""), late) for key in sorted(found)]


def _message(key: _Key, row: _Row, rank: Rank, fault: str, late: dict[tuple[str, str, str, str], dict[int, float]]) -> pb.TopRow:
    lateness = late.get((rank.job, key.backend, key.comm, key.op), {})
    return pb.TopRow(
        job=convert.text(rank.job),
        rank=rank.rank,
        pid=key.pid,
        backend=key.backend,
        op=key.op,
        comm=key.comm,
        calls=row.calls,
        bytes=row.bytes,
        errors=row.errors,
        seconds=row.seconds,
        buckets=row.buckets,
        in_flight=row.in_flight,
        oldest_in_flight_seconds=row.oldest,
        skew_seconds=lateness.get(rank.rank) if rank.rank is not None else None,
        fault=fault,
    )
