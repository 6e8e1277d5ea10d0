"""What the front measures of itself: the delay of its event loop, its memory and its CPU time."""

from __future__ import annotations

import asyncio
import os
import resource
from collections import deque
from typing import NamedTuple


class Usage(NamedTuple):
    """What a process uses."""

    rss: int
    """Resident bytes."""
    cpu: float
    """Seconds of CPU, user and system, since its start."""


def usage() -> Usage:
    """This process's usage now. Any thread; a few microseconds."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), used.ru_utime + used.ru_stime)


class LoopLag:
    """How late the event loop runs what is due: a task that sleeps `interval` and looks by how much it overslept. Loop thread only."""

    def __init__(self, interval: float = 0.25, window: float = 60.0) -> None:
        self._interval = interval
        self._lags: deque[float] = deque([0.0], maxlen=max(1, round(window / interval)))

    @property
    def worst(self) -> float:
        """The greatest delay within the window, seconds."""
        return max(self._lags)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            self._lags.append(max(0.0, loop.time() - due))
