"""Label values made safe to print: job ids and process names come from users' environments and may hold anything."""

from __future__ import annotations

import unicodedata
from hashlib import blake2s

UNKNOWN = "unknown"

_REPLACED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories that never reach a label: controls, invisible formatting, lone surrogates, unassigned, line separators."""


def safe(value: str, limit: int) -> str:
    """The value itself where it is harmless, else a readable form of at most `limit` characters that ends in a hash of the whole.

    The hash keeps two values apart that differ only in what was cut or replaced; equal values give equal results in every run.
    `limit` is at least 16.
    """
    if not value:
        return UNKNOWN
    if len(value) <= limit and value.isascii() and value.isprintable():
        return value
    head = value[:limit]
    clean = "".join("\ufffd" if unicodedata.category(character) in _REPLACED else character for character in head)
    if clean == value:
        return value
    digest = blake2s(value.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{clean[: limit - 9]}~{digest}"


class Labels:
    """Remembers what `safe` answered, so that a page asks once for each distinct value. One instance a page; one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    def __call__(self, value: str) -> str:
        """The value as a label."""
        known = self._known.get(value)
        if known is None:
            known = self._known[value] = safe(value, self._limit)
        return known

    def rank(self, rank: int | None) -> str:
        """A global rank as a label: its number, or `unknown`, never 0 for what is not known."""
        return UNKNOWN if rank is None else str(rank)
