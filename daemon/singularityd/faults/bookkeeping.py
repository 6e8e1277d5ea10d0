"""The journal from the loop's side: asked on its own thread, with a time limit, and written to again later where it failed.

Only the row that must exist before arming is waited for with an error to the caller. What becomes of a fault afterwards is kept here
until the journal has taken it: a full disk must not keep a fault from being ended.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TypeVar

import msgspec
import structlog

from singularityd.errors import JournalUnavailable
from singularityd.faults.journal import JournalLike, number_of
from singularityd.faults.worker import WorkerLike
from singularityd.model import Fault

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds the journal may take for one answer."""
_SOON = 0.5
"""Seconds for which changes that can wait, such as the count of hits, are gathered."""
_RETRY = 5.0


class Bookkeeping:
    """Loop thread only."""

    def __init__(self, journal: JournalLike, worker: WorkerLike) -> None:
        self._journal = journal
        self._worker = worker
        self._log = structlog.get_logger("faults")
        self._unsaved: dict[int, Fault] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._troubled = False
        self._finished = False

    async def create(self, fault: Fault) -> Fault:
        """The fault with its id, on the disk. Raises JournalUnavailable; a row that comes too late is closed as refused."""
        asked = self._worker.run(self._journal.create, fault)
        try:
            return await self._answer(asked)
        except (JournalUnavailable, asyncio.CancelledError):
            asked.add_done_callback(self._too_late)
            raise

    async def update(self, fault: Fault) -> None:
        """Raises JournalUnavailable."""
        number = number_of(fault.id)
        if number in self._unsaved:  # or an older row would be written over this one later
            self._unsaved[number] = fault
        await self._answer(self._worker.run(self._journal.update, fault))

    async def close_open(self, reason: str) -> list[Fault]:
        """Raises JournalUnavailable."""
        return await self._answer(self._worker.run(self._journal.close_open, reason))

    async def get(self, fault_id: str) -> Fault | None:
        """Raises JournalUnavailable."""
        return await self._answer(self._worker.run(self._journal.get, fault_id))

    async def history(self, limit: int) -> list[Fault]:
        """Raises JournalUnavailable."""
        return await self._answer(self._worker.run(self._journal.history, limit))

    async def within(self, function: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """One transaction on another table of the journal's file. Raises JournalUnavailable."""
        return await self._answer(self._worker.run(lambda: self._journal.within(function, durable=durable)))

    async def faults_where(self, *, campaign: str = "", since: float = 0.0) -> list[Fault]:
        """Oldest first, with what is known here and not written yet. Raises JournalUnavailable."""
        found = await self._answer(self._worker.run(lambda: self._journal.faults_where(campaign=campaign, since=since)))
        return [self._unsaved.get(number_of(fault.id) or 0, fault) for fault in found]

    def save(self, fault: Fault, *, soon: bool = False) -> None:
        """Write this row without being waited for, now or `soon`; tried again until it succeeds.

        The newest row of a fault counts. After `finish` nothing is written: the next start closes what is open.
        """
        number = number_of(fault.id)
        assert number is not None, "only a fault with an id has a row"
        if self._finished:
            return
        self._unsaved[number] = fault
        self._schedule(_SOON if soon else 0.0)

    async def finish(self, wait: float) -> None:
        """Write what is unsaved, as far as that works within `wait` seconds, and let go of the journal."""
        self._stop_timer()
        try:
            async with asyncio.timeout(wait):
                if self._flushing is not None:
                    await asyncio.wait({self._flushing})
                self._stop_timer()
                await self._flush()
                await self._answer(self._worker.run(self._journal.close))
        except (TimeoutError, JournalUnavailable) as error:
            self._log.error("the journal could not be closed in order", error=str(error), unsaved=len(self._unsaved))
        self._finished = True
        self._stop_timer()
        self._worker.close(0.1)

    async def _answer(self, asked: asyncio.Future[T]) -> T:
        done, _ = await asyncio.wait({asked}, timeout=PATIENCE)
        self._tell_notices()
        if not done:
            asked.add_done_callback(_unheard)
            hint = "the disk of the state directory hangs: see dmesg"
            raise JournalUnavailable(f"the journal did not answer within {PATIENCE:g} s", hint=hint)
        return asked.result()

    def _too_late(self, asked: asyncio.Future[Fault]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self.save(_given_up(asked.result()))

    def _schedule(self, delay: float) -> None:
        if self._flushing is not None and not self._flushing.done():
            return  # it looks again before it ends
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + delay:
                return
            self._timer.cancel()
        self._timer = loop.call_later(delay, self._start_flush)

    def _start_flush(self) -> None:
        self._timer = None
        self._flushing = asyncio.get_running_loop().create_task(self._flush(), name="journal-flush")

    async def _flush(self) -> None:
        while self._unsaved:
            number, fault = next(iter(self._unsaved.items()))
            try:
                await self.update(fault)
            except JournalUnavailable as error:
                self._trouble(error)
                return
            if self._unsaved.get(number) is fault:
                del self._unsaved[number]
        if self._troubled:
            self._troubled = False
            self._log.info("the journal works again")

    def _trouble(self, error: JournalUnavailable) -> None:
        if not self._troubled:
            self._troubled = True
            self._log.error("what became of a fault could not be journaled; tried again", error=error.text, hint=error.hint)
        self._flushing = None
        self._schedule(_RETRY)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_notices(self) -> None:
        for line in self._journal.take_notices():
            self._log.warning(line)


def _unheard(asked: asyncio.Future[T]) -> None:
    """An answer that nobody waits for any more is no error that nobody looked at."""
    if not asked.cancelled():
        asked.exception()


def _given_up(fault: Fault) -> Fault:
    return msgspec.structs.replace(fault, state="refused", ending="the journal answered too late", ended_at=fault.created_at)
