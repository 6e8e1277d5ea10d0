"""singularityctl: the commands, and the one place where a failure becomes an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from singularityd import __version__
from singularityd.ctl import failures, output
from singularityd.ctl.audit import audit
from singularityd.ctl.clear import clear
from singularityd.ctl.doctor import doctor
from singularityd.ctl.drill import drill
from singularityd.ctl.events import events
from singularityd.ctl.faults import faults
from singularityd.ctl.inject import inject
from singularityd.ctl.ranks import ranks
from singularityd.ctl.session import common
from singularityd.ctl.status import status
from singularityd.ctl.top import top
from singularityd.ctl.version import version
from singularityd.errors import UsageError

COMMANDS = (status, ranks, top, events, inject, faults, clear, drill, audit, doctor, version)


class Root(click.Group):
    """The group; its `main` turns whatever is raised into lines on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are needed, not of the alphabet."""
        return list(self.commands)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> NoReturn:
        """Run and exit. click's own would print a blank line for an interrupt, and usage where only a failure is wanted."""
        extra = {name: value for name, value in extra.items() if name not in ("complete_var", "standalone_mode", "windows_expand_args")}
        self._main_shell_completion(extra, failures.NAME)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to fail
        sys.exit(self._run(list(sys.argv[1:] if args is None else args), extra))

    def _run(self, args: list[str], extra: dict[str, Any]) -> int:
        code = 0
        try:
            try:
                _check_encoding(args)
                with self.make_context(failures.NAME, args, **extra) as ctx:
                    self.invoke(ctx)
            except click.exceptions.Exit as done:
                code = done.exit_code
            if sys.stdout is not None:
                sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as failure:  # noqa: BLE001 - the one place: no traceback ever reaches a user
            code = failures.report(failure)
        return code


def _check_encoding(args: Sequence[str]) -> None:
    """Raises UsageError for bytes that are no text: nothing the daemon knows is named by them."""
    for word in args:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{word!r} is not UTF-8", hint="jobs, patterns and faults have names that are text") from None


# The width is fixed: help is the same text in every terminal, and tests compare it.
@click.group(
    cls=Root,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": output.WIDTH, "max_content_width": output.WIDTH},
)
@click.option("--version", "say_version", is_flag=True, help="Say the version of this command and exit.")
@common
@click.pass_context
def cli(ctx: click.Context, say_version: bool) -> None:
    """See the collectives of the training ranks on this host, and disturb one.

    \b
    Exit codes: 0 done, 1 refused or failed, 2 usage, 3 no such rank, job or fault,
                4 daemon unreachable, 5 --wait with 0 hits
    """
    if say_version:
        click.echo(f"{failures.NAME} {__version__}")
        ctx.exit(0)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


for _command in COMMANDS:
    cli.add_command(_command)


def main() -> NoReturn:
    """Entry point of the script."""
    cli.main()
