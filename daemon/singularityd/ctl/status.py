"""`singularityctl status`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from singularityd.ctl import words
from singularityd.ctl.messages import deadline, fault_state, fault_value, standing, target
from singularityd.ctl.output import print_json, say_wrapped
from singularityd.ctl.session import Session, common

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2

UNHEALTHY = 1


@click.command()
@common
@click.pass_context
def status(ctx: click.Context) -> None:
    """Say how the daemon is, what it watches and what it disturbs.

    `dropped` counts records that a full buffer lost, `unattached` files that could not be probed, by reason; `shed` are probe
    sites taken away because they were hit too often. Exits 1 when a part of it is not well.
    """
    session: Session = ctx.obj
    with session.connect() as client:
        reply = client.status()
    if session.json:
        print_json(status_value(reply))
    else:
        for head, text in lines(reply, session.clock()):
            say_wrapped(f"{head:<12}", text)
    if not reply.healthy:
        ctx.exit(UNHEALTHY)


def lines(reply: node_pb2.StatusReply, now: float) -> list[tuple[str, str]]:
    """What is printed, as (subject, text)."""
    word = "healthy" if reply.healthy else "NOT HEALTHY"
    jobs = f" in {words.plural(len(reply.jobs), 'job')}: {', '.join(reply.jobs)}" if reply.jobs else ""
    found = [
        ("daemon", f"{word}, version {reply.version}, pid {reply.front_pid}, up {_age(reply.started_at, now)}"),
        ("executor", _executor(reply, now)),
        ("probes", _counts(reply.probes, "{name} {count} sites") or "none attached"),
        ("dropped", _counts(reply.dropped, "{name} {count}") or "nothing"),
        ("unattached", _counts(reply.attach_errors, "{name} {count}") or "nothing"),
        ("shed", ", ".join(reply.shed) or "nothing"),
        ("ranks", f"{reply.ranks}{jobs}"),
        ("metrics", f"http://{reply.metrics_address}/metrics" if reply.metrics_address else "off"),
    ]
    found += [("fault", _fault(fault, now)) for fault in reply.faults] or [("faults", "none armed")]
    return found + [("problem", problem) for problem in reply.problems]


def _executor(reply: node_pb2.StatusReply, now: float) -> str:
    restarts = words.plural(reply.executor_restarts, "restart")
    if not reply.executor_started_at:
        return f"AWAY: nothing is watched, no fault is armed; {restarts}"
    return f"pid {reply.executor_pid}, up {_age(reply.executor_started_at, now)}, {restarts}"


def _fault(fault: node_pb2.Fault, now: float) -> str:
    text = f"{fault.id}: {fault.pattern} on {target(fault)}: {standing(fault)}"
    if fault_state(fault) != "armed" or not deadline(fault):
        return text
    return f"{text}, {words.duration(max(0.0, round(deadline(fault) - now, 1)))} left"


def _counts(counts: Mapping[str, int], wording: str) -> str:
    """`gloo 24 sites, nccl 60 sites`; what is 0 is not worth a word."""
    return ", ".join(wording.format(name=name, count=counts[name]) for name in sorted(counts) if counts[name])


def _age(since: float, now: float) -> str:
    return words.duration(max(0.0, round(now - since))) if since else "for an unknown time"


def status_value(reply: node_pb2.StatusReply) -> dict[str, Any]:
    """The status for JSON."""
    return {
        "healthy": reply.healthy,
        "problems": list(reply.problems),
        "version": reply.version,
        "started_at": reply.started_at,
        "front_pid": reply.front_pid,
        "executor": {
            "pid": reply.executor_pid or None,
            "started_at": reply.executor_started_at or None,
            "restarts": reply.executor_restarts,
        },
        "probes": dict(reply.probes),
        "dropped": dict(reply.dropped),
        "attach_errors": dict(reply.attach_errors),
        "shed": list(reply.shed),
        "ranks": reply.ranks,
        "jobs": list(reply.jobs),
        "faults": [fault_value(fault) for fault in reply.faults],
        "metrics_address": reply.metrics_address or None,
    }
