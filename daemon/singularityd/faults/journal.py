"""The journal of faults: SQLite in write-ahead mode. A fault is in it, on the disk, before it is armed.

Blocking; all calls of one Journal come from one thread (faults.worker). Every error of SQLite or of the file system becomes
JournalUnavailable with the path and a remedy; the connection is dropped then and made anew by the next call, so that a disk that
works again is used again.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from singularityd.errors import JournalUnavailable
from singularityd.faults import journal_file, schema
from singularityd.model import Fault, FaultSpec

T = TypeVar("T")
RETENTION = 10_000
_BUSY_SECONDS = 2.0
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

_REMEDIES = {
    sqlite3.SQLITE_FULL: "the file system is full: make room",
    sqlite3.SQLITE_READONLY: "the file system or the file is read-only: make it writable for the daemon's user",
    sqlite3.SQLITE_CANTOPEN: "see that the directory exists and the daemon's user can write it",
    sqlite3.SQLITE_BUSY: "another process holds the file: a second daemon, or a sqlite3 shell with a transaction open",
    sqlite3.SQLITE_LOCKED: "another process holds the file: a second daemon, or a sqlite3 shell with a transaction open",
    sqlite3.SQLITE_IOERR: "the disk reports an error, or is full: see dmesg and df",
}

_SELECT = f"SELECT {', '.join(schema.COLUMNS)} FROM faults"  # noqa: S608  constants only
_PLACES = ", ".join(f":{column}" for column in schema.COLUMNS)
_INSERT = f"INSERT INTO faults ({', '.join(schema.COLUMNS)}) VALUES ({_PLACES})"  # noqa: S608  constants only
# A row that is missing because the journal was set aside meanwhile comes into the new one.
_UPSERT = f"{_INSERT} ON CONFLICT (number) DO UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in schema.COLUMNS[1:])
_PRUNE = """DELETE FROM faults WHERE state IN ('ended', 'refused')
    AND number <= (SELECT number FROM faults ORDER BY number DESC LIMIT 1 OFFSET ?)"""


class JournalLike(Protocol):
    """What the fault service asks of a journal; `tests` have one that fails on request."""

    def create(self, fault: Fault) -> Fault:
        """Write a fault that has no id yet, durably; returned with its id."""

    def update(self, fault: Fault) -> None:
        """Write what became of it."""

    def close_open(self, reason: str) -> list[Fault]:
        """End every fault that is neither ended nor refused; those are returned."""

    def get(self, fault_id: str) -> Fault | None:
        """The fault of that id, None where there is none (any more)."""

    def history(self, limit: int) -> list[Fault]:
        """The newest, newest first."""

    def within(self, function: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """What `function` does, as one transaction."""

    def faults_where(self, *, campaign: str = "", since: float = 0.0) -> list[Fault]:
        """Those of a campaign, or since a time; oldest first."""

    def close(self) -> None:
        """Let go of the file."""

    def take_notices(self) -> list[str]:
        """What a person should be told once, such as that a corrupt file was set aside."""


class Journal:
    """The journal in one file; see the module for threads and errors. Opens on first use."""

    def __init__(self, path: Path | str, *, retention: int = RETENTION, clock: Callable[[], float] = time.time) -> None:
        """`retention`: so many newest rows are kept; faults that have not ended are kept in any case."""
        self.path = Path(path)
        self._retention = retention
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._identity = (0, 0)
        self._ids = journal_file.Ids(self.path)
        self._notices: deque[str] = deque()

    def create(self, fault: Fault) -> Fault:
        """Write a fault that has no id yet; it is on the disk, with its new id, when this returns. Raises JournalUnavailable."""
        assert not fault.id, "an id is given once"
        with self._transaction(durable=True) as connection:
            number = connection.execute(_INSERT, _row(fault)).lastrowid
            assert number is not None, "an INSERT that succeeded has a row id"
            self._ids.promise(number)
            connection.execute(_PRUNE, (self._retention,))
        return msgspec.structs.replace(fault, id=f"f{number}")

    def update(self, fault: Fault) -> None:
        """Write the whole row of a fault that has an id. A power failure may lose it: the row is then closed at the next start."""
        with self._transaction(durable=False) as connection:
            connection.execute(_UPSERT, _row(fault))

    def close_open(self, reason: str) -> list[Fault]:
        """End all faults that are not over, with `reason` as their ending; the daemon does so at its start."""
        ended_at = self._clock()
        with self._transaction(durable=False) as connection:
            open_ones = [_fault(row) for row in connection.execute(f"{_SELECT} WHERE state IN ('arming', 'armed') ORDER BY number")]
            closed = [msgspec.structs.replace(fault, state="ended", ending=reason, ended_at=ended_at) for fault in open_ones]
            connection.executemany(_UPSERT, map(_row, closed))
        return closed

    def get(self, fault_id: str) -> Fault | None:
        """The fault of that id, None where the journal has none."""
        number = number_of(fault_id)
        if number is None:
            return None
        with self._working() as connection:
            row = connection.execute(f"{_SELECT} WHERE number = ?", (number,)).fetchone()
            return None if row is None else _fault(row)

    def history(self, limit: int) -> list[Fault]:
        """The newest `limit` faults, newest first."""
        with self._working() as connection:
            return [_fault(row) for row in connection.execute(f"{_SELECT} ORDER BY number DESC LIMIT ?", (max(0, limit),))]

    def within(self, function: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """What `function` does, as one transaction; for the tables that other modules keep in this file. Raises JournalUnavailable."""
        with self._transaction(durable=durable) as connection:
            return function(connection)

    def faults_where(self, *, campaign: str = "", since: float = 0.0) -> list[Fault]:
        """The faults of a campaign, or those asked for since a Unix time; oldest first."""
        condition, value = ("campaign = ?", campaign) if campaign else ("created_at >= ?", since)
        with self._working() as connection:
            rows = connection.execute(f"{_SELECT} WHERE {condition} ORDER BY number", (value,))
            return [_fault(row) for row in rows]

    def take_notices(self) -> list[str]:
        """Lines for the log about what was done to the files; each is returned once. Any thread."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def close(self) -> None:
        """Let go of the file; a later call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        with self._working() as connection:
            # In write-ahead mode FULL waits for the disk at each commit, NORMAL only at checkpoints; neither can break the file.
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _working(self) -> Iterator[sqlite3.Connection]:
        """An open connection; dropped, with whatever it had begun, at any error."""
        try:
            yield self._open()
        except JournalUnavailable:
            self.close()
            raise
        except (sqlite3.Error, OSError, msgspec.MsgspecError, OverflowError) as error:
            self.close()
            raise self._unavailable(error) from error
        except BaseException:
            self.close()
            raise

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and journal_file.same(self.path, self._identity):
            return self._connection
        self.close()
        try:
            self._connection = self._connect(lost=False)
        except sqlite3.DatabaseError as error:
            if _code(error) not in _CORRUPT:
                raise
            aside = journal_file.set_aside(self.path)
            self._notices.append(f"the journal {self.path} was corrupt ({error}); it is kept as {aside}, and a new one is begun")
            self._connection = self._connect(lost=True)
        return self._connection

    def _connect(self, *, lost: bool) -> sqlite3.Connection:
        try:
            journal_file.prepare(self.path)
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
        except journal_file.NotOurs as error:
            text, remedy = error.args
            raise JournalUnavailable(f"the journal {self.path} is not used: {text}", hint=remedy) from error
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if schema.migrate(connection) and (given := self._ids.given(lost=lost)):
                connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('faults', ?)", (given,))
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise _corrupt(problem)
            self._identity = journal_file.identity(self.path)
        except schema.NewerSchema as error:
            connection.close()
            hint = f"run that release again, or move {self.path} away"
            raise JournalUnavailable(f"the journal {self.path} was written by a newer release ({error})", hint=hint) from error
        except schema.ForeignDatabase as error:
            connection.close()
            raise JournalUnavailable(f"{self.path} is another program's database", hint=f"move {self.path} away") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _unavailable(self, error: Exception) -> JournalUnavailable:
        if isinstance(error, sqlite3.Error):
            remedy = _REMEDIES.get(_code(error), f"see that {self.path} is a sound SQLite file, or move it away")
        elif isinstance(error, OSError):
            remedy = f"see that the directory {self.path.parent} exists, has room, and can be written by the daemon's user"
        else:
            remedy = f"a row cannot be read or written; move {self.path} away to begin a new journal"
        return JournalUnavailable(f"the journal {self.path} cannot be used: {error}", hint=remedy)


def number_of(fault_id: str) -> int | None:
    """The number in an id such as `f12`; None for what is not written exactly so."""
    digits = fault_id[1:]
    well_formed = fault_id[:1] == "f" and digits.isascii() and digits.isdigit() and digits[0] != "0" and len(digits) <= 18
    return int(digits) if well_formed else None


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code; the upper bytes are details."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _corrupt(problem: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(problem)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _row(fault: Fault) -> dict[str, Any]:
    return {
        "number": number_of(fault.id),
        "spec": msgspec.json.encode(fault.spec).decode(),
        "reason": fault.spec.reason,
        "rank": fault.spec.rank,
    } | {name: getattr(fault, name) for name in schema.COLUMNS if name not in ("number", "spec", "reason", "rank")}


def _fault(row: tuple[Any, ...]) -> Fault:
    """The fault of a row; msgspec errors where somebody edited the row into nonsense."""
    values = dict(zip(schema.COLUMNS, row, strict=True))
    values["id"] = f"f{values.pop('number')}"
    values["spec"] = msgspec.json.decode(values["spec"], type=FaultSpec)
    del values["reason"], values["rank"]
    return msgspec.convert(values, Fault)
