"""Whether the front makes progress, by its pings: what the service manager's watchdog is fed on, beside the executor's own loop.

A front that was there and fell silent is replaced by the executor. One that cannot be brought back ends the feeding: the manager then
ends both halves, which lets every rank go, and starts anew. Executor only, single thread.
"""

from __future__ import annotations

from collections.abc import Callable

PATIENCE = 15.0
"""Seconds that a ping counts for; the front pings every 5."""
STARTING = 30.0
"""Seconds that a front may take until its first ping, all the tries together."""


class Heartbeat:
    """What is known of the front's life."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._clock = clock
        self._answers = False
        self._good_until = clock() + STARTING

    def pinged(self) -> None:
        """The front's loop turns."""
        self._answers = True
        self._good_until = self._clock() + PATIENCE

    def lost(self) -> None:
        """The front ended. Those that end before they pinged get no more time: a front that dies again and again is no progress."""
        if self._answers:
            self._answers = False
            self._good_until = self._clock() + STARTING

    @property
    def good(self) -> bool:
        """Whether the watchdog may be fed."""
        return self._clock() < self._good_until

    @property
    def silent(self) -> bool:
        """Whether a front that answered before no longer does."""
        return self._answers and not self.good
