"""Every way to fail, as lines on stderr and an exit code; never a traceback, unless SINGULARITYD_DEBUG=1.

0 done, 1 refused or failed, 2 usage, 3 no such rank, job or fault, 4 daemon unreachable, 5 `--wait` with 0 hits, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

import click

from singularityd.ctl.words import printable
from singularityd.errors import SingularityError, UsageError

NAME = "singularityctl"

EXIT_CODES = {
    0: "done",
    1: "refused or failed; status: something is not well; doctor: something needed is missing",
    2: "usage: the words themselves are wrong; the daemon was not asked, or refused them",
    3: "no such rank, job or fault, or several jobs and none named",
    4: "the daemon cannot be reached",
    5: "inject --wait: the fault ended and had hit no call",
    130: "interrupted (SIGINT)",
}
"""A frozen surface."""


class NoHits(SingularityError):
    """Raised when `--wait` saw a fault end that disturbed no call."""

    code, exit_code = "no_hits", 5


def tell(text: str, hint: str = "") -> None:
    """The two lines of every failure."""
    with contextlib.suppress(OSError):  # stderr that is gone must not change the exit code
        click.echo(f"{NAME}: {printable(text)}", err=True)
        if hint:
            click.echo(f"hint: {printable(hint)}", err=True)


def report(failure: BaseException) -> int:
    """Say what went wrong; returns the exit code."""
    if os.environ.get("SINGULARITYD_DEBUG") == "1":
        traceback.print_exception(failure, file=sys.stderr)
    match failure:
        case KeyboardInterrupt() | click.Abort():
            return 130
        case BrokenPipeError():
            _forget_stdout()
            return 0
        case OSError():
            _forget_stdout()
            tell(f"the answer cannot be written: {failure.strerror or failure}")
            return 1
        case SingularityError():
            tell(failure.text, failure.hint)
            return failure.exit_code
        case click.UsageError():
            command = failure.ctx.command_path if failure.ctx else NAME
            tell(failure.format_message(), f"{command} --help says what can be written")
            return UsageError.exit_code
        case click.ClickException():
            tell(failure.format_message())
            return failure.exit_code
    tell(f"{type(failure).__name__}: {failure}", "this is a defect; SINGULARITYD_DEBUG=1 shows where")
    return 1


def _forget_stdout() -> None:
    """What is still buffered for a reader that is gone or a disk that is full must not fail again when the interpreter ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
