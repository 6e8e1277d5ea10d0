"""The audit's chain: each line carries the SHA-256 of the line before. Making, reading and checking it; no daemon is needed.

It shows a line that was changed, removed, moved or cut. Whoever may write the file can also make a whole new chain from some line on:
against that the last hash must be kept elsewhere, so the daemon logs it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FIRST = "0" * 64
"""What the first line of all names as the hash before it."""
NAME = "audit.jsonl"
LONGEST_LINE = 64 << 10
_FULL = re.compile(r".*-(\d{12})")


class Link(NamedTuple):
    """The end of a chain: what the next line continues."""

    number: int = 0
    hash: str = FIRST


class Verdict(NamedTuple):
    """What a check found; `problem` is empty for a whole chain."""

    lines: int
    first: int
    """The number of the first line: above 1 where earlier files were rotated away."""
    last: Link
    file: str = ""
    line: int = 0
    """Where it breaks: the line of that file, counted from 1."""
    problem: str = ""


def line(before: Link, record: Mapping[str, Any]) -> tuple[bytes, Link]:
    """The next line, its end included, and the link it makes."""
    text = json.dumps({"n": before.number + 1, "prev": before.hash, **record}, separators=(",", ":"), ensure_ascii=True)
    data = text.encode() + b"\n"
    return data, Link(before.number + 1, digest(data))


def digest(data: bytes) -> str:
    """The hash of a line, its end included."""
    return hashlib.sha256(data).hexdigest()


def family(current: Path) -> list[Path]:
    """The rotated files of an audit, oldest first, and itself. Raises OSError."""
    return [*sorted(path for path in current.parent.glob(f"{current.stem}-*{current.suffix}")), current]


def rotated(current: Path, first: int) -> Path:
    """The name of a full file: the number of its first line, so that names stand in order."""
    return current.with_name(f"{current.stem}-{first:012d}{current.suffix}")


def check(files: Sequence[Path]) -> Verdict:
    """The chain through these files, which stand in order. Raises OSError for one that cannot be read."""
    last, first, count = Link(), 0, 0
    for file in files:
        for number, data in enumerate(_lines(file), 1):
            link, problem = _follow(data, last if count else None)
            if not problem and not count and link.number != _begins(file):
                problem = f"line number {_begins(file)} is expected first and {link.number} is here: lines were removed"
            if problem:
                return Verdict(count, first, last, str(file), number, problem)
            first, last, count = first or link.number, link, count + 1
    return Verdict(count, first, last)


def read_link(data: bytes) -> tuple[int, str] | None:
    """(number, hash of the line before) that a line states; None for what is no line of a chain."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("prev"), str):
        return None
    number = said.get("n")
    return (number, said["prev"]) if type(number) is int and number > 0 else None


def whole_family(file: Path) -> bool:
    """Whether a path names the file being written, rather than a full one."""
    return _FULL.fullmatch(file.stem) is None


def _begins(file: Path) -> int:
    """The number of the first line of a file that no other stands before: a full file has it in its name, the newest begins a chain."""
    full = _FULL.fullmatch(file.stem)
    return int(full[1]) if full else 1


def _follow(data: bytes, last: Link | None) -> tuple[Link, str]:
    said = read_link(data)
    if not data.endswith(b"\n"):
        return Link(), "the line is cut: it has no end"
    if said is None:
        return Link(), "this is no line of an audit"
    number, before = said
    link = Link(number, digest(data))
    if last is None:
        return link, "the first line does not begin a chain" if number == 1 and before != FIRST else ""
    if number != last.number + 1:
        return link, f"line number {last.number + 1} is expected and {number} is here: lines were removed or moved"
    if before != last.hash:
        return link, f"the line before (number {last.number}) is not the one that was written: it was changed"
    return link, ""


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while data := stream.readline(LONGEST_LINE):
            yield data
