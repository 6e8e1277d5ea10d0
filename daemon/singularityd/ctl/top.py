"""`singularityctl top`: rates out of two readings of the kernel's counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from singularityd.ctl import words
from singularityd.ctl.output import WIDTH, Column, print_json, print_table, remark, say, styled, table, terminal
from singularityd.ctl.percentile import percentile
from singularityd.ctl.session import Session, common, seconds

if TYPE_CHECKING:
    from singularityd.api.client import Client
    from singularityd.api.v1 import node_pb2

COLUMNS = (
    Column("RANK", right=True),
    Column("BACKEND"),
    Column("OP", least=8),
    Column("COMM", least=6),
    Column("CALLS/S", right=True),
    Column("BYTES/S", right=True),
    Column("P50", right=True),
    Column("P99", right=True),
    Column("OLDEST", right=True),
    Column("SKEW", right=True),
    Column("FAULT", least=5),
)
NOTHING = "no collective call was seen on this host yet"


class Line(NamedTuple):
    """One row: what happened between two readings."""

    row: node_pb2.TopRow
    calls_per_second: float
    bytes_per_second: float
    p50: float | None
    p99: float | None
    over: str
    """What the percentiles are of: the calls of the `interval`, or `all` since the probes were attached where it had none."""


@click.command()
@click.option("--job", metavar="JOB", default="", help="Only this job.")
@click.option("--once", is_flag=True, help="Take two readings, print one table and end.")
@click.option("--interval", type=seconds, default=1.0, help="Time between two readings (default: 1).")
@common
@click.pass_obj
def top(session: Session, job: str, once: bool, interval: float) -> None:
    """Show what each rank calls now: rates, latency, calls that hang, who comes late.

    \b
    P50, P99  of the calls that ended between two readings; where none did, of all calls so far
    OLDEST    age of the oldest call that has not returned
    SKEW      how long after the first rank of this host it entered the newest common collective
    FAULT     the fault that is armed on the rank

    Live on a terminal until interrupted; elsewhere, and with -o json, as with --once. A slow rank shows the shortest times: the
    others wait for it.
    """
    with session.connect() as client:
        if once or session.json or not terminal():
            _once(session, next(readings(session, client, job, interval)))
        else:
            _live(readings(session, client, job, interval))


def readings(session: Session, client: Client, job: str, interval: float) -> Iterator[tuple[node_pb2.TopReply, list[Line]]]:
    """Readings for ever, `interval` seconds apart, each with what happened since the one before."""
    before = client.top(job)
    while True:
        session.sleep(interval)
        now = client.top(job)
        yield now, compare(before, now)
        before = now


def _once(session: Session, reading: tuple[node_pb2.TopReply, list[Line]]) -> None:
    reply, found = reading
    if session.json:
        print_json({"at": reply.at, "rows": [line_value(line) for line in found]})
        return
    for title, rows in by_job(found):
        if title:
            say(title)
        print_table(COLUMNS, rows)
    if not found:
        remark(NOTHING)


def _live(found: Iterator[tuple[node_pb2.TopReply, list[Line]]]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, no_color=not styled())
    weight = "bold" if styled() else ""
    with Live(Text("first reading ..."), console=console, screen=True, auto_refresh=False) as screen:
        for reply, seen in found:
            page = Text(f"singularityctl top  {words.moment(reply.at)}\n", no_wrap=True)
            for title, rows in by_job(seen):
                header, *rest = table(COLUMNS, rows, limit=min(WIDTH, console.width))
                page.append(f"\n{title}\n" if title else "\n").append(header, weight).append("\n" + "\n".join(rest) + "\n")
            screen.update(page if seen else page.append(f"\n{NOTHING}\n"), refresh=True)


def compare(before: node_pb2.TopReply, now: node_pb2.TopReply) -> list[Line]:
    """What happened between two readings, by job, rank, library, operation and communicator."""
    elapsed = now.at - before.at
    old = {_key(row): row for row in before.rows}
    found = [_compare(old.get(_key(row)), row, elapsed) for row in now.rows]
    return sorted(found, key=lambda line: _order(line.row))


def _compare(old: node_pb2.TopRow | None, row: node_pb2.TopRow, elapsed: float) -> Line:
    # Counters that fell were begun anew (the executor was restarted): all of the new ones happened since.
    if old is None or row.calls < old.calls or row.bytes < old.bytes or len(row.buckets) != len(old.buckets):
        calls, amount, buckets = row.calls, row.bytes, list(row.buckets)
    else:
        calls, amount = row.calls - old.calls, row.bytes - old.bytes
        buckets = [max(0, new - was) for new, was in zip(row.buckets, old.buckets, strict=True)]
    over = "interval" if any(buckets) else "all"
    chosen = buckets if any(buckets) else list(row.buckets)
    per = 1 / elapsed if elapsed > 0 else 0.0
    return Line(row, calls * per, amount * per, percentile(chosen, 50), percentile(chosen, 99), over)


def _key(row: node_pb2.TopRow) -> tuple[str, int, str, str, str]:
    return row.job, row.pid, row.backend, row.op, row.comm


def _order(row: node_pb2.TopRow) -> tuple[Any, ...]:
    return row.job, not row.HasField("rank"), row.rank, row.pid, row.backend, row.op, row.comm


def by_job(found: list[Line]) -> list[tuple[str, list[list[str]]]]:
    """The rows of each job under its title; one job alone needs none."""
    jobs = sorted({line.row.job for line in found})
    titles = {job: words.shorten(words.printable(f"job {job}"), WIDTH) if len(jobs) > 1 else "" for job in jobs}
    return [(titles[job], [_cells(line) for line in found if line.row.job == job]) for job in jobs]


def _cells(line: Line) -> list[str]:
    row = line.row
    return [
        str(row.rank) if row.HasField("rank") else f"pid {row.pid}",
        row.backend,
        row.op,
        row.comm,
        words.rate(line.calls_per_second),
        words.size(line.bytes_per_second),
        _time(line.p50),
        _time(line.p99),
        _time(row.oldest_in_flight_seconds if row.in_flight else None),
        _time(row.skew_seconds if row.HasField("skew_seconds") else None),
        row.fault or words.ABSENT,
    ]


def _time(value: float | None) -> str:
    return words.ABSENT if value is None else words.coarse(value)


def line_value(line: Line) -> dict[str, Any]:
    """A row for JSON."""
    row = line.row
    return {
        "job": row.job,
        "rank": row.rank if row.HasField("rank") else None,
        "pid": row.pid,
        "backend": row.backend,
        "op": row.op,
        "comm": row.comm,
        "calls": row.calls,
        "bytes": row.bytes,
        "errors": row.errors,
        "calls_per_second": line.calls_per_second,
        "bytes_per_second": line.bytes_per_second,
        "p50_seconds": line.p50,
        "p99_seconds": line.p99,
        "percentiles_over": line.over,
        "in_flight": row.in_flight,
        "oldest_in_flight_seconds": row.oldest_in_flight_seconds if row.in_flight else None,
        "skew_seconds": row.skew_seconds if row.HasField("skew_seconds") else None,
        "fault": row.fault or None,
    }
