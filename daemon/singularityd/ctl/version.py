"""`singularityctl version`."""

from __future__ import annotations

import platform
from typing import Any

import click

from singularityd import __version__
from singularityd.ctl.output import print_json, remark, say
from singularityd.ctl.session import Session, common
from singularityd.errors import SingularityError


@click.command()
@common
@click.pass_obj
def version(session: Session) -> None:
    """Say the versions of this command and of the daemon.

    A daemon that does not answer is no error here.
    """
    client: dict[str, Any] = {"version": __version__, "python": platform.python_version()}
    daemon: dict[str, Any] | None = None
    why = ""
    try:
        with session.connect() as connection:
            reply = connection.version()
        daemon = {"version": reply.version, "api": reply.api, "python": reply.python}
    except SingularityError as failure:
        why = failure.text
    if session.json:
        print_json({"client": client, "daemon": daemon})
        return
    say(f"client  {client['version']} (Python {client['python']})")
    if daemon:
        say(f"daemon  {daemon['version']} (API {daemon['api']}, Python {daemon['python']})")
        return
    say("daemon  does not answer")
    remark(f"singularityctl: {why}")
