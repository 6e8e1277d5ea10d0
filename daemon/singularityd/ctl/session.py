"""What every command is given: how to reach the daemon, how to answer; and the options that say so, before or after the command."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from singularityd.api.client import Client

LONGEST = 86_400

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _client(socket: str, timeout: float) -> Client:
    # gRPC takes most of the start-up time, so --help and usage errors do without it.
    from singularityd.api.client import Client, default_socket

    return Client(socket or default_socket(), timeout)


@dataclass
class Session:
    """One run of singularityctl."""

    socket: str = ""
    """Empty: the default."""
    timeout: float = 10.0
    """Seconds for each answer of the daemon."""
    output: str = "table"
    client: Callable[[str, float], Client] = _client
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def connect(self) -> Client:
        """A client, to be used in a `with` statement. Raises Unreachable, here or on first use."""
        return self.client(self.socket, self.timeout)

    @property
    def json(self) -> bool:
        """Whether the answer is to be JSON."""
        return self.output == "json"


def seconds(text: str) -> float:
    """A finite positive number of seconds, for click: what it refuses is a usage error."""
    try:
        number = float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a number of seconds") from None
    if not math.isfinite(number) or not 0 < number <= LONGEST:
        raise click.BadParameter(f"{text} is not more than 0 and at most {LONGEST} seconds")
    return number


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Later words win: an option after the command overrides one before it."""
    session = ctx.ensure_object(Session)
    if value is not None and param.name is not None:
        setattr(session, param.name, value)


def common(function: Decorated) -> Decorated:
    """The options that stand before or after any command."""
    for option in (
        click.option(
            *("-o", "--output"),
            type=click.Choice(["table", "json"]),
            callback=_keep,
            expose_value=False,
            help="How to answer (default: table).",
        ),
        click.option(
            "--timeout",
            type=seconds,
            callback=_keep,
            expose_value=False,
            help="How long to wait for an answer of the daemon (default: 10).",
        ),
        click.option(
            "--socket",
            metavar="PATH",
            callback=_keep,
            expose_value=False,
            help="The daemon's control socket (default: control.sock in $SINGULARITYD_RUNTIME_DIR or /run/singularityd).",
        ),
    ):
        function = option(function)
    return function
