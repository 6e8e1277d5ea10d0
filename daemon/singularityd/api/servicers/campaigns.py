"""Campaigns: start, stop, list, report, record. The part of the service Faults that is about more than one fault."""

from __future__ import annotations

import math
from typing import Any

from singularityd.api import convert
from singularityd.api.ports import Campaign, CampaignService
from singularityd.api.servicers.asking import asking, who
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import Failed, UsageError

DEFAULT_LIST, LONGEST_LIST = 100, 1000
ROOM = 3 << 20
"""Bytes of one answer, well below the largest that is sent."""
_STATES = {"running": pb.CAMPAIGN_STATE_RUNNING, "ended": pb.CAMPAIGN_STATE_ENDED}


class CampaignCalls:
    """Mixed into the servicer of Faults."""

    _campaigns: CampaignService | None

    async def StartCampaign(self, request: pb.StartCampaignRequest, context: Any) -> pb.Campaign:
        """Plan and begin, or only plan. Raises BadOption that lists every problem, CampaignRuns."""
        if request.dry_run:
            return message(self._service().dry_run(request.toml, who()), dry_run=True)
        return message(await self._service().start(request.toml, *asking()))

    async def StopCampaign(self, request: pb.StopCampaignRequest, context: Any) -> pb.Campaign:
        """End it, with its faults. Raises NoSuchCampaign."""
        return message(await self._service().stop(_id(request.id), who()))

    async def GetCampaign(self, request: pb.GetCampaignRequest, context: Any) -> pb.Campaign:
        """One, with its report where that is asked for. Raises NoSuchCampaign."""
        run = await self._service().get(_id(request.id))
        reply = message(run)
        if request.report:
            markdown, document = await self._service().report(run)
            reply.report_markdown, reply.report_json = convert.text(markdown), document
        return reply

    async def ListCampaigns(self, request: pb.ListCampaignsRequest, context: Any) -> pb.ListCampaignsReply:
        """The newest, without their plans where they would not fit."""
        if not 0 <= request.limit <= LONGEST_LIST:
            raise UsageError(
                f"a list of {request.limit} campaigns cannot be made", hint=f"ask for 1 to {LONGEST_LIST}, or 0 for the default"
            )
        reply, size = pb.ListCampaignsReply(), 0
        for run in await self._service().history(request.limit or DEFAULT_LIST):
            one = message(run)
            size += one.ByteSize() + 8
            if size > ROOM:
                break
            reply.campaigns.append(one)
        return reply

    async def RecordCampaign(self, request: pb.RecordCampaignRequest, context: Any) -> pb.RecordCampaignReply:
        """The journal's faults as a campaign file. Raises NoSuchCampaign, Refused where there are none."""
        if not math.isfinite(request.since) or request.since < 0:
            raise UsageError("since is no Unix time", hint="write seconds since 1970")
        return pb.RecordCampaignReply(toml=await self._service().replay(campaign=request.campaign, since=request.since))

    def _service(self) -> CampaignService:
        if self._campaigns is None:
            raise Failed("this daemon runs no campaigns")
        return self._campaigns


def message(run: Campaign, *, dry_run: bool = False) -> pb.Campaign:
    """A run without its report."""
    reply = pb.Campaign(
        id=run.id,
        name=convert.text(run.name),
        job=convert.text(run.job),
        seed=run.seed,
        state=pb.CAMPAIGN_STATE_DRY_RUN if dry_run else _STATES[run.state],
        who=convert.text(run.who),
        reason=convert.text(run.reason),
        started_at=run.started_at,
        ended_at=run.ended_at,
        ending=convert.text(run.ending),
    )
    outcomes = {outcome.index: outcome for outcome in run.outcomes}
    for planned in run.planned:
        outcome = outcomes.get(planned.index)
        reply.planned.append(
            pb.PlannedFault(
                at_seconds=planned.at_ms / 1000,
                rank=planned.spec.rank,
                pattern=planned.spec.pattern,
                options=dict(planned.options),
                duration_seconds=planned.spec.duration,
                fault=outcome.fault if outcome is not None else "",
                refused=convert.text(outcome.refused) if outcome is not None else "",
            )
        )
    return reply


def _id(given: str) -> str:
    if not given:
        raise UsageError("the request names no campaign", hint="ids look like c3; singularityctl drill list lists them")
    return given
