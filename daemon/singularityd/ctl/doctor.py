"""`singularityctl doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from singularityd.ctl import words
from singularityd.ctl.failures import tell
from singularityd.ctl.messages import state
from singularityd.ctl.output import print_json, remark, say, say_wrapped
from singularityd.ctl.session import Session, common

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2

NEEDED = ("privileges", "kernel_headers", "bcc", "ring_buffer", "uprobe", "raw_tracepoint")
"""Without any of these nothing can be seen; the others take away a mechanism or a detail."""


@click.command()
@common
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Say what this host permits, a line and a remedy for each capability.

    Each was tried, not looked up by version; `unknown` is an answer. Exits 1 when something is missing that nothing works without:
    privileges, kernel_headers, bcc, ring_buffer, uprobe, raw_tracepoint.
    """
    session: Session = ctx.obj
    with session.connect() as client:
        reply = client.doctor()
    found = list(reply.capabilities)
    missing = [one.name for one in found if one.name in NEEDED and capability_state(one) == "no"]
    if session.json:
        print_json({"capabilities": [_value(one) for one in found], "complete": reply.complete})
    else:
        longest = max((words.width(one.name) for one in found), default=0)
        for one in found:
            _print(one, longest)
    if not reply.complete:
        remark("not every check has answered yet; ask again in a moment")
    if missing:
        tell(
            f"this host lacks what the daemon cannot work without: {', '.join(missing)}", "do what the remedy of each says, then restart it"
        )
        ctx.exit(1)


def _print(one: node_pb2.Capability, longest: int) -> None:
    say_wrapped(f"{capability_state(one):<7}  {one.name:<{longest}}  ", one.detail)
    if one.remedy:
        # It may be a command to copy, so its line is never broken.
        say(f"         remedy: {one.remedy}")


def capability_state(one: node_pb2.Capability) -> str:
    """`yes`, `no` or `unknown`."""
    from singularityd.api.v1 import node_pb2

    return state(node_pb2.CapabilityState, one.state)


def _value(one: node_pb2.Capability) -> dict[str, Any]:
    return {
        "name": one.name,
        "state": capability_state(one),
        "detail": one.detail,
        "remedy": one.remedy or None,
        "needed": one.name in NEEDED,
    }
