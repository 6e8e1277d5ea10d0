"""Tasks that must run to their end even where whoever asked for them has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from singularityd.errors import SingularityError

T = TypeVar("T")


class Tasks:
    """Keeps its tasks until they are done. An error of ours counts as seen: whoever needs it awaits the task; others are logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._log = structlog.get_logger("faults")

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start one; loop thread."""
        task = asyncio.get_running_loop().create_task(work, name="faults")
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, wait: float) -> None:
        """Wait so many seconds for all of them, those that they start included, then cancel those that are left."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        while self._running and loop.time() < end:
            await asyncio.wait(self._running, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        for task in self._running:
            task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, SingularityError):
            self._log.error("a task of the fault service failed", exc_info=error)
