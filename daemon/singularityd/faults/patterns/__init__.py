"""The catalogue of fault patterns: one file each, and this list."""

from __future__ import annotations

from singularityd.faults.pattern import Pattern
from singularityd.faults.patterns import delay, error, flap, hang, kill, slow, timeout

PATTERNS: tuple[Pattern, ...] = (
    timeout.PATTERN,
    delay.PATTERN,
    error.PATTERN,
    hang.PATTERN,
    slow.PATTERN,
    kill.PATTERN,
    flap.PATTERN,
)
