"""What the fault service asks of the executor, and what it hears back."""

from __future__ import annotations

from typing import Protocol

import msgspec

from singularityd.kernel import abi


class ArmOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Arm this fault on this process, from now for `duration`."""

    number: int
    pid: int
    start_time: int
    rank: int
    op: str
    """An operation of kernel.abi.OPS, or `any`."""
    backend: str
    """Empty: any."""
    milliseconds: int
    """How long each hit is held; 0: until the deadline."""
    probability: float
    """Percent."""
    duration: float
    """Seconds."""
    seed: int
    count: int
    """At most so many hits; 0: no limit."""
    after: int = 0
    """So many of the meant calls are left alone first."""
    action: int = abi.ACTION_HOLD
    jitter: int = 0
    """Milliseconds."""
    distribution: str = "fixed"
    returns: bool = False
    """A call that was hit is skipped and returns `value`."""
    at_once: bool = False
    """Without being held first."""
    value: int = 0
    on: int = 0
    """Milliseconds; 0: always in force."""
    off: int = 0
    percent: float = 0.0
    """Share of the time that a slowed rank runs."""
    period: int = 0
    """Milliseconds; 0: the executor chooses."""


class Armed(msgspec.Struct, frozen=True, kw_only=True):
    """The fault is in force."""

    mechanism: str
    """The rung of the ladder that was used."""
    signal: int
    """The signal that the probe sends to the thread; 0 where the mechanism needs none."""
    threads: int
    """Threads of the rank that were seized."""
    delay: float
    """Seconds from the order to the fault being in force."""


class Executor(Protocol):
    """The privileged half, as the link shows it. Loop thread."""

    async def arm(self, order: ArmOrder) -> Armed:
        """Raises a SingularityError when it is refused; nothing is armed then."""

    async def clear(self, number: int) -> None:
        """End a fault now; its end is told by `on_ended`. A number that is not armed is no error."""
