"""Whether the daemon does its work: each part says how it fares, and a part that falls silent counts as ill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Part:
    ok: bool
    detail: str
    stale_after: float
    said_at: float


class Health:
    """What each part said last. Feeds /healthz, the gRPC health service and the systemd watchdog. Loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[str, _Part] = {}

    def expect(self, name: str, *, stale_after: float = 0.0) -> None:
        """Name a part before it works: it is ill until its first `good`, and when silent for `stale_after` seconds (0: may be silent)."""
        self._parts[name] = _Part(False, "starting", stale_after, self._clock())

    def good(self, name: str, detail: str = "") -> None:
        """The part works. Raises KeyError for a name that was not expected."""
        self._say(name, True, detail)

    def bad(self, name: str, detail: str) -> None:
        """The part does not work; `detail` is for a person."""
        self._say(name, False, detail)

    def _say(self, name: str, ok: bool, detail: str) -> None:
        part = self._parts[name]
        part.ok, part.detail, part.said_at = ok, detail, self._clock()

    def parts(self) -> dict[str, tuple[bool, str]]:
        """Each part's (works, detail), in the order in which they were named."""
        return {name: self._judge(part) for name, part in self._parts.items()}

    def _judge(self, part: _Part) -> tuple[bool, str]:
        silent = self._clock() - part.said_at
        if part.ok and part.stale_after and silent > part.stale_after:
            return False, f"silent for {silent:.0f} s"
        return part.ok, part.detail

    def report(self) -> tuple[bool, str]:
        """(everything works, one line for each part)."""
        parts = self.parts()
        lines = (f"{'ok ' if ok else 'BAD'} {name}{': ' if detail else ''}{detail}" for name, (ok, detail) in parts.items())
        return all(ok for ok, _ in parts.values()), "\n".join(lines)
