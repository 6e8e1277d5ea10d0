"""Errors across the wire: SingularityError <-> gRPC status, details and trailing metadata.

Metadata: `singularity-code` (the stable code), `singularity-exit` (singularityctl's exit code) and, where there is a remedy,
`singularity-hint-bin` (UTF-8). Pure; used by the server and by the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from urllib.parse import quote

from singularityd import errors
from singularityd.errors import SingularityError

CODE, HINT, EXIT = "singularity-code", "singularity-hint-bin", "singularity-exit"
_TEXT_ROOM, _HINT_ROOM = 3072, 1536
"""Bytes on the wire, where gRPC percent-encodes the text: together below the 8 KiB that its clients take as metadata."""

Metadata = tuple[tuple[str, str | bytes], ...]


def details(error: SingularityError) -> str:
    """The text as it can be sent: valid Unicode, and cut where a list in it is too long for a header."""
    return _cut(error.text, _TEXT_ROOM, lambda text: len(quote(text, safe=_PLAIN)))


def trailing(error: SingularityError) -> Metadata:
    """The trailing metadata."""
    found: list[tuple[str, str | bytes]] = [(CODE, error.code), (EXIT, str(error.exit_code))]
    if error.hint:
        found.append((HINT, _cut(error.hint, _HINT_ROOM, lambda text: len(text.encode())).encode()))
    return tuple(found)


def received(status: str, text: str, metadata: Iterable[tuple[str, str | bytes]]) -> SingularityError | None:
    """The error that the daemon raised, None where the status is not from one of its errors.

    A code that only a newer daemon knows becomes a Failed with that code and exit code.
    """
    found = dict(metadata)
    code = _str(found.get(CODE, ""))
    if not code:
        return None
    hint = _str(found.get(HINT, b""))
    kind = next((kind for kind in _kinds(SingularityError) if kind.code == code), None)
    if kind is not None:
        return kind(text, hint=hint)
    error = errors.Failed(text, hint=hint)
    error.code, error.status = code, status
    exit_code = _str(found.get(EXIT, ""))
    error.exit_code = int(exit_code) if exit_code.isdecimal() and 0 < int(exit_code) < 256 else 1
    return error


_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def _cut(text: str, room: int, cost: Callable[[str], int]) -> str:
    clean = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    if cost(clean) <= room:
        return clean
    mark = " ..."
    low, high = 0, len(clean)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(clean[:middle] + mark) <= room else (low, middle - 1)
    return clean[:low] + mark


def _str(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _kinds(kind: type[SingularityError]) -> Iterator[type[SingularityError]]:
    for below in kind.__subclasses__():
        yield from _kinds(below)
    yield kind
