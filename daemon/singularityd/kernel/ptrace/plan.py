"""What is to be done to a rank, and for how long each time. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from singularityd.kernel import abi

FIXED, UNIFORM, NORMAL, EXPONENTIAL = 0, 1, 2, 3
DISTRIBUTIONS = {"fixed": FIXED, "uniform": UNIFORM, "normal": NORMAL, "exponential": EXPONENTIAL}
LONGEST_FACTOR = 20
"""An exponential delay is at most so many times its mean."""
_SHORTEST_PERIOD_NS, _PERIOD_NS_PER_THREAD = 20_000_000, 400_000
_M64 = (1 << 64) - 1
_MS = 1_000_000


class Plan(NamedTuple):
    """Of one fault."""

    action: int = abi.ACTION_HOLD
    milliseconds: int = 0
    """How long each hit thread is held; 0: until the deadline, or not at all where the call returns at once."""
    jitter: int = 0
    """Milliseconds around `milliseconds`: half the width of UNIFORM, the standard deviation of NORMAL."""
    distribution: int = FIXED
    returns: bool = False
    """The call is skipped and returns `value` when its time is over."""
    value: int = 0
    until_end: bool = True
    """With `returns` and 0 milliseconds: hold until the deadline first."""
    on: int = 0
    """Milliseconds of each period in which the fault is in force; 0: always."""
    off: int = 0
    running_ppm: int = 0
    """ACTION_DUTY: share of the time that the rank runs."""
    period: int = 0
    """ACTION_DUTY: milliseconds of one turn; 0: by the number of threads."""
    seed: int = 0
    rank: int = 0

    def hold_until(self, index: int, at_ns: int, start_ns: int) -> int:
        """When a call that was hit at `at_ns` goes on; 0: at the deadline. `index` numbers the calls, for the random delays."""
        if self.on:
            period = (self.on + self.off) * _MS
            return start_ns + max(0, at_ns - start_ns) // period * period + self.on * _MS
        if self.returns and not self.milliseconds and not self.until_end:
            return at_ns
        return at_ns + round(self.delay_ms(index) * _MS) if self.milliseconds else 0

    def delay_ms(self, index: int) -> float:
        """The delay of the index-th call in milliseconds, never negative: the same for the same seed, rank and index."""
        if self.distribution == FIXED:
            return self.milliseconds
        first = _mix(self.seed ^ _mix((self.rank << 32) ^ index ^ 0x6465_6C61_79))
        one, two = _unit(first), _unit(_mix(first))
        if self.distribution == UNIFORM:
            value = self.milliseconds + self.jitter * (2 * one - 1)
        elif self.distribution == NORMAL:
            value = self.milliseconds + self.jitter * math.sqrt(-2 * math.log(one)) * math.cos(2 * math.pi * two)
        else:
            value = min(-self.milliseconds * math.log(one), LONGEST_FACTOR * self.milliseconds)
        return max(0.0, value)

    def turn_ns(self, threads: int) -> tuple[int, int]:
        """ACTION_DUTY: (nanoseconds of running, of one whole turn). Each stop and go costs some microseconds a thread."""
        whole = self.period * _MS or max(_SHORTEST_PERIOD_NS, threads * _PERIOD_NS_PER_THREAD)
        return whole * self.running_ppm // 1_000_000, whole


def _mix(x: int) -> int:
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _unit(x: int) -> float:
    """In (0, 1]."""
    return ((x >> 11) + 1) / (1 << 53)
