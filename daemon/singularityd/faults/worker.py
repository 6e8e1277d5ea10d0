"""One named thread for calls that block, so that a slow disk never stops the loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class WorkerLike(Protocol):
    """Runs blocking calls one after the other, in the order in which they were asked for."""

    def run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Ask for a call; loop thread only."""

    def close(self, wait: float) -> None:
        """Take no more calls; wait so many seconds for those under way."""


class Worker:
    """The thread. A daemon thread, so that a disk that never answers cannot keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._started = False

    def run(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Ask for a call; its result or exception comes with the future. A call that is no longer waited for is made all the same."""
        if not self._started:
            self._started = True
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((loop, future, lambda: function(*arguments)))
        return future

    def close(self, wait: float) -> None:
        """End the thread after the calls asked for; blocks up to `wait` seconds."""
        self._jobs.put(None)
        if self._started:
            self._thread.join(wait)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, call = job
            try:
                result, error = call(), None
            except BaseException as caught:  # noqa: BLE001  it belongs to whoever waits for the future
                result, error = None, caught
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed: nobody waits
                return


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
