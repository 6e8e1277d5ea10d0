"""The audit: every call that disturbs a job or ends that, before it is done and after; and every refusal. JSON lines, hash-chained.

A line is on disk (fsync) before the call it tells of begins; where it cannot be written the call is refused. `api.chain` checks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog

from singularityd.api import chain
from singularityd.api.chain import Link
from singularityd.api.limits import Bucket
from singularityd.errors import AuditUnavailable

LARGEST = 16 << 20
"""Bytes of one file."""
FILES = 16
"""Full files that are kept beside the one being written."""
REFUSALS, REFUSALS_AT_ONCE = 5.0, 200
"""Refusals a second that get a line; the others are counted in the next one, so that nobody fills the disk by being refused."""
_LONGEST = 512
"""Characters of a text in a line."""
_REMEDY = "see that the state directory's disk has room and is writable; nothing is armed or cleared meanwhile"


class Audit:
    """One chain of files. `write` and `refused` on the loop thread; the disk is touched by a thread of its own only."""

    def __init__(self, path: Path, *, largest: int = LARGEST, files: int = FILES, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._largest = largest
        self._files = files
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "audit")
        self._bucket = Bucket(REFUSALS, REFUSALS_AT_ONCE)
        self._unsaid = 0
        self._fd = -1
        self._link = Link()
        self._first = 1
        self._size = 0
        self._log = structlog.get_logger("audit")

    async def write(self, record: Mapping[str, Any]) -> None:
        """Returns when the line is on disk, which a cancelled caller does not prevent. Raises AuditUnavailable."""
        told = {"at": round(self._clock(), 6), **{key: _short(value) for key, value in record.items()}}
        if self._unsaid:
            told["refusals_not_told"], self._unsaid = self._unsaid, 0
        written = asyncio.get_running_loop().run_in_executor(self._thread, self._append, told)
        try:
            await asyncio.shield(written)
        except OSError as error:
            raise AuditUnavailable(f"the audit cannot be written: {error.strerror or error}", hint=_REMEDY) from None

    async def refused(self, record: Mapping[str, Any]) -> None:
        """A refusal: one line, as far as there are not too many. Never raises: the call is refused anyway."""
        if not self._bucket.take():
            self._unsaid += 1
            return
        try:
            await self.write(record)
        except AuditUnavailable as error:
            self._log.error("a refusal is not in the audit", error=error.text, record=dict(record))

    def close(self) -> None:
        """Wait for what is being written, and let go of the file."""
        self._thread.shutdown()
        self._forget()

    # On the audit's thread

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            if self._fd < 0 or not self._same_file():
                self._open()
            if self._size >= self._largest:
                self._rotate()
            self._put(record)
        except OSError:
            self._forget()  # the next one looks at the disk anew
            raise

    def _same_file(self) -> bool:
        """A file that was moved or removed under us would take lines that nobody finds."""
        ours = os.fstat(self._fd)
        with contextlib.suppress(FileNotFoundError):
            there = self._path.stat()
            return (ours.st_dev, ours.st_ino, ours.st_size) == (there.st_dev, there.st_ino, self._size)
        return False

    def _put(self, record: Mapping[str, Any]) -> None:
        data, link = chain.line(self._link, record)
        if os.write(self._fd, data) != len(data):
            raise OSError(28, "no space left for a whole line")  # what is there of it is taken away when the file is opened again
        os.fsync(self._fd)
        self._link, self._size = link, self._size + len(data)

    def _open(self) -> None:
        self._forget()
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._fd).st_size
        torn = self._drop_torn()
        last = self._last_of(self._path) or self._last_of_rotated()
        self._link = last or Link()
        head = self._path.open("rb").readline(chain.LONGEST_LINE) if self._size else b""
        said = chain.read_link(head)
        self._first = said[0] if said else self._link.number + 1
        self._sync_directory()
        if torn:
            self._put(
                {"at": round(self._clock(), 6), "decision": "recovered", "outcome": f"an unfinished line of {torn} bytes was removed"}
            )
        self._log.info("audit opened", number=self._link.number, hash=self._link.hash)

    def _drop_torn(self) -> int:
        """A line without its end was never acknowledged: its call was not begun. Returns its size."""
        if not self._size:
            return 0
        tail = os.pread(self._fd, chain.LONGEST_LINE, max(0, self._size - chain.LONGEST_LINE))
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            os.ftruncate(self._fd, self._size - torn)
            os.fsync(self._fd)
            self._size -= torn
        return torn

    @staticmethod
    def _last_of(path: Path) -> Link | None:
        """The link of a file's last line; None for an empty one. Raises OSError for one that ends in something else."""
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - chain.LONGEST_LINE))
            lines = stream.read().splitlines(keepends=True)
        if not lines:
            return None
        said = chain.read_link(lines[-1])
        if said is None:
            raise OSError(5, f"{path} does not end in a line of an audit")
        return Link(said[0], chain.digest(lines[-1]))

    def _last_of_rotated(self) -> Link | None:
        older = chain.family(self._path)[:-1]
        return self._last_of(older[-1]) if older else None

    def _rotate(self) -> None:
        self._path.rename(chain.rotated(self._path, self._first))
        link = self._link
        self._forget()
        self._open()
        assert self._link == link, "the chain goes on from the last line of the full file"
        for old in chain.family(self._path)[: -self._files - 1]:
            old.unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _short(value: Any) -> Any:
    """Whatever a client wrote is bounded: a line stays a line."""
    if isinstance(value, str):
        clean = value.encode("utf-8", "backslashreplace").decode()
        return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]}..."
    return value
