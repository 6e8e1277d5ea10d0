"""Keeps long computations in a worker thread from holding the interpreter: the event loop must answer within milliseconds meanwhile."""

from __future__ import annotations

import time


def never() -> None:
    """The pace of a caller that has the process for itself (tests, the reference page)."""


class Pace:
    """Called often by a worker thread; after each `work` seconds it sleeps for `rest`, which lets the event loop have the interpreter.

    A thread that waits for CPython's global lock gets it only after the switch interval (5 ms), and an API call takes the lock several
    times; giving it away of our own accord every millisecond keeps a whole call within a few milliseconds. One instance a rendering.
    """

    def __init__(self, work: float = 0.0005, rest: float = 0.0002) -> None:
        self._work = work
        self._rest = rest
        self._next = time.perf_counter() + work

    def __call__(self) -> None:
        """Rest, if it is time to."""
        if time.perf_counter() >= self._next:
            time.sleep(self._rest)
            self._next = time.perf_counter() + self._work
