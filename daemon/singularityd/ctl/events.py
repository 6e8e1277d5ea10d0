"""`singularityctl events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from singularityd.ctl import words
from singularityd.ctl.output import print_json_line, remark, say
from singularityd.ctl.session import Session, common
from singularityd.errors import ResumeLost, UsageError

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Wait for what comes, until interrupted.")
@click.option("--since", metavar="TOKEN", default="", help="Only what came after the event of this token.")
@click.option("--kind", "kinds", metavar="KIND", multiple=True, help="Only this kind; may be repeated. docs/events.md lists them.")
@common
@click.pass_obj
def events(session: Session, follow: bool, since: str, kinds: tuple[str, ...]) -> None:
    """Print the events that are recorded, or those that come.

    Without --follow: everything recorded, or everything after --since. With --follow: what comes from now on, or everything after
    --since and then what comes. At the end the token to go on from is printed on stderr; nothing is lost between two runs that
    pass it on. JSON is one object in each line.
    """
    token = since
    try:
        with session.connect() as client:
            stream = client.follow(token=since, kinds=kinds, from_start=not follow and not since, no_follow=not follow)
            for event in stream:
                _print(session, event)
                token = event.token or token  # after printing: an interrupt between the two repeats an event and loses none
    except (ResumeLost, UsageError):
        if token == since:
            token = ""  # it was refused: nobody should go on with it
        raise
    except BrokenPipeError:
        token = ""  # `| head`: whoever read it has seen enough
        raise
    finally:
        # Also when interrupted or cut off: that is when one wants to go on from here.
        if token:
            remark(f"go on with: singularityctl events --since {token}")


def _print(session: Session, event: node_pb2.Event) -> None:
    if session.json:
        print_json_line(event_value(event))
    else:
        say(f"{words.instant(event.at)}  {event.severity:<7}  {event.kind:<16}  {event.text}")


def event_value(event: node_pb2.Event) -> dict[str, Any]:
    """An event for JSON; what does not apply is null."""
    return {
        "sequence": event.sequence,
        "token": event.token,
        "kind": event.kind,
        "at": event.at,
        "text": event.text,
        "severity": event.severity,
        "job": event.job or None,
        "rank": event.rank if event.HasField("rank") else None,
        "pid": event.pid if event.HasField("pid") else None,
        "backend": event.backend or None,
        "op": event.op or None,
        "fault": event.fault or None,
        "fields": dict(event.fields),
    }
