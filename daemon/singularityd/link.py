"""The front's end of the pair to the executor: requests with answers, descriptors, and what the executor tells of itself.

Loop thread only. The executor's end or a datagram that is no message ends the front: a new executor starts a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable

from singularityd import errors
from singularityd.errors import ExecutorGone, Failed, SingularityError
from singularityd.faults.orders import Armed, ArmOrder
from singularityd.kernel import abi, messages
from singularityd.kernel.arms import RETURN_AT_END, RETURN_AT_ONCE
from singularityd.kernel.ptrace.plan import DISTRIBUTIONS

_PATIENCE = 15.0
"""Seconds an answer may take: seizing thousands of threads takes one."""


class ExecutorLink:
    """Implements what the fault service asks of the executor."""

    def __init__(self, connection: socket.socket, *, on_message: Callable[[messages.Message], None], on_end: Callable[[str], None]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_message = on_message
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[messages.Message]] = {}
        self._loop = asyncio.get_running_loop()
        self.maps: dict[str, int] = {}
        """Name -> descriptor, as they arrive."""
        self._loop.add_reader(connection.fileno(), self._readable)

    def _readable(self) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, messages.LARGEST, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(str(error))
                return
            if not data:
                self._end("the executor is gone")
                return
            try:
                self._take(messages.decode(data, messages.FROM_EXECUTOR), descriptors)
            except messages.MessageError as error:
                self._end(f"the executor sent what is no message: {error}")
                return

    def _take(self, message: messages.Message, descriptors: list[int]) -> None:
        if isinstance(message, messages.MapHandle) and descriptors:
            self.maps[message.text("name")] = descriptors.pop()
        for left in descriptors:
            os.close(left)
        request = getattr(message, "request", 0)
        if request:
            asked = self._asked.pop(request, None)
            if asked is not None and not asked.done():
                asked.set_result(message)
            return
        self._on_message(message)

    def _end(self, why: str) -> None:
        self.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ExecutorGone(f"the privileged half does not answer: {why}", hint="see the daemon's log"))
        self._asked.clear()
        self._on_end(why)

    def close(self) -> None:
        """Stop listening."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def send(self, message: messages.Message) -> None:
        """One datagram; raises ExecutorGone where it cannot be sent now."""
        try:
            self._socket.send(bytes(message))
        except OSError as error:
            raise ExecutorGone(f"the privileged half cannot be told: {error.strerror}", hint="see the daemon's log") from error

    async def ask(self, message: messages.Message) -> messages.Message:
        """Send a request and wait for its answer; a refusal is raised as the error that it names."""
        number = next(self._numbers)
        message.request = number
        answer: asyncio.Future[messages.Message] = self._loop.create_future()
        self._asked[number] = answer
        try:
            self.send(message)
            async with asyncio.timeout(_PATIENCE):
                said = await answer
        except TimeoutError:
            raise ExecutorGone("the privileged half does not answer", hint="see the daemon's log") from None
        finally:
            self._asked.pop(number, None)
        if isinstance(said, messages.Refused):
            raise refused(said)
        return said

    async def arm(self, order: ArmOrder) -> Armed:
        """The fault service's order."""
        asked = self._loop.time()
        said = await self.ask(
            messages.Arm(
                fault=order.number,
                pid=order.pid,
                start_time=order.start_time,
                rank=order.rank,
                seed=order.seed,
                count=order.count,
                ms=order.milliseconds,
                ppm=round(order.probability * 10_000),
                duration_ms=max(1, round(order.duration * 1000)),
                point=0 if order.op == "any" else abi.OP_CODES[order.op],
                backend=abi.BACKEND_CODES.get(order.backend, 0),
                action=order.action,
                after=order.after,
                value=order.value,
                jitter_ms=order.jitter,
                on_ms=order.on,
                off_ms=order.off,
                running_ppm=round(order.percent * 10_000),
                period_ms=order.period,
                returns=(RETURN_AT_ONCE if order.at_once else RETURN_AT_END) if order.returns else 0,
                distribution=DISTRIBUTIONS[order.distribution],
            )
        )
        if not isinstance(said, messages.Armed):
            raise Failed(f"the privileged half answered {type(said).__name__} to an order to arm")
        delay = self._loop.time() - asked
        return Armed(mechanism=said.text("mechanism"), signal=int(said.signal), threads=int(said.threads), delay=delay)

    async def clear(self, number: int) -> None:
        """End a fault now."""
        await self.ask(messages.Clear(fault=number))

    async def ping(self) -> None:
        """Returns when the executor's loop has turned."""
        await self.ask(messages.Ping())


def refused(message: messages.Refused) -> SingularityError:
    """The error a refusal names; one of a code unknown here is Failed."""
    code = message.text("code")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SingularityError)]
    kind = next((kind for kind in kinds if kind.code == code), Failed)
    return kind(message.text("words"), hint=message.text("hint"))
