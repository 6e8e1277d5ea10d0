"""token.sock: where a process proves itself by connecting, and takes a token for one call.

grpc does not tell who is behind a unix socket, so this stands beside it. A client writes `control` or `agent` and a line end, and is
answered by one line of JSON: `token` and `expires_in` (seconds), or `code`, `error` and `hint`. The connection is closed then.
"""

from __future__ import annotations

import asyncio
import pwd
import socket
from typing import Any, cast

import msgspec
import structlog

from singularityd.api.doorway import Doorway
from singularityd.api.identity import peer
from singularityd.api.identity.access import Access
from singularityd.api.identity.roles import Socket
from singularityd.api.limits import Buckets
from singularityd.errors import AddressInUse, Busy, SingularityError, UsageError

PATIENCE = 2.0
"""Seconds from connecting to asking."""
_NAME_PATIENCE = 1.0
"""Seconds that the host's directory of users may take; without an answer a caller goes by uid."""
CONNECTIONS, CONNECTIONS_OF_USER = 256, 64
RATE, BURST = 500.0, 1000
"""Tokens a second for one user."""
_LONGEST_LINE = 64


class Mint:
    """The server of one token.sock. Loop thread only."""

    def __init__(self, door: Doorway, access: Access) -> None:
        self._door = door
        self._access = access
        self._server: asyncio.Server | None = None
        self._rates = Buckets(RATE, BURST)
        self._open: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._log = structlog.get_logger("api")

    async def bind(self) -> None:
        """Listen where nobody can reach it yet. Raises what `Doorway.prepare` raises, and AddressInUse."""
        self._door.prepare()
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._door.hidden, limit=_LONGEST_LINE)
        except OSError as error:
            raise AddressInUse(
                f"{self._door.path} cannot be bound: {error.strerror}", hint="see that its file system has sockets"
            ) from None

    def open(self) -> None:
        """Let processes in."""
        self._door.open()

    def close(self) -> None:
        """Take the socket away and forget every token."""
        self._door.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        self._access.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(reader, cast("socket.socket", writer.get_extra_info("socket")))
            writer.write(msgspec.json.encode(answer) + b"\n")
            async with asyncio.timeout(PATIENCE):
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # it went away, or takes no answer
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, connection: socket.socket) -> dict[str, Any]:
        try:
            pid, uid, gids = peer.credentials(connection)
            self._enter(uid)
            try:
                token = await self._token(reader, connection, pid, uid, gids)
            finally:
                self._leave(uid)
        except SingularityError as error:
            return {"code": error.code, "error": error.text, "hint": error.hint}
        return {"token": token, "expires_in": self._access.life}

    async def _token(self, reader: asyncio.StreamReader, connection: socket.socket, pid: int, uid: int, gids: tuple[int, ...]) -> str:
        if not self._rates.take(uid):
            raise Busy(f"uid {uid} takes more than {RATE:g} tokens a second", hint="ask less often")
        wanted = await self._wanted(reader)
        name = await self._name(uid)
        return self._access.give(peer.pidfd(connection, pid), pid=pid, uid=uid, gids=gids, name=name, socket=wanted)

    def _enter(self, uid: int) -> None:
        if sum(self._open.values()) >= CONNECTIONS or self._open.get(uid, 0) >= CONNECTIONS_OF_USER:
            raise Busy("too many processes ask for tokens at once", hint="try again in a moment")
        self._open[uid] = self._open.get(uid, 0) + 1

    def _leave(self, uid: int) -> None:
        self._open[uid] -= 1
        if not self._open[uid]:
            del self._open[uid]

    @staticmethod
    async def _wanted(reader: asyncio.StreamReader) -> Socket:
        try:
            async with asyncio.timeout(PATIENCE):
                line = await reader.readline()
        except (TimeoutError, ValueError, OSError):
            line = b""
        match line:
            case b"control\n":
                return "control"
            case b"agent\n":
                return "agent"
        raise UsageError("token.sock is asked for `control` or `agent`, by one line", hint="write the name of the socket to be opened")

    async def _name(self, uid: int) -> str:
        """The user's name; looked up once, off the loop: a directory service may be slow or away."""
        if uid not in self._names:
            try:
                async with asyncio.timeout(_NAME_PATIENCE):
                    self._names[uid] = await asyncio.to_thread(lambda: pwd.getpwuid(uid).pw_name)
            except KeyError:
                self._names[uid] = ""
            except (TimeoutError, OSError):
                return ""
        return self._names[uid]
