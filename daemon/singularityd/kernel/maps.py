"""Which files a process has mapped as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Only lines of executable mappings of a file are ever looked at in Python: a rank has hundreds of others.
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..x. [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) ([1-9][0-9]*) +([^ \n][^\n]*)$", re.MULTILINE)
_DELETED = b" (deleted)"
# Devices are told by their kind, when they are opened: /dev/shm holds libraries, and a path is whatever the process's mounts make it.
_NOT_FILES = re.compile(rb"(?:\[|anon_inode:|/dev/zero(?: \(deleted\))?$|/SYSV[0-9a-f]{8}(?: \(deleted\))?$)")


class MappedFile(NamedTuple):
    """One file, by the inode that is really mapped."""

    device: int
    """As the kernel numbers devices inside: major << 20 | minor. Not os.stat's st_dev."""
    inode: int
    path: str
    """As the process sees it, for people; ` (deleted)` taken off."""
    deleted: bool
    entry: str
    """Its name in /proc/PID/map_files: opens this very inode from any mount namespace, deleted or not."""


def parse(data: bytes) -> list[MappedFile]:
    """Files with an executable mapping, each (device, inode) once, in the order of their addresses.

    A memfd is a file like another (deleted, on a device of its own): code that was loaded from memory is searched too.
    """
    found: dict[tuple[int, int], MappedFile] = {}
    for file in _lines(data):
        found.setdefault((file.device, file.inode), file)
    return list(found.values())


def _lines(data: bytes) -> Iterator[MappedFile]:
    for match in _LINE.finditer(data):
        first, last, major, minor, inode, name = match.groups()
        if _NOT_FILES.match(name):
            continue
        deleted = name.endswith(_DELETED)
        # A path may end in the very words; then, too, its inode is opened, and only the name shown is shorter.
        path = name.removesuffix(_DELETED).replace(b"\\012", b"\n").decode("utf-8", "surrogateescape")
        # map_files writes addresses without the leading zeros that maps pads them with.
        entry = f"{int(first, 16):x}-{int(last, 16):x}"
        yield MappedFile(int(major, 16) << 20 | int(minor, 16), int(inode), path, deleted, entry)
