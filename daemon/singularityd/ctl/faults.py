"""`singularityctl faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from singularityd.ctl import words
from singularityd.ctl.messages import calls, deadline, fault_state, fault_value, standing
from singularityd.ctl.output import Column, print_json, print_table, remark, say, say_wrapped
from singularityd.ctl.session import Session, common
from singularityd.errors import UsageError

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2

COLUMNS = (
    Column("FAULT"),
    Column("PATTERN"),
    Column("JOB", least=8),
    Column("RANK", right=True),
    Column("CALLS", least=8),
    Column("STATE"),
    Column("UNTIL"),
    Column("ENDING", least=8),
)


@click.command()
@click.option("--history", is_flag=True, help="Also those that ended or were refused, newest first.")
@click.option("--limit", type=click.IntRange(1, 10_000), metavar="N", default=100, help="At most so many (default: 100).")
@click.option("--patterns", is_flag=True, help="List what can be armed, with its keys, instead.")
@common
@click.pass_obj
def faults(session: Session, history: bool, limit: int, patterns: bool) -> None:
    """List the armed faults, or what can be armed.

    UNTIL is the deadline of an armed fault and the end of one that ended (UTC). The process, the mechanism, who asked and why are
    in the JSON.
    """
    if patterns and history:
        raise UsageError("--patterns lists what can be armed, --history what was", hint="leave one of them out")
    with session.connect() as client:
        if patterns:
            _patterns(session, list(client.patterns().patterns))
            return
        found = list(client.faults(history=history, limit=limit).faults)
    if session.json:
        print_json({"faults": [fault_value(fault) for fault in found]})
    elif found:
        show(found, session.clock())
    else:
        remark("no fault is in the journal" if history else "no fault is armed")


def show(found: list[node_pb2.Fault], now: float) -> None:
    """Print the table, and below it, whole, why those that were refused were."""
    print_table(COLUMNS, [_row(fault, now) for fault in found])
    for fault in found:
        if fault_state(fault) == "refused":
            say_wrapped(f"{fault.id} refused: ", fault.ending)


def _row(fault: node_pb2.Fault, now: float) -> list[str]:
    until = words.near(fault.ended_at or deadline(fault), now)
    ending = "see below" if fault_state(fault) == "refused" else fault.ending or words.ABSENT
    return [fault.id, fault.pattern, fault.job or words.ABSENT, str(fault.rank), calls(fault), standing(fault), until, ending]


def _patterns(session: Session, found: list[node_pb2.Pattern]) -> None:
    if session.json:
        print_json({"patterns": [_pattern_value(pattern) for pattern in found]})
        return
    for place, pattern in enumerate(found):
        if place:
            say("")
        say_wrapped(f"{pattern.name}  ", pattern.summary)
        say(f"  libraries   {', '.join(pattern.backends)}")
        say(f"  mechanisms  {', '.join(pattern.mechanisms)}")
        keys = max((len(option.name) for option in pattern.options), default=0)
        for option in pattern.options:
            say_wrapped(f"  {f'{option.name}='.ljust(keys + 1)}  ", option.summary)


def _pattern_value(pattern: node_pb2.Pattern) -> dict[str, object]:
    return {
        "name": pattern.name,
        "summary": pattern.summary,
        "options": [{"name": option.name, "summary": option.summary} for option in pattern.options],
        "backends": list(pattern.backends),
        "mechanisms": list(pattern.mechanisms),
    }
