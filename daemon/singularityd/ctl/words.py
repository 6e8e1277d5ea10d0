"""Numbers and times as people read them. Pure."""

from __future__ import annotations

import datetime
import unicodedata

ABSENT = "-"
UNKNOWN = "?"


def printable(text: str) -> str:
    r"""The text with everything that could steer a terminal escaped (`\x1b`): job ids and names are other people's words."""
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def width(text: str) -> int:
    """Columns that printable text takes in a terminal."""
    return sum(0 if unicodedata.combining(mark) else 2 if unicodedata.east_asian_width(mark) in "WF" else 1 for mark in text)


def shorten(text: str, columns: int) -> str:
    """The text in at most so many columns, its middle cut out: ids and paths are told apart by their ends."""
    if width(text) <= columns:
        return text
    if columns < 2:
        return "…"[:columns]
    head, tail = "", ""
    for step in range(len(text)):
        grown = (head + text[len(head)], tail) if step % 2 == 0 else (head, text[-1 - len(tail)] + tail)
        if width(grown[0] + grown[1]) > columns - 1:
            break
        head, tail = grown
    return f"{head}…{tail}"


def duration(seconds: float) -> str:
    """A length of time in three digits: `850 us`, `12.5 ms`, `3.2 s`, `2 min 5 s`, `4 h 3 min`, `2 d 1 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 59.95:
        for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
            if seconds / scale < 999.5:
                return f"{_digits(seconds / scale)} {unit}"
        return f"{_digits(seconds)} s"
    whole = round(seconds)
    for (big, of_big), (small, of_small) in ((("min", 60), ("s", 1)), (("h", 3600), ("min", 60))):
        if whole < of_big * (60 if big == "min" else 24):
            rest = whole % of_big // of_small
            return f"{whole // of_big} {big}" + (f" {rest} {small}" if rest else "")
    rest = whole % 86400 // 3600
    return f"{whole // 86400} d" + (f" {rest} h" if rest else "")


def coarse(seconds: float) -> str:
    """A length of time in its largest unit alone, for narrow columns: `850 us`, `2 min`, `4 h`."""
    return " ".join(duration(seconds).split()[:2])


def size(count: float) -> str:
    """Bytes with a binary unit: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 999.5:
            return f"{_digits(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} PiB"


def rate(count: float) -> str:
    """Calls each second: `0`, `3.2`, `950`, `12.3k`, `4.1M`."""
    for unit in ("", "k", "M"):
        if count < 999.5:
            return f"{_digits(count)}{unit}"
        count /= 1000
    return f"{_digits(count)}G"


def number(value: float) -> str:
    """A number without a tail of zeros: `25`, `0.5`."""
    return f"{value:.6g}"


def plural(count: int, noun: str) -> str:
    """`1 hit`, `0 hits`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def moment(at: float) -> str:
    """A Unix time as `2026-12-01 03:04:05Z`. UTC: hosts of one cluster are compared with each other."""
    return _utc(at).strftime("%Y-%m-%d %H:%M:%SZ") if at else ABSENT


def near(at: float, now: float) -> str:
    """A Unix time as `03:04:05Z`, with the date and without the seconds when that is another day than `now`."""
    if not at:
        return ABSENT
    return _utc(at).strftime("%H:%M:%SZ" if _utc(at).date() == _utc(now).date() else "%Y-%m-%d %H:%MZ")


def instant(at: float) -> str:
    """A Unix time in ISO 8601 with milliseconds, UTC."""
    return _utc(at).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(at * 1000) % 1000:03d}Z" if at else ABSENT


def _utc(at: float) -> datetime.datetime:
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=int(at * 1000))


def _digits(value: float) -> str:
    if value >= 99.95 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}".rstrip("0").rstrip(".")
