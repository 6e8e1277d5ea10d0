"""Durations and percentages as people write them, exact: no floating point between the text and the whole number.

Raises BadOption and nothing else. Only ASCII digits are digits here: what the terminal shows as a 5 must be the 5 that is meant.
"""

from __future__ import annotations

import re
from fractions import Fraction

from singularityd.errors import BadOption

UNITS = {"ms": 1, "s": 1000, "m": 60_000}
"""Unit -> milliseconds."""

LONGEST_MS = 24 * 3600 * 1000
"""A fault or a setting longer than a day is a mistake; the executor's messages carry milliseconds in 32 bits."""

PPM = 1_000_000
"""Parts in a whole; the kernel decides in parts per million, so that 1 ppm (0.0001 %) is the finest there is."""

_NUMBER = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_DURATION = re.compile(rf"(-?)({_NUMBER})(ms|s|m)?")
_PERCENT = re.compile(rf"(-?)({_NUMBER})(%?)")
_WRITE_DURATION = "write a number and a unit without a space: 500ms, 5s, 1.5s or 2m"
_WRITE_PERCENT = "write 25% or 0.5%: more than 0, at most 100, in steps of 0.0001"


def shown(text: str) -> str:
    """A caller's text in quotes for a message: short, and with everything that is not printable escaped."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def milliseconds(name: str, text: str) -> int:
    """Whole milliseconds of `500ms`, `5s`, `1.5s` or `2m`, from 1 to LONGEST_MS; `name` is what the message calls it."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise BadOption(f"{name} {shown(text)} is not a duration", hint=_WRITE_DURATION)
    sign, number, unit = match.groups()
    if unit is None:
        raise BadOption(f"{name} {shown(text)} has no unit", hint=f"write {number}s for seconds or {number}ms for milliseconds")
    value = Fraction(number) * UNITS[unit]
    if sign or value == 0:
        raise BadOption(f"{name} {shown(text)} must be longer than 0", hint=_WRITE_DURATION)
    if value.denominator != 1:
        raise BadOption(f"{name} {shown(text)} is finer than 1 ms", hint="round it to whole milliseconds")
    if value > LONGEST_MS:
        raise BadOption(f"{name} {shown(text)} is longer than {LONGEST_MS // 3_600_000} hours", hint=_WRITE_DURATION)
    return int(value)


def duration_text(value_ms: int) -> str:
    """The shortest text that `milliseconds` reads as this value, for example `1500ms`, `5s`, `2m`."""
    for unit in ("m", "s"):
        if value_ms % UNITS[unit] == 0:
            return f"{value_ms // UNITS[unit]}{unit}"
    return f"{value_ms}ms"


def ppm(name: str, text: str) -> int:
    """Parts per million of `25%`, `25` or `0.5%`, from 1 to PPM.

    A bare number up to 1 is refused: `0.5` is half of the calls to one reader and one call in 200 to another.
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise BadOption(f"{name} {shown(text)} is not a percentage", hint=_WRITE_PERCENT)
    sign, number, mark = match.groups()
    value = Fraction(number) * (PPM // 100)
    if sign or value == 0:
        raise BadOption(f"{name} {shown(text)} must be more than 0 %: such a fault would never hit", hint=_WRITE_PERCENT)
    if value > PPM:
        raise BadOption(f"{name} {shown(text)} is more than 100 %", hint=_WRITE_PERCENT)
    if not mark and Fraction(number) <= 1:
        raise BadOption(f"{name} {shown(text)} can be read as a share or as a percentage", hint=f"write {number}% or 100%, as meant")
    if value.denominator != 1:
        raise BadOption(f"{name} {shown(text)} is finer than 0.0001 %", hint=_WRITE_PERCENT)
    return int(value)


def percent_text(parts: int) -> str:
    """The percentage of so many parts per million, for example `25%`, `0.0001%`."""
    whole, rest = divmod(parts, PPM // 100)
    return f"{whole}%" if not rest else f"{whole}.{rest:04d}".rstrip("0") + "%"


def whole(name: str, text: str, *, least: int, most: int) -> int:
    """A whole number written in ASCII digits."""
    allowed = f"write a whole number from {least} to {most}"
    if re.fullmatch(r"-?[0-9]{1,30}", text) is None or not least <= int(text) <= most:
        raise BadOption(f"{name} {shown(text)} is not allowed", hint=allowed)
    return int(text)
