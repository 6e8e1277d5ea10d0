"""Faults: arm, end, list, wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from singularityd.api import convert
from singularityd.api.ports import CampaignService, FaultService, Parse, Pattern
from singularityd.api.servicers.asking import asking, who
from singularityd.api.servicers.campaigns import CampaignCalls
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc
from singularityd.errors import UsageError
from singularityd.faults import many
from singularityd.model import Fault, FaultSpec, Rank

DEFAULT_LIST, LONGEST_LIST = 100, 10_000
ROOM = 3 << 20
"""Bytes of faults in one answer, well below the largest that is sent."""


class Faults(CampaignCalls, node_pb2_grpc.FaultsServicer):
    """The fault service, by wire."""

    def __init__(
        self,
        *,
        faults: FaultService,
        parse: Parse,
        patterns: Sequence[Pattern],
        members: Callable[[str], Sequence[Rank]],
        campaigns: CampaignService | None = None,
    ) -> None:
        """`members` lists the live ranks of a job."""
        self._faults = faults
        self._campaigns = campaigns
        self._parse = parse
        self._patterns = patterns
        self._members = members

    async def Inject(self, request: pb.InjectRequest, context: Any) -> pb.Fault:
        """Validate, journal and arm, or only say what would be armed. A caller that goes away meanwhile leaves nothing armed."""
        if not request.HasField("rank"):
            raise UsageError("the request names no rank", hint="say which rank to disturb; singularityctl ranks lists them")
        spec = self._spec(request, request.rank)
        if request.dry_run:
            return convert.fault(self._faults.dry_run(spec, *asking()).fault, dry_run=True)
        return convert.fault(await self._faults.inject(spec, *asking()))

    async def InjectMany(self, request: pb.InjectRequest, context: Any) -> pb.ListFaultsReply:
        """The same on several ranks: all are armed, or none. A caller that goes away meanwhile leaves nothing armed."""
        if not request.ranks:
            raise UsageError("the request names no ranks", hint="write for example 1,3 or all")
        members = self._members(request.job)
        if request.dry_run:
            numbers = many.numbers(members, request.ranks, self._spec(request, 0).seed)
            dry = [self._faults.dry_run(self._spec(request, number), *asking()).fault for number in numbers]
            return pb.ListFaultsReply(faults=[convert.fault(fault, dry_run=True) for fault in dry])
        return _listed(await many.inject(self._faults, members, request.ranks, lambda rank: self._spec(request, rank), asking()))

    def _spec(self, request: pb.InjectRequest, rank: int) -> FaultSpec:
        return self._parse(
            request.pattern,
            rank,
            dict(request.options),
            job=request.job,
            duration=request.duration,
            reason=request.reason,
            may_kill_job=request.may_kill_job,
        )

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ListFaultsReply:
        """End one fault, or all and the campaign that would arm the next. Raises NoSuchFault."""
        if request.id == "all" and self._campaigns is not None:
            ended = self._faults.active()
            await self._campaigns.clear_all(who())
            more = await self._faults.clear("all", who())
            known = {fault.id for fault in more}
            return _listed([*[await self._faults.get(fault.id) for fault in ended if fault.id not in known], *more])
        return _listed(await self._faults.clear(_id(request.id), who()))

    async def List(self, request: pb.ListFaultsRequest, context: Any) -> pb.ListFaultsReply:
        """Those armed, or the newest of the journal; fewer than asked for where they would not fit into one answer."""
        if not 0 <= request.limit <= LONGEST_LIST:
            raise UsageError(f"a list of {request.limit} faults cannot be made", hint=f"ask for 1 to {LONGEST_LIST}, or 0 for the default")
        limit = request.limit or DEFAULT_LIST
        return _listed(await self._faults.history(limit) if request.history else self._faults.active()[:limit])

    async def Get(self, request: pb.GetFaultRequest, context: Any) -> pb.Fault:
        """One fault. Raises NoSuchFault."""
        return convert.fault(await self._faults.get(_id(request.id)))

    async def Wait(self, request: pb.GetFaultRequest, context: Any) -> pb.Fault:
        """Returns when it has ended. Raises NoSuchFault."""
        return convert.fault(await self._faults.wait(_id(request.id)))

    async def ListPatterns(self, request: pb.ListPatternsRequest, context: Any) -> pb.ListPatternsReply:
        """What can be armed."""
        return pb.ListPatternsReply(patterns=[convert.pattern(pattern) for pattern in self._patterns])


def _id(given: str) -> str:
    if not given:
        raise UsageError("the request names no fault", hint="ids look like f12; singularityctl faults lists them")
    return given


def _listed(faults: Sequence[Fault]) -> pb.ListFaultsReply:
    reply, size = pb.ListFaultsReply(), 0
    for fault in faults:
        message = convert.fault(fault)
        size += message.ByteSize() + 8
        if size > ROOM:
            break
        reply.faults.append(message)
    return reply
