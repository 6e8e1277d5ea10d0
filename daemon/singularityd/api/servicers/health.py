"""grpc.health.v1: asked at each check, so that what it says is never older than the question."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from grpc_health.v1 import health_pb2 as hpb
from grpc_health.v1 import health_pb2_grpc

from singularityd.errors import NotFound

POLL = 0.5
"""Seconds between two looks of a Watch."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Names: "" is everything; each part (`executor`, `metrics`, ...) has its own."""

    def __init__(self, parts: Callable[[], Mapping[str, tuple[bool, str]]], poll: float = POLL) -> None:
        self._parts = parts
        self._poll = poll

    async def Check(self, request: Any, context: Any) -> Any:
        """How a part is now. Raises NotFound for a name that no part has."""
        status = self._status(request.service)
        if status == hpb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"no part is named {request.service[:80]!r}", hint=f"there are: {', '.join(self._parts())}")
        return hpb.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        """How every part is now."""
        names = ("", *self._parts())
        return hpb.HealthListResponse(statuses={name: hpb.HealthCheckResponse(status=self._status(name)) for name in names})

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """How a part is, at once and on each change."""
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                yield hpb.HealthCheckResponse(status=status)
            await asyncio.sleep(self._poll)

    def _status(self, name: str) -> Any:
        parts = self._parts()
        if name and name not in parts:
            return hpb.HealthCheckResponse.SERVICE_UNKNOWN
        works = parts[name][0] if name else all(ok for ok, _ in parts.values())
        return hpb.HealthCheckResponse.SERVING if works else hpb.HealthCheckResponse.NOT_SERVING
