"""The executor from the service's side: every question has a time limit, and every failure a name."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from singularityd.errors import ExecutorGone, Failed, SingularityError
from singularityd.faults.orders import Armed, ArmOrder, Executor
from singularityd.faults.tasks import Tasks

ARM_PATIENCE = 5.0
"""Seconds the executor may take to arm: seizing a rank of 500 threads takes some 20 ms."""
CLEAR_PATIENCE = 2.0
"""Seconds it may take to clear, and again to tell the end."""

_DEFECT = "this is a defect of the daemon: its log has the details"
_DEADLINE = "the fault ends at its deadline; singularityctl doctor and the daemon's log may say more"


class Asking:
    """Loop thread only."""

    def __init__(self, executor: Executor, tasks: Tasks) -> None:
        self._executor = executor
        self._tasks = tasks
        self._log = structlog.get_logger("faults")

    async def arm(self, order: ArmOrder, given_up: asyncio.Future[Any]) -> Armed | None:
        """The executor's answer; None when `given_up` came first. Raises its refusal, or ExecutorGone when it is silent.

        A yes that comes after either is taken back.
        """
        answer = self._tasks.spawn(self._arm(order))
        waited_for: set[asyncio.Future[Any]] = {answer, given_up}
        await asyncio.wait(waited_for, timeout=ARM_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and not given_up.done():
            return answer.result()
        self._take_back(answer, order.number)
        if given_up.done():
            return None
        raise ExecutorGone(f"the executor did not answer within {ARM_PATIENCE:g} s", hint=_DEADLINE)

    async def clear(self, number: int) -> None:
        """End a fault. Raises ExecutorGone when the executor does not answer, Failed for a defect."""
        try:
            async with asyncio.timeout(CLEAR_PATIENCE):
                await self._executor.clear(number)
        except TimeoutError as error:
            raise ExecutorGone(f"the executor did not clear fault f{number} within {CLEAR_PATIENCE:g} s", hint=_DEADLINE) from error
        except SingularityError:
            raise
        except Exception as error:
            raise Failed(f"fault f{number} could not be cleared: {error!r}", hint=_DEADLINE) from error

    async def clear_quietly(self, number: int) -> None:
        """`clear`, with a failure logged: for faults that end by themselves or that nobody asks about."""
        try:
            await self.clear(number)
        except SingularityError as error:
            self._log.warning("the executor did not clear a fault", fault=f"f{number}", error=error.text)

    async def _arm(self, order: ArmOrder) -> Armed:
        try:
            return await self._executor.arm(order)
        except SingularityError:
            raise
        except Exception as error:
            self._log.exception("arming failed in a way that has no name", fault=f"f{order.number}")
            self._tasks.spawn(self.clear_quietly(order.number))
            raise Failed(f"arming failed: {error!r}", hint=_DEFECT) from error

    def _take_back(self, answer: asyncio.Task[Armed], number: int) -> None:
        """Clear now, and once more when the answer is yes after all, however late that is."""

        def heard(answer: asyncio.Task[Armed]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                self._tasks.spawn(self.clear_quietly(number))

        if not answer.done():
            self._tasks.spawn(self.clear_quietly(number))
        answer.add_done_callback(heard)
