"""`singularityctl drill`: campaigns of faults from a file, and their reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from singularityd.ctl import words
from singularityd.ctl.messages import state
from singularityd.ctl.output import Column, print_json, print_table, remark, say
from singularityd.ctl.session import Session, common, seconds
from singularityd.errors import UsageError

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2

LONGEST_FILE = 60_000
"""Bytes; the daemon takes requests of 64 KiB."""
_POLL_EVERY = 1.0

PLAN = (Column("AFTER", right=True), Column("RANK", right=True), Column("PATTERN"), Column("FOR", right=True), Column("OPTIONS", least=8))
RUN = (*PLAN, Column("OUTCOME", least=8))
LIST = (
    *(Column("DRILL"), Column("NAME", least=8), Column("JOB", least=8), Column("STATE"), Column("BEGAN")),
    *(Column("FAULTS", right=True), Column("ENDING", least=8)),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def drill() -> None:
    """Run a campaign of faults from a file, and report what it did.

    \b
    singularityctl drill plan drill.toml
    singularityctl drill run drill.toml --wait
    singularityctl drill report c3
    """


@drill.command()
@click.argument("path", metavar="FILE")
@click.option("--wait", is_flag=True, help="Return when the campaign has ended.")
@common
@click.pass_obj
def run(session: Session, path: str, *, wait: bool) -> None:
    """Begin the campaign of FILE (`-`: standard input). One runs at a time."""
    start(session, path, wait=wait)


@drill.command()
@click.argument("path", metavar="FILE")
@common
@click.pass_obj
def plan(session: Session, path: str) -> None:
    """Say which faults FILE would arm, and when; arm nothing."""
    start(session, path, dry_run=True)


@drill.command()
@click.argument("drill_id", metavar="DRILL")
@common
@click.pass_obj
def stop(session: Session, drill_id: str) -> None:
    """End a campaign now, with its faults."""
    with session.connect() as client:
        _tell(session, client.stop_campaign(drill_id))


@drill.command(name="list")
@click.option("--limit", type=click.IntRange(1, 1000), metavar="N", default=100, help="At most so many (default: 100).")
@common
@click.pass_obj
def list_(session: Session, limit: int) -> None:
    """List the campaigns of this host, newest first."""
    with session.connect() as client:
        found = list(client.campaigns(limit).campaigns)
    if session.json:
        print_json({"drills": [value(one) for one in found]})
    elif found:
        print_table(LIST, [_row(one, session.clock()) for one in found])
    else:
        remark("no drill is in the journal")


@drill.command()
@click.argument("drill_id", metavar="DRILL")
@common
@click.pass_obj
def report(session: Session, drill_id: str) -> None:
    """Print what was injected and what was observed: Markdown, or with -o json everything."""
    with session.connect() as client:
        answer = client.campaign(drill_id, report=True)
    click.echo(answer.report_json if session.json else answer.report_markdown, nl=False)


@drill.command()
@click.option("--campaign", metavar="DRILL", default="", help="What this campaign armed.")
@click.option("--since", type=seconds, metavar="SECONDS", help="What was armed in the last so many seconds.")
@common
@click.pass_obj
def record(session: Session, campaign: str, since: float | None) -> None:
    """Print a campaign file that arms again what was armed, with the same seeds."""
    if bool(campaign) == (since is not None):
        raise UsageError("which faults to record is not said", hint="write one of --campaign DRILL and --since SECONDS")
    with session.connect() as client:
        text = client.record_campaign(campaign=campaign, since=0.0 if since is None else max(0.0, session.clock() - since)).toml
    if session.json:
        print_json({"toml": text})
    else:
        click.echo(text, nl=False)


def start(session: Session, path: str, *, dry_run: bool = False, wait: bool = False) -> None:
    """Plan or begin the campaign of a file; also `inject -f`."""
    text = read(path)
    with session.connect() as client:
        answer = client.start_campaign(text, dry_run=dry_run)
        if wait:
            if not session.json:
                remark(f"{answer.id} runs; end it now: singularityctl drill stop {answer.id}")
            while _state(answer) == "running":
                session.sleep(_POLL_EVERY)
                answer = client.campaign(answer.id)
    _tell(session, answer)


def read(path: str) -> str:
    """The file's text. Raises UsageError."""
    try:
        with click.open_file(path, "rb") as stream:
            data: bytes = stream.read(LONGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint="docs/drills.md has an example") from None
    if len(data) > LONGEST_FILE:
        raise UsageError(f"{path} has more than {LONGEST_FILE} bytes", hint="a campaign file is a page, not a book")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8", hint="TOML is UTF-8") from None


def value(campaign: node_pb2.Campaign) -> dict[str, Any]:
    """For JSON; what has not happened yet is null."""
    return {
        "id": campaign.id or None,
        "name": campaign.name,
        "job": campaign.job,
        "seed": campaign.seed,
        "state": _state(campaign),
        "who": campaign.who,
        "reason": campaign.reason or None,
        "started_at": campaign.started_at or None,
        "ended_at": campaign.ended_at or None,
        "ending": campaign.ending or None,
        "planned": [
            {
                "at": one.at_seconds,
                "rank": one.rank,
                "pattern": one.pattern,
                "options": dict(one.options),
                "duration": one.duration_seconds,
                "fault": one.fault or None,
                "refused": one.refused or None,
            }
            for one in campaign.planned
        ],
    }


def _tell(session: Session, campaign: node_pb2.Campaign) -> None:
    if session.json:
        print_json(value(campaign))
        return
    dry, count = _state(campaign) == "dry_run", words.plural(len(campaign.planned), "fault")
    name, job = words.printable(campaign.name), words.printable(campaign.job)
    if dry:
        say(f"would run {name} on job {job}: {count}, seed {campaign.seed}; nothing was armed")
    elif _state(campaign) == "running":
        say(f"began {campaign.id}: {name} on job {job}: {count}, seed {campaign.seed}")
    else:
        say(f"{campaign.id} ended: {campaign.ending}; singularityctl drill report {campaign.id}")
    ended = _state(campaign) == "ended"
    rows = [[*_planned(one), *([_outcome(one)] if ended else [])] for one in campaign.planned]
    if rows:
        print_table(RUN if ended else PLAN, rows)
    if _state(campaign) == "running":
        remark(f"end it now: singularityctl drill stop {campaign.id}")


def _planned(one: node_pb2.PlannedFault) -> list[str]:
    options = " ".join(f"{key}={text}" for key, text in sorted(one.options.items()))
    return [words.duration(one.at_seconds), str(one.rank), one.pattern, words.duration(one.duration_seconds), options or words.ABSENT]


def _outcome(one: node_pb2.PlannedFault) -> str:
    return one.fault or (f"refused: {one.refused}" if one.refused else "not reached")


def _row(one: node_pb2.Campaign, now: float) -> list[str]:
    armed = sum(bool(planned.fault) for planned in one.planned)
    began = words.near(one.started_at, now)
    return [one.id, one.name, one.job, _state(one), began, f"{armed}/{len(one.planned)}", one.ending or words.ABSENT]


def _state(campaign: node_pb2.Campaign) -> str:
    from singularityd.api.v1 import node_pb2

    return state(node_pb2.CampaignState, campaign.state)
