"""A client of NCCL's RAS service: a ready map from pid to rank for jobs that started before the daemon did.

Every NCCL process since 2.24 offers to listen on localhost:28028 and one of a network namespace gets the port; JSON answers since
2.28.7. The protocol is lines of text: each side names its version, `SET FORMAT json` is answered with `OK`, and `STATUS` with one
document, after which the server closes. A job in another network namespace is out of reach.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec
import psutil

PORT = 28028
_PROTOCOL = 2
_MOST_BYTES = 16 << 20  # a rank takes some 600 bytes: room for 25,000 of them
_LINE = 1024
# NCCL 2.28.9 leaves out the comma after some members; without it the rest of the document is fine.
_MISSING_COMMA = re.compile(r'(["\d\]}]|true|false|null)([ \t]*\r?\n\s*")')


class RasRank(msgspec.Struct, frozen=True):
    """One member of a communicator on this host, as NCCL's RAS service tells it."""

    pid: int
    """As the process itself sees it."""
    comm: str
    """First 8 hex digits of NCCL's own hash of the communicator; not the hash that the probes make."""
    rank: int
    size: int


class RasPoller:
    """Asks the service at `host`:`port`; one poll takes at most `timeout` seconds. Used on the loop."""

    def __init__(
        self, host: str = "localhost", port: int = PORT, timeout: float = 5.0, *, addresses: Callable[[], Collection[str]] | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._timeout = timeout
        self._addresses = addresses or local_addresses

    async def poll(self) -> list[RasRank]:
        """The members on this host; empty where nobody listens, answers late, or answers something else. Raises nothing."""
        try:
            async with asyncio.timeout(self._timeout):
                document = await self._ask()
        except (OSError, TimeoutError, ValueError):
            return []
        return parse(document, self._addresses())

    async def _ask(self) -> bytes:
        """One conversation; raises ValueError where the other side is no RAS service or speaks no JSON."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_LINE)
        try:
            if not (await _say(reader, writer, f"CLIENT PROTOCOL {_PROTOCOL}")).startswith("SERVER PROTOCOL "):
                raise ValueError("not NCCL's RAS service")
            # The service waits for its peers' answers; it must give up before we do.
            for line in (f"TIMEOUT {max(1, int(self._timeout / 2))}", "SET FORMAT json"):
                if await _say(reader, writer, line) != "OK":
                    raise ValueError(f"{line} is not known to this version")
            writer.write(b"VERBOSE STATUS\n")
            return await _read_all(reader)
        finally:
            writer.close()


async def _say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> str:
    writer.write(f"{line}\n".encode())
    answer = await reader.readline()  # empty at the end; ValueError past the limit
    return answer.decode("ascii", "replace").strip().upper()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Until the server closes; raises ValueError past the limit."""
    data = bytearray()
    while chunk := await reader.read(1 << 16):
        data += chunk
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
    return bytes(data)


def parse(document: bytes, addresses: Collection[str]) -> list[RasRank]:
    """The members whose host is one of `addresses`; what is odd is left out, and what is no document is empty.

    Pids of other hosts would name strangers here, so a member that tells no host is left out too.
    """
    text = document.decode("utf-8", "replace")
    root = _load(text)
    if root is None:
        root = _load(_MISSING_COMMA.sub(r"\1,\2", text))
    here = {plain for address in addresses if (plain := _plain(address))}
    return [
        RasRank(pid, _short(comm.get("hash")), rank, size)
        for comm in _objects(root, "communicators")
        if (size := _whole(comm.get("size"))) is not None
        for member in (*_objects(comm, "ranks"), *_objects(comm, "missing_ranks"))
        if _plain(member.get("host")) in here
        and (pid := _whole(member.get("pid")))
        and (rank := _whole(member.get("rank"))) is not None
        and rank < size
    ]


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(parent: Any, key: str) -> Iterator[dict[str, Any]]:
    items = parent.get(key) if isinstance(parent, dict) else None
    return (item for item in items if isinstance(item, dict)) if isinstance(items, list) else iter(())


def _whole(value: Any) -> int | None:
    """A JSON number from 0 that is whole; true is none."""
    return value if type(value) is int and value >= 0 else None


def _short(name: Any) -> str:
    return str(name or "").lower().removeprefix("0x")[:8]


def _plain(address: Any) -> str:
    """An address in one form, without a scope or a port; empty where it is none."""
    text = str(address or "").split("%")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


def local_addresses() -> set[str]:
    """The addresses of this network namespace's interfaces, loopback included."""
    families = {socket.AF_INET, socket.AF_INET6}
    return {address.address for of in psutil.net_if_addrs().values() for address in of if address.family in families}
