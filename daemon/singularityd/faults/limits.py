"""What a caller may ask for, whoever it is. The executor checks the ones that matter a second time, for itself."""

from __future__ import annotations

from collections import deque

import msgspec

from singularityd.errors import Busy, NotAllowed
from singularityd.faults.quantity import duration_text
from singularityd.model import FaultSpec

_WINDOW = 60.0


class FaultLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings `[faults]`."""

    enabled: bool = True
    max_duration: float = 60.0
    """Seconds from arming to the deadline."""
    max_active: int = 8
    """Faults of this host that are armed, or being armed, at once."""
    per_minute: int = 60
    """Requests in any minute; dry runs are not counted."""
    silence: float = 2.0
    """Seconds after the deadline without word from the executor after which a fault is given up."""


class Gate:
    """Applies the limits. Loop thread only."""

    def __init__(self, limits: FaultLimits) -> None:
        self.limits = limits
        self._times: deque[float] = deque()

    def check(self, spec: FaultSpec, active: int) -> None:
        """Raises NotAllowed or Busy, naming the setting; `active` faults are armed or being armed now."""
        limits = self.limits
        if not limits.enabled:
            raise NotAllowed("faults are switched off on this host", hint="set faults.enabled = true and restart the daemon")
        if spec.duration > limits.max_duration:
            asked, most = (duration_text(round(seconds * 1000)) for seconds in (spec.duration, limits.max_duration))
            raise NotAllowed(f"a fault may last up to {most}, not {asked}", hint=f"write --for {most}, or raise faults.max_duration")
        if active >= limits.max_active:
            raise Busy(
                f"{active} faults are armed on this host, which is the limit",
                hint="wait for one to end, or `singularityctl clear` one; faults.max_active is the limit",
            )

    def count(self, now: float) -> None:
        """Count one request at `now` (loop time, seconds). Raises Busy when the last minute is full."""
        while self._times and now - self._times[0] >= _WINDOW:
            self._times.popleft()
        if len(self._times) >= self.limits.per_minute:
            wait = _WINDOW - (now - self._times[0])
            text = f"{self.limits.per_minute} faults were asked for within a minute, which is the limit"
            raise Busy(text, hint=f"try again in {wait:.0f} s; faults.per_minute is the limit")
        self._times.append(now)
