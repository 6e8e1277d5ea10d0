"""The journal's tables and how older ones become newer. A release never edits a step that was released; it adds one."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

APPLICATION = 0x53474C59  # "SGLY": tells our file from another program's database

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # AUTOINCREMENT: a number is not used again even when its row was removed by the retention
        """CREATE TABLE faults (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            state TEXT NOT NULL CHECK (state IN ('arming', 'armed', 'ended', 'refused')),
            spec TEXT NOT NULL,
            who TEXT NOT NULL,
            reason TEXT NOT NULL,
            job TEXT NOT NULL,
            rank INTEGER NOT NULL,
            pid INTEGER NOT NULL,
            start_time INTEGER NOT NULL,
            mechanism TEXT NOT NULL,
            created_at REAL NOT NULL,
            armed_at REAL NOT NULL,
            ended_at REAL NOT NULL,
            hits INTEGER NOT NULL,
            seen INTEGER NOT NULL,
            ending TEXT NOT NULL
        )""",
        "CREATE INDEX faults_open ON faults (state) WHERE state IN ('arming', 'armed')",
    ),
    (
        "ALTER TABLE faults ADD COLUMN campaign TEXT NOT NULL DEFAULT ''",
        """CREATE TABLE campaigns (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            state TEXT NOT NULL CHECK (state IN ('running', 'ended')),
            record TEXT NOT NULL
        )""",
    ),
)
"""Step i turns version i into version i + 1; the version is the file's user_version."""

COLUMNS = (
    *("number", "state", "spec", "who", "reason", "job", "rank", "pid", "start_time", "mechanism"),
    *("created_at", "armed_at", "ended_at", "hits", "seen", "ending", "campaign"),
)


class NewerSchema(Exception):
    """The file was written by a later release."""


class ForeignDatabase(Exception):
    """The file is a database of another program."""


def migrate(connection: sqlite3.Connection, steps: Sequence[Sequence[str]] = MIGRATIONS) -> bool:
    """Bring the file to the newest version, each step in one transaction; True where it was empty before.

    Raises NewerSchema, ForeignDatabase, sqlite3.Error.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION:
        raise ForeignDatabase
    if version > len(steps):
        raise NewerSchema(f"schema {version}, this release knows up to {len(steps)}")
    for number in range(version, len(steps)):
        connection.execute("BEGIN IMMEDIATE")
        for statement in steps[number]:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {number + 1}")
        connection.execute("COMMIT")
    return bool(tables == 0)
