"""A small HTTP server for the metrics page and the health check: GET and HEAD of three paths, nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol

import structlog

from singularityd import __version__
from singularityd.errors import AddressInUse, ConfigError
from singularityd.observe.http_parse import MAX_HEAD, Refusal, Request, parse, wants_gzip, wants_openmetrics
from singularityd.observe.metrics import Page

_LANDING = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>singularityd</title></head>
<body><h1>singularityd {__version__}</h1>
<p>Watches, and on request disturbs, the collective communication of this host's training ranks.</p>
<ul><li><a href="/metrics">/metrics</a>: Prometheus and OpenMetrics</li><li><a href="/healthz">/healthz</a>: 200 or 503</li></ul>
</body></html>
"""

_PIECE = 128 * 1024
"""Bytes handed to the transport at once."""


class Render(Protocol):
    """How the server asks for a page: MetricsPage.page."""

    async def __call__(self, *, openmetrics: bool, compress: bool) -> Page:
        """The page of now."""
        ...


class Answer(NamedTuple):
    """A response."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class MetricsServer:
    """Serves /metrics, /healthz and /. Loop thread only."""

    def __init__(
        self,
        host: str,
        port: int,
        render: Render,
        health: Callable[[], tuple[bool, str]],
        *,
        connections: int = 32,
        timeout: float = 10.0,
    ) -> None:
        self._host, self._port = host, port
        self._timeout = timeout
        self._connections = connections
        self._routes: dict[str, Callable[[Request], Awaitable[Answer]]] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/": self._landing,
        }
        self._render, self._health = render, health
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("http")

    @property
    def port(self) -> int:
        """The port it listens on; after `start`, also where the setting was 0."""
        if self._server is None or not self._server.sockets:
            return self._port
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen. Raises AddressInUse when the port is taken and ConfigError for an address that cannot be listened on."""
        where = f"{self._host}:{self._port}"
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port, limit=MAX_HEAD, backlog=64)
        except socket.gaierror as error:
            raise ConfigError(f"metrics.host: {self._host!r} is no address of this host ({error.strerror})") from None
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None)
            if number == errno.EADDRINUSE:
                raise AddressInUse(
                    f"the metrics page cannot listen on {where}: the port is taken",
                    hint=f"`ss -ltnp 'sport = :{self._port}'` names who has it; or set metrics.port",
                ) from None
            reason = os.strerror(number) if number else str(error)
            raise ConfigError(f"metrics: cannot listen on {where}: {reason}", hint="set metrics.host and metrics.port") from None

    async def stop(self) -> None:
        """Stop listening, give what is being answered a moment, then close all connections."""
        if self._server is None:
            return
        self._server.close()
        if self._open:
            await asyncio.wait(self._open, timeout=0.2)
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        full = len(self._open) >= self._connections
        self._open.add(task)
        try:
            if full:
                await self._answer(writer, _plain(503, "too many connections"), close=True)
            else:
                await self._converse(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # what it did not take is not worth keeping
        finally:
            self._open.discard(task)
            await _close(writer)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client closes, falls silent, or asks for the impossible."""
        while True:
            head_only = close = False
            try:
                request = parse(await self._head(reader))
                head_only, close = request.method == "HEAD", not request.keep_alive
                answer = await self._route(request)
            except asyncio.IncompleteReadError as error:
                if not error.partial:
                    return
                answer, close = _plain(400, "the request ended in the middle"), True
            except TimeoutError:
                answer, close = _plain(408, "no request came in time"), True
            except asyncio.LimitOverrunError:
                answer, close = _plain(431, f"more than {MAX_HEAD} bytes of headers"), True
            except Refusal as refusal:
                answer, close = _plain(refusal.status, refusal.text), True
            await self._answer(writer, answer, close=close, head_only=head_only)
            if close:
                return

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(self._timeout):
            return await reader.readuntil(b"\r\n\r\n")

    async def _route(self, request: Request) -> Answer:
        handler = self._routes.get(request.path)
        if handler is None:
            return _plain(404, "there is /metrics, /healthz and /")
        if request.method not in ("GET", "HEAD"):
            return _plain(405, "only GET and HEAD are answered", ("Allow", "GET, HEAD"))
        return await handler(request)

    async def _metrics(self, request: Request) -> Answer:
        accept = request.headers.get("accept", "")
        compress = wants_gzip(request.headers.get("accept-encoding", ""))
        try:
            page = await self._render(openmetrics=wants_openmetrics(accept), compress=compress)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one page, the server goes on and the scraper is told
            self._log.error("page_failed", error=error)
            return _plain(500, "the page could not be made; the daemon's log says why")
        headers: tuple[tuple[str, str], ...] = (("Vary", "Accept, Accept-Encoding"),)
        if page.encoding:
            headers += (("Content-Encoding", page.encoding),)
        return Answer(200, page.body, page.content_type, headers)

    async def _healthz(self, _: Request) -> Answer:
        well, text = self._health()
        return _plain(200 if well else 503, text)

    async def _landing(self, _: Request) -> Answer:
        return Answer(200, _LANDING.encode(), "text/html; charset=utf-8")

    async def _answer(self, writer: asyncio.StreamWriter, answer: Answer, *, close: bool, head_only: bool = False) -> None:
        """Send; raises TimeoutError when the client does not take it in time."""
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            f"Connection: {'close' if close else 'keep-alive'}",
            "X-Content-Type-Options: nosniff",
            *(f"{name}: {value}" for name, value in answer.headers),
        ]
        async with asyncio.timeout(self._timeout):
            writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
            # in pieces: the transport would copy two megabytes again for each piece that the kernel takes, on the loop
            body = memoryview(b"" if head_only else answer.body)
            for start in range(0, len(body), _PIECE):
                writer.write(body[start : start + _PIECE])
                await writer.drain()
            await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Let the client have what is on its way, for a second at most."""
    writer.close()
    try:
        async with asyncio.timeout(1.0):
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        return


def _plain(status: int, text: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, f"{text}\n".encode(), headers=headers)
