"""What every call passes on its way in and out: who it is and may they, rate, form, deadline, back pressure, and errors for the wire."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import structlog
from google.protobuf.message import DecodeError

from singularityd.api import failure
from singularityd.api.admission import Admission, Admitted
from singularityd.api.limits import Buckets, Limits, Places
from singularityd.errors import Busy, Failed, SingularityError, TookTooLong, UsageError

WAITING = frozenset({"/singularity.node.v1.Faults/Wait"})
"""Unary calls that wait for something: the client's deadline is theirs, where it sets one."""
HEALTH = "/grpc.health.v1.Health/Watch"

Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]
Deserializer = Callable[[bytes], Any] | None


class _Malformed(NamedTuple):
    reason: str


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler of one server. Loop thread only."""

    def __init__(self, limits: Limits, admission: Admission | None = None) -> None:
        """`admission` None: the permissions of the socket are the only check."""
        self._limits = limits
        self._admission = admission
        self._buckets = Buckets(limits.rate, limits.burst)
        self._places = Places(limits.streams, "event streams")
        self._health_places = Places(limits.health_streams, "health watches")
        self._log = structlog.get_logger("api")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Called by grpc for each call, before its request is read."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or handler.request_streaming:  # no such method; reflection
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream), _lenient(handler.request_deserializer), handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler.unary_unary), _lenient(handler.request_deserializer), handler.response_serializer
        )

    def _unary(self, method: str, call: Unary) -> Unary:
        async def guarded(request: Any, context: Any) -> Any:
            try:
                admitted = await self._enter(method, request, context)
                return await self._audited(method, request, admitted, lambda: self._timed(method, call, request, context))
            except Exception as error:  # noqa: BLE001 - the one place: whatever it is becomes a status
                await self._refuse(method, error, context)

        return guarded

    def _stream(self, method: str, call: Stream) -> Unary:
        places = self._health_places if method == HEALTH else self._places

        async def guarded(request: Any, context: Any) -> None:
            try:
                await self._enter(method, request, context)
                with places.place():
                    async with aclosing(call(request, context)) as messages:  # type: ignore[type-var]
                        async for message in messages:
                            await self._write(message, context)
            except Exception as error:  # noqa: BLE001 - as above
                await self._refuse(method, error, context)

        return guarded

    async def _enter(self, method: str, request: Any, context: Any) -> Admitted:
        """Who it is comes first: a caller that is let in uses up its own user's calls and nobody else's."""
        admitted = Admitted(None, "")
        if self._admission is not None:
            admitted = await self._admission.enter(method, request, context.invocation_metadata())
        self._admit(request, admitted.caller.uid if admitted.caller else None)
        return admitted

    async def _audited(self, method: str, request: Any, admitted: Admitted, call: Callable[[], Awaitable[Any]]) -> Any:
        return await (self._admission.audited(method, request, admitted, call) if self._admission is not None else call())

    def _admit(self, request: Any, uid: int | None) -> None:
        if not self._buckets.take(uid if self._limits.rate_of_user else None):
            raise Busy(f"more than {self._limits.rate:g} calls a second come to this socket", hint="ask less often; try again in a moment")
        if isinstance(request, _Malformed):
            raise UsageError(f"the request is malformed: {request.reason}", hint="use a client made from node.proto of this version")

    async def _timed(self, method: str, call: Unary, request: Any, context: Any) -> Any:
        own = method in WAITING and context.time_remaining() is not None
        patience = self._limits.longest_wait if own else self._limits.patience
        try:
            async with asyncio.timeout(patience) as scope:
                return await call(request, context)
        except TimeoutError:
            if not scope.expired():
                raise
            raise TookTooLong(f"not done within {patience:g} s", hint="singularityctl status says what is not well") from None

    async def _write(self, message: Any, context: Any) -> None:
        """Waits until the message is handed to the connection; a reader that takes nothing makes it wait."""
        try:
            async with asyncio.timeout(self._limits.blocked) as scope:
                await context.write(message)
        except TimeoutError:
            if not scope.expired():
                raise
            raise Busy(
                f"this stream was ended: its reader took nothing for {self._limits.blocked:g} s",
                hint="read faster; go on with the token of the last event",
            ) from None

    async def _refuse(self, method: str, error: Exception, context: Any) -> None:
        """Ends the call with the error's status. What is not ours is told to the log, and to the caller only by a number to find it by."""
        if isinstance(error, grpc.aio.BaseError):
            raise error
        if not isinstance(error, SingularityError):
            number = secrets.token_hex(4)
            self._log.error("request_failed", id=number, method=method, error=error)
            error = Failed(f"internal error {number}", hint=f"the daemon's log says more: look for {number}")
        await context.abort(grpc.StatusCode[error.status], failure.details(error), failure.trailing(error))


def _lenient(deserializer: Deserializer) -> Deserializer:
    """A deserializer that lets the handler refuse what it cannot read: grpc would answer with the names of Python classes."""
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except (DecodeError, UnicodeDecodeError, ValueError) as error:
            return _Malformed(str(error) or "it cannot be read")

    return read
