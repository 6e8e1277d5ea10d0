"""`singularityctl inject`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from singularityd.ctl import drill, words
from singularityd.ctl.failures import NoHits
from singularityd.ctl.messages import calls, deadline, fault_state, fault_value, standing, target
from singularityd.ctl.output import print_json, remark, say
from singularityd.ctl.session import Session, common
from singularityd.errors import Refused, UsageError

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2

WAIT_BEYOND = 15.0
"""Seconds after its deadline in which a fault must be told as ended."""
LARGEST_RANK = 2**31 - 1


@click.command()
@click.argument("pattern", metavar="PATTERN", required=False, default="")
@click.argument("options", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--rank", "ranks", metavar="RANKS", default="", help="The global rank to disturb: 3; or several: 1,3, 0-2, all, random:2.")
@click.option("--job", metavar="JOB", default="", help="The job it belongs to; needed where several run on this host.")
@click.option("--for", "duration", metavar="TIME", default="", help="How long the fault lasts, for example 500ms, 5s, 2m (default: 10s).")
@click.option("--reason", metavar="TEXT", default="", help="Why; kept in the journal.")
@click.option("--may-kill-job", is_flag=True, help="Hold even longer than half of the job's own time-out.")
@click.option("-f", "--file", "file", metavar="FILE", default="", help="Run a campaign of faults instead: the same as `drill run FILE`.")
@click.option("--wait", is_flag=True, help="Return when the fault has ended; exit 5 when it hit no call.")
@click.option("--dry-run", is_flag=True, help="Check everything and say what would be armed; arm nothing.")
@common
@click.pass_obj
def inject(
    session: Session,
    pattern: str,
    options: tuple[str, ...],
    *,
    file: str,
    ranks: str,
    job: str,
    duration: str,
    reason: str,
    may_kill_job: bool,
    wait: bool,
    dry_run: bool,
) -> None:
    """Disturb the collective calls of one rank of a live job.

    \b
    singularityctl inject --rank 3 timeout --for 5s --wait
    singularityctl inject --rank 3 timeout point=allreduce probability=25% ms=200

    `singularityctl faults --patterns` lists the patterns and their keys. The fault ends at its deadline, by `singularityctl
    clear`, or when either half of the daemon dies.
    """
    if file:
        campaign(session, file, alone=not (ranks or pattern or options or duration), dry_run=dry_run, wait=wait)
        return
    if not pattern:
        raise UsageError("PATTERN is missing: what to do to the rank", hint="singularityctl faults --patterns lists them")
    if not ranks:
        raise UsageError("--rank is missing: which rank to disturb", hint="write --rank N; singularityctl ranks lists them")
    if wait and dry_run:
        raise UsageError("--wait waits for a fault to end, and --dry-run arms none", hint="leave one of them out")
    asked: dict[str, Any] = {
        "job": job,
        "pattern": pattern,
        "options": pairs(options),
        "duration": duration,
        "reason": reason,
        "dry_run": dry_run,
        "may_kill_job": may_kill_job,
    }
    number = one_rank(ranks)
    with session.connect() as client:
        faults = [client.inject(rank=number, **asked)] if number is not None else list(client.inject_many(ranks=ranks, **asked).faults)
        for fault in faults:
            if fault_state(fault) == "refused":
                raise Refused(f"{fault.pattern} on {target(fault)} was not armed: {fault.ending}")
            if not session.json:
                tell_armed(fault, default=not duration)
        if wait:
            faults = [client.wait(fault.id, timeout=fault.duration_seconds + WAIT_BEYOND) for fault in faults]
    if session.json:
        print_json(fault_value(faults[0]) if number is not None else {"faults": [fault_value(fault) for fault in faults]})
    if wait:
        tell_all_ended(faults, quiet=session.json)


def campaign(session: Session, file: str, *, alone: bool, dry_run: bool, wait: bool) -> None:
    """`drill run`, or with --dry-run `drill plan`."""
    if not alone:
        raise UsageError("--file says what is done to which rank, and so do the other words", hint="keep either")
    drill.start(session, file, dry_run=dry_run, wait=wait)


def one_rank(text: str) -> int | None:
    """The number of `3`; None for a selection of several. Raises UsageError for what can be neither."""
    if text.isascii() and text.isdigit():
        if int(text) > LARGEST_RANK:
            raise UsageError(f"rank {text[:30]} cannot be", hint=f"write the global rank in its job, 0 to {LARGEST_RANK}")
        return int(text)
    if (text.isascii() and text[:1].isdigit()) or text == "all" or text.startswith("random:"):
        return None
    raise UsageError(f"--rank {text[:30]!r} is no rank", hint="write 3, 1,3, 0-2, all, or random:2")


def pairs(arguments: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a map. Raises UsageError; what keys and values mean is for the daemon to judge."""
    found: dict[str, str] = {}
    for argument in arguments:
        key, mark, text = argument.partition("=")
        if not mark or not key:
            raise UsageError(
                f"{argument!r} is not KEY=VALUE", hint="write for example probability=25%; singularityctl faults --patterns lists the keys"
            )
        if key in found:
            raise UsageError(f"{key} is given twice", hint=f"keep one of {key}={found[key]} and {argument}")
        found[key] = text
    return found


def tell_armed(fault: node_pb2.Fault, *, default: bool) -> None:
    """Say what was armed, on which process, by which mechanism and until when."""
    dry = fault_state(fault) == "dry_run"
    say(f"would arm {fault.pattern} on {target(fault)}" if dry else f"armed {fault.id}: {fault.pattern} on {target(fault)}")
    say(f"  does       {fault.doing or calls(fault)}")
    if fault.mechanism:
        say(f"  mechanism  {fault.mechanism}")
    end = deadline(fault)
    lasts = f"for {words.duration(fault.duration_seconds)}{' (default)' if default else ''}"
    say(f"  ends       {f'{words.moment(end)}, {lasts}' if end else lasts}")
    if not dry:
        remark(f"end it now: singularityctl clear {fault.id}")


def tell_all_ended(faults: Iterable[node_pb2.Fault], *, quiet: bool) -> None:
    """Say how each ended. Raises NoHits when one of them disturbed nothing."""
    idle: list[NoHits] = []
    for fault in faults:
        try:
            tell_ended(fault, quiet=quiet)
        except NoHits as error:
            idle.append(error)
    if idle:
        raise idle[0]


def tell_ended(fault: node_pb2.Fault, *, quiet: bool) -> None:
    """Say how it ended. Raises NoHits when it disturbed nothing."""
    if not quiet:
        say(f"{fault.id} {standing(fault)}: {fault.ending or 'no reason given'}")
    if not fault.hits:
        raise NoHits(
            f"armed, 0 hits: {_why_unhit(fault)}",
            hint="singularityctl top --once shows the calls it makes; a longer --for, a higher probability or point=any reach more of them",
        )


def _why_unhit(fault: node_pb2.Fault) -> str:
    if fault.seen:
        seen = words.plural(fault.seen, "matching call")
        return f"rank {fault.rank} made {seen} ({calls(fault)}) while {fault.id} was armed, and none was chosen"
    return f"no matching call ({calls(fault)}) of rank {fault.rank} was seen while {fault.id} was armed"
