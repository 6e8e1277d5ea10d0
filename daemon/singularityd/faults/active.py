"""One fault in the service's hands, from the request to its end and a little beyond."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from singularityd.model import Event, Fault


class Ending(NamedTuple):
    """The executor's word on a fault that is over; the counts are the kernel's."""

    reason: str
    hits: int
    seen: int


class Active:
    """Mutable; loop thread only."""

    def __init__(self, fault: Fault, publish: Callable[[Event], object], *, value: int = 0) -> None:
        self.fault = fault
        self.value = value
        """What a call that is skipped returns."""
        self.number = 0
        """0 until the journal has given one."""
        self.in_force = False
        """The executor said so, and has not said that it is over."""
        self.wish = ""
        """Why it is to end, where somebody wants it to; becomes its ending."""
        self.wished_by = ""
        self.early: Ending | None = None
        """An end that was heard before the answer to the order."""
        self.final = False
        """The number of hits is the kernel's last word."""
        self.timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[Fault] = asyncio.get_running_loop().create_future()
        self._publish = publish
        self._kept: list[Event] | None = []

    @property
    def key(self) -> tuple[int, int]:
        """What names the process for ever."""
        return self.fault.pid, self.fault.start_time

    @property
    def over(self) -> bool:
        """Ended or refused."""
        return self.ended.done()

    def change(self, **values: Any) -> None:
        """Replace fields of the fault."""
        self.fault = msgspec.structs.replace(self.fault, **values)

    def tell(self, event: Event) -> None:
        """Publish, or keep until `open`: nobody should hear of a hit before hearing that the fault is armed."""
        if self._kept is None:
            self._publish(event)
        else:
            self._kept.append(event)

    def open(self, first: Event | None = None) -> None:
        """Publish `first`, then what was kept, then each event at once."""
        kept, self._kept = self._kept, None
        for event in ([first] if first is not None else []) + (kept or []):
            self._publish(event)

    def stop_timer(self) -> None:
        """The backstop is not needed any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
