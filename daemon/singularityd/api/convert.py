"""From the front's values to messages. Pure."""

from __future__ import annotations

from singularityd.api.ports import Pattern
from singularityd.api.v1 import node_pb2 as pb
from singularityd.faults import telling
from singularityd.model import Capability, Event, Fault, Library, Rank

_RANK_STATES = {
    "running": pb.RANK_STATE_RUNNING,
    "stopped": pb.RANK_STATE_STOPPED,
    "dying": pb.RANK_STATE_DYING,
    "exited": pb.RANK_STATE_EXITED,
}
_FAULT_STATES = {
    "arming": pb.FAULT_STATE_ARMING,
    "armed": pb.FAULT_STATE_ARMED,
    "ended": pb.FAULT_STATE_ENDED,
    "refused": pb.FAULT_STATE_REFUSED,
}
_CAPABILITY_STATES = {"yes": pb.CAPABILITY_STATE_YES, "no": pb.CAPABILITY_STATE_NO, "unknown": pb.CAPABILITY_STATE_UNKNOWN}


def text(value: str) -> str:
    """A string that protobuf takes: names and paths of other people's processes may hold bytes that are no UTF-8."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def rank(value: Rank) -> pb.Rank:
    """A rank; what is not known stays absent."""
    return pb.Rank(
        job=text(value.job),
        rank=value.rank,
        world=value.world,
        local_rank=value.local_rank,
        pid=value.pid,
        namespace_pids=value.namespace_pids,
        start_time_ticks=value.start_time,
        uid=value.uid,
        name=text(value.name),
        source=value.source,
        confidence=value.confidence,
        scheme=value.scheme,
        state=_RANK_STATES[value.state],
        visibility=value.visibility,
        libraries=[library(one) for one in value.libraries],
    )


def library(value: Library) -> pb.Library:
    """A library."""
    return pb.Library(
        backend=value.backend, version=text(value.version), path=text(value.path), sites=value.sites, problem=text(value.problem)
    )


def fault(value: Fault, *, dry_run: bool = False) -> pb.Fault:
    """A fault."""
    spec = value.spec
    return pb.Fault(
        id=value.id,
        pattern=spec.pattern,
        state=pb.FAULT_STATE_DRY_RUN if dry_run else _FAULT_STATES[value.state],
        job=text(value.job or spec.job),
        rank=spec.rank,
        pid=value.pid,
        point=spec.point,
        backend=spec.backend,
        milliseconds=spec.milliseconds,
        probability_percent=spec.probability,
        duration_seconds=spec.duration,
        count=spec.count,
        seed=spec.seed,
        reason=text(spec.reason),
        mechanism=value.mechanism,
        who=text(value.who),
        created_at=value.created_at,
        armed_at=value.armed_at,
        ended_at=value.ended_at,
        hits=value.hits,
        seen=value.seen,
        ending=text(value.ending),
        doing=telling.calls(spec),
        campaign=value.campaign,
    )


def event(value: Event, *, token: str, severity: str) -> pb.Event:
    """An event with the token to resume after it."""
    return pb.Event(
        sequence=value.sequence,
        token=token,
        kind=value.kind,
        at=value.at,
        text=text(value.text),
        severity=severity,
        job=text(value.job),
        rank=value.rank,
        pid=value.pid,
        backend=value.backend,
        op=value.op,
        fault=value.fault,
        fields={text(key): text(what) for key, what in value.fields.items()},
    )


def capability(value: Capability) -> pb.Capability:
    """A capability."""
    return pb.Capability(name=value.name, state=_CAPABILITY_STATES[value.state], detail=text(value.detail), remedy=text(value.remedy))


def pattern(value: Pattern) -> pb.Pattern:
    """A pattern of the catalogue, its words joined into sentences."""
    return pb.Pattern(
        name=value.name,
        summary=f"{value.summary.rstrip('.')}. {value.effect.rstrip('.')}.",
        options=[pb.PatternOption(name=one.name, summary=f"{one.help.rstrip('.')}: {one.values}") for one in value.options],
        backends=value.backends,
        mechanisms=value.mechanisms,
    )
