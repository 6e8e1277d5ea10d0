"""`singularityctl clear`."""

from __future__ import annotations

import click

from singularityd.ctl import words
from singularityd.ctl.messages import fault_value, target
from singularityd.ctl.output import print_json, remark, say
from singularityd.ctl.session import Session, common


@click.command()
@click.argument("fault", metavar="FAULT|all")
@common
@click.pass_obj
def clear(session: Session, fault: str) -> None:
    """End a fault now, or all of them; held calls go on."""
    with session.connect() as client:
        ended = list(client.clear(fault).faults)
    if session.json:
        print_json({"faults": [fault_value(one) for one in ended]})
        return
    for one in ended:
        say(f"cleared {one.id}: {one.pattern} on {target(one)}, {words.plural(one.hits, 'hit')}")
    if not ended:
        remark("no fault was armed")
