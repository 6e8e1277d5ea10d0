"""Which files a process has mapped as code."""

from __future__ import annotations

from typing import NamedTuple


class MappedFile(NamedTuple):
    """One file, by the inode that is really mapped."""

    device: int
    inode: int
    path: str
    """As the process sees it, for people; ` (deleted)` taken off."""
    deleted: bool
    entry: str
    """Its name in /proc/PID/map_files: opens this very inode from any mount namespace, deleted or not."""


def parse(data: bytes) -> list[MappedFile]:
    """Files with an executable mapping, each once, in the order of their addresses."""
    found: dict[tuple[int, int], MappedFile] = {}
    for line in data.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 6 or fields[1][2:3] != b"x" or fields[4] == b"0":
            continue
        major, _, minor = fields[3].partition(b":")
        key = (int(major, 16) << 20 | int(minor, 16), int(fields[4]))
        if key in found:
            continue
        name = fields[5]
        deleted = name.endswith(b" (deleted)")
        if deleted:
            name = name[: -len(b" (deleted)")]
        if name.startswith((b"/dev/", b"/SYSV", b"[")):
            continue
        path = name.replace(b"\\012", b"\n").decode("utf-8", "replace")
        found[key] = MappedFile(key[0], key[1], path, deleted, map_files_name(fields[0]))
    return list(found.values())


def map_files_name(span: bytes) -> str:
    """map_files writes addresses without the leading zeros that maps pads them with."""
    first, _, last = span.partition(b"-")
    return f"{int(first, 16):x}-{int(last, 16):x}"
