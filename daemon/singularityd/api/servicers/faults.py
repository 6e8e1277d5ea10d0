"""Faults: arm, end, list, wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from singularityd.api import convert
from singularityd.api.admission import WHO
from singularityd.api.identity.caller import CALLER, ROLE
from singularityd.api.ports import FaultService, Parse, Pattern
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc
from singularityd.errors import UsageError
from singularityd.faults import many
from singularityd.faults.limits import Caller
from singularityd.model import Fault, FaultSpec, Rank

DEFAULT_LIST, LONGEST_LIST = 100, 10_000
ROOM = 3 << 20
"""Bytes of faults in one answer, well below the largest that is sent."""


class Faults(node_pb2_grpc.FaultsServicer):
    """The fault service, by wire."""

    def __init__(
        self, *, faults: FaultService, parse: Parse, patterns: Sequence[Pattern], members: Callable[[str], Sequence[Rank]]
    ) -> None:
        """`members` lists the live ranks of a job."""
        self._faults = faults
        self._parse = parse
        self._patterns = patterns
        self._members = members

    async def Inject(self, request: pb.InjectRequest, context: Any) -> pb.Fault:
        """Validate, journal and arm, or only say what would be armed. A caller that goes away meanwhile leaves nothing armed."""
        if not request.HasField("rank"):
            raise UsageError("the request names no rank", hint="say which rank to disturb; singularityctl ranks lists them")
        spec = self._spec(request, request.rank)
        if request.dry_run:
            return convert.fault(self._faults.dry_run(spec, *_asking()).fault, dry_run=True)
        return convert.fault(await self._faults.inject(spec, *_asking()))

    async def InjectMany(self, request: pb.InjectRequest, context: Any) -> pb.ListFaultsReply:
        """The same on several ranks: all are armed, or none. A caller that goes away meanwhile leaves nothing armed."""
        if not request.ranks:
            raise UsageError("the request names no ranks", hint="write for example 1,3 or all")
        members = self._members(request.job)
        if request.dry_run:
            numbers = many.numbers(members, request.ranks, self._spec(request, 0).seed)
            dry = [self._faults.dry_run(self._spec(request, number), *_asking()).fault for number in numbers]
            return pb.ListFaultsReply(faults=[convert.fault(fault, dry_run=True) for fault in dry])
        return _listed(await many.inject(self._faults, members, request.ranks, lambda rank: self._spec(request, rank), _asking()))

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
        """End one fault, or all. Raises NoSuchFault."""
        return _listed(await self._faults.clear(_id(request.id), _who()))

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


def _asking() -> tuple[str, Caller]:
    """Who asks, for the journal and for the limits."""
    caller = CALLER.get()
    return _who(), Caller(uid=caller.uid if caller else 0, admin=ROLE.get() == "admin")


def _who() -> str:
    """For the journal: the proven caller, else the socket whose permissions let it in."""
    caller = CALLER.get()
    return str(caller) if caller else WHO


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
