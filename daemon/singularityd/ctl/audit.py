"""`singularityctl audit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from singularityd.api import chain
from singularityd.ctl import words
from singularityd.ctl.output import print_json, say
from singularityd.ctl.session import Session, common
from singularityd.errors import Refused


class BrokenChain(Refused):
    """Raised when the audit is not what was written."""

    code = "broken_chain"


def default_file() -> Path:
    """In $SINGULARITYD_STATE_DIR or /var/lib/singularityd."""
    return Path(os.environ.get("SINGULARITYD_STATE_DIR") or "/var/lib/singularityd") / "front" / chain.NAME


@click.command()
@click.argument("action", type=click.Choice(["verify"]))
@click.argument("file", required=False, type=click.Path(path_type=Path))
@common
@click.pass_obj
def audit(session: Session, action: str, file: Path | None) -> None:
    """Check that the audit is what the daemon wrote; no daemon is asked.

    FILE is the file being written, checked with the full ones beside it, or one full file alone. Without it: this host's.
    The exit code is 1 where a line was changed, removed, moved or cut.
    """
    verdict = _checked(file or default_file())
    if session.json:
        print_json(_value(verdict))
    elif not verdict.problem:
        begins = f", numbers {verdict.first} to {verdict.last.number}" if verdict.lines else ""
        say(f"the audit is whole: {words.plural(verdict.lines, 'line')}{begins}")
        say(f"last hash {verdict.last.hash}")
    if verdict.problem:
        raise BrokenChain(
            f"{verdict.file}: line {verdict.line}: {verdict.problem}", hint="what stands before that line is whole; keep the file as it is"
        )


def _checked(file: Path) -> chain.Verdict:
    try:
        return chain.check(chain.family(file) if chain.whole_family(file) else [file])
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror or error}", hint="run it as root, or name the file") from None


def _value(verdict: chain.Verdict) -> dict[str, Any]:
    return {
        "whole": not verdict.problem,
        "lines": verdict.lines,
        "first": verdict.first,
        "last": verdict.last.number,
        "hash": verdict.last.hash,
        "file": verdict.file,
        "line": verdict.line,
        "problem": verdict.problem,
    }
