"""The catalogue of fault patterns: one file each, and this list."""

from __future__ import annotations

from singularityd.faults.pattern import Pattern
from singularityd.faults.patterns import timeout

PATTERNS: tuple[Pattern, ...] = (timeout.PATTERN,)

COMING = ("delay", "error", "hang", "slow", "kill", "flap")
"""Names that later releases give to patterns: refused by name, so that nobody looks for a typing error."""
