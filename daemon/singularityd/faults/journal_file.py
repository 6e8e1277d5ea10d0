"""The journal's files on disk: made with the right owner and mode, refused when they are not, set aside when they are corrupt.

Beside the database lies a small file that says up to which number ids have been given. It is written ahead, in blocks, and outlives
a database that was lost or set aside: an id is never used for two faults of one host.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

BLOCK = 100
"""Ids are promised in blocks of this size, so that the file is written once for so many faults."""

_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


class NotOurs(Exception):
    """The file belongs to somebody else, can be written by others, or is no regular file. `args` are a text and a remedy."""


def prepare(path: Path) -> None:
    """Make an empty file of mode 0600, or see that the one there is ours alone. Raises NotOurs, OSError."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600))
        return
    if not stat.S_ISREG(status.st_mode):
        raise NotOurs("it is not a regular file", f"move {path} away")
    if status.st_uid != os.geteuid():
        raise NotOurs(f"it belongs to uid {status.st_uid}, the daemon's front is uid {os.geteuid()}", f"chown {os.geteuid()} {path}*")
    if status.st_mode & 0o022:
        raise NotOurs(f"others can write it (mode {stat.S_IMODE(status.st_mode):04o})", f"chmod 600 {path}")


def same(path: Path, inode: tuple[int, int]) -> bool:
    """Whether the path still names the file that was opened: writing to one that was removed keeps nothing."""
    try:
        return identity(path) == inode
    except OSError:
        return False


def identity(path: Path) -> tuple[int, int]:
    """(device, inode). Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino


def set_aside(path: Path) -> Path:
    """Rename the database and what belongs to it to NAME.corrupt-TIME; returns the database's new path. Raises OSError."""
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target, number = path.with_name(f"{path.name}.corrupt-{when}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.corrupt-{when}-{number}")
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        companion = Path(f"{path}{suffix}")
        if companion.exists():
            companion.rename(f"{target}{suffix}")
    return target


class Ids:
    """The file that says which ids may have been given."""

    def __init__(self, path: Path) -> None:
        self.path = Path(f"{path}.next")
        self._promised: int | None = None

    def given(self, *, lost: bool) -> int:
        """No id above this was given. Where a journal was `lost` and this file tells nothing, the Unix time: larger than any count."""
        try:
            return int(self.path.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return int(time.time()) if lost else 0

    def promise(self, number: int) -> None:
        """Before id `number` is used: see that the file covers it. Durable when it returns. Raises OSError."""
        if self._promised is not None and number <= self._promised:
            return
        promised = number + BLOCK - 1
        fresh = Path(f"{self.path}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NOFOLLOW, 0o600)
        try:
            os.write(descriptor, b"%d\n" % promised)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fresh.replace(self.path)
        _sync_directory(self.path.parent)
        self._promised = promised


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
