"""Ranks: who is on this host and what each calls."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from singularityd.api import convert, top
from singularityd.api.ports import RankRegistry, Reading
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc
from singularityd.errors import AmbiguousJob, NoSuchJob
from singularityd.model import Rank


class Ranks(node_pb2_grpc.RanksServicer):
    """Lists and counters."""

    def __init__(self, *, ranks: RankRegistry, reading: Callable[[], Awaitable[Reading]], clock: Callable[[], float] = time.time) -> None:
        self._ranks = ranks
        self._reading = reading
        self._clock = clock

    async def List(self, request: pb.ListRanksRequest, context: Any) -> pb.ListRanksReply:
        """The ranks of this host, or of one job. Raises NoSuchJob, AmbiguousJob."""
        return pb.ListRanksReply(ranks=[convert.rank(rank) for rank in of_job(self._ranks.all(), request.job)])

    async def Top(self, request: pb.TopRequest, context: Any) -> pb.TopReply:
        """The kernel's counters now. Raises NoSuchJob, AmbiguousJob."""
        reading = await self._reading()
        at = self._clock()
        return pb.TopReply(at=at, rows=top.rows(reading, of_job(reading.ranks, request.job)))


def of_job(ranks: Sequence[Rank], job: str) -> Sequence[Rank]:
    """All, or those of a job named by its name or by the start of its name, as `--job` of `inject` does."""
    if not job:
        return ranks
    names = sorted({rank.job for rank in ranks})
    meant = [job] if job in names else [name for name in names if name.startswith(job)]
    if not meant:
        raise NoSuchJob(f"no job {job[:80]} on this host: {', '.join(names) or 'there is none'}", hint="singularityctl ranks lists them")
    if len(meant) > 1:
        raise AmbiguousJob(f"several jobs of this host start with {job}: {', '.join(meant)}", hint="name one with --job")
    return [rank for rank in ranks if rank.job == meant[0]]
