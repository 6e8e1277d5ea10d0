"""A campaign's run as the journal keeps it, and its rows in the journal's file."""

from __future__ import annotations

import sqlite3
from typing import Literal

import msgspec

from singularityd.faults.campaign.plan import Planned
from singularityd.model import Event

MOST_EVENTS = 2000
"""Events kept with a run; those beyond are counted."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one planned fault."""

    index: int
    """Of the plan."""
    at: float
    """Unix time of the request."""
    fault: str = ""
    """Its id in the journal; empty where it was refused before it had one."""
    refused: str = ""
    """Why it was not armed, for people."""
    code: str = ""
    """The error's stable code."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the counters of one rank said between the campaign's first sample and its last."""

    rank: int
    samples: int = 0
    calls: int = 0
    errors: int = 0
    calls_a_second: float = 0.0
    oldest_in_flight: float = 0.0
    """Seconds, the greatest of the samples."""
    longest_standstill: float = 0.0
    """Seconds between samples in which no call ended."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One campaign, from its start."""

    id: str
    """`c` and a number; empty in a dry run."""
    name: str
    job: str
    seed: int
    who: str
    reason: str
    state: Literal["running", "ended"]
    text: str
    """The file, as it was given."""
    planned: tuple[Planned, ...]
    ranks: tuple[int, ...]
    """Known at the start."""
    started_at: float = 0.0
    ended_at: float = 0.0
    ending: str = ""
    outcomes: tuple[Outcome, ...] = ()
    events: tuple[Event, ...] = ()
    events_left_out: int = 0
    seen: tuple[Seen, ...] = ()

    @property
    def failures(self) -> int:
        """Faults that were not armed."""
        return sum(bool(outcome.code) for outcome in self.outcomes)


def create(connection: sqlite3.Connection, run: Run, reason: str) -> Run:
    """Write a run that has no id yet; what an earlier front left running is ended first. Within a transaction."""
    close_open(connection, reason, run.started_at)
    number = connection.execute("INSERT INTO campaigns (state, record) VALUES (?, ?)", (run.state, _text(run))).lastrowid
    made = msgspec.structs.replace(run, id=f"c{number}")
    update(connection, made)
    return made


def update(connection: sqlite3.Connection, run: Run) -> None:
    """Write what became of it."""
    connection.execute("UPDATE campaigns SET state = ?, record = ? WHERE number = ?", (run.state, _text(run), number_of(run.id)))


def close_open(connection: sqlite3.Connection, reason: str, at: float) -> list[Run]:
    """End every run that is not over; those are returned."""
    rows = connection.execute("SELECT number, record FROM campaigns WHERE state = 'running'").fetchall()
    closed = [msgspec.structs.replace(_run(row), state="ended", ending=reason, ended_at=at) for row in rows]
    for run in closed:
        update(connection, run)
    return closed


def get(connection: sqlite3.Connection, run_id: str) -> Run | None:
    """The run of that id."""
    row = connection.execute("SELECT number, record FROM campaigns WHERE number = ?", (number_of(run_id),)).fetchone()
    return None if row is None else _run(row)


def newest(connection: sqlite3.Connection, limit: int) -> list[Run]:
    """The newest, newest first."""
    rows = connection.execute("SELECT number, record FROM campaigns ORDER BY number DESC LIMIT ?", (limit,)).fetchall()
    return [_run(row) for row in rows]


def number_of(run_id: str) -> int:
    """The number in `c3`; -1, which no row has, for what is not written so."""
    digits = run_id[1:]
    fine = run_id[:1] == "c" and digits.isascii() and digits.isdigit() and len(digits) <= 18
    return int(digits) if fine else -1


def _text(run: Run) -> str:
    return msgspec.json.encode(run).decode()


def _run(row: tuple[int, str]) -> Run:
    return msgspec.structs.replace(msgspec.json.decode(row[1], type=Run), id=f"c{row[0]}")
