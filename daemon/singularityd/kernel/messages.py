"""What the two halves say to each other: fixed-size structs, one per datagram of a SOCK_SEQPACKET pair, validated on arrival.

The executor trusts nothing it hears: a datagram of another size, an unknown kind, a kind of the other direction or a text that is
not NUL-terminated UTF-8 is refused as MessageError and counted, and the front that sent it is replaced.
"""

from __future__ import annotations

import ctypes as c

VERSION = 2
LARGEST = 8192


class MessageError(ValueError):
    """A datagram that is no message of this protocol."""


class Message(c.Structure):
    """Base; `kind` is set by the class."""

    KIND = 0
    _pack_ = 1

    def __init__(self, **values: object) -> None:
        encoded = {}
        fields = {name: kind for name, kind, *_ in self._fields_}
        for name, value in values.items():
            if isinstance(value, str):
                encoded[name] = clip(value, c.sizeof(fields[name]) - 1)
            else:
                encoded[name] = value  # type: ignore[assignment]
        super().__init__(kind=self.KIND, **encoded)

    def text(self, name: str) -> str:
        """A text field as str; bytes that are not UTF-8 are replaced."""
        return bytes(getattr(self, name)).decode("utf-8", "replace")


def clip(text: str, limit: int) -> bytes:
    """UTF-8 of `text` cut to at most `limit` bytes, never inside a character."""
    data = text.replace("\0", " ").encode("utf-8", "replace")[:limit]
    return data.decode("utf-8", "ignore").encode()


# --- front to executor ---------------------------------------------------------------------------------------------------------


class FrontReady(Message):
    """The API is served."""

    KIND = 1
    _fields_ = (("kind", c.c_uint32), ("version", c.c_uint32))


class Arm(Message):
    """Arm one fault on one process; answered by Armed or Refused with the same `request`."""

    KIND = 2
    _fields_ = (
        ("kind", c.c_uint32),
        ("request", c.c_uint32),
        ("fault", c.c_uint64),
        ("start_time", c.c_uint64),
        ("seed", c.c_uint64),
        ("count", c.c_uint64),
        ("pid", c.c_uint32),
        ("rank", c.c_uint32),
        ("ms", c.c_uint32),
        ("ppm", c.c_uint32),
        ("duration_ms", c.c_uint32),
        ("point", c.c_uint16),
        ("backend", c.c_uint8),
        ("action", c.c_uint8),  # abi.ACTIONS
        ("after", c.c_uint64),
        ("value", c.c_int32),  # what the call returns, where `returns`
        ("jitter_ms", c.c_uint32),
        ("on_ms", c.c_uint32),  # 0: always in force; else for the first on_ms of on_ms + off_ms
        ("off_ms", c.c_uint32),
        ("running_ppm", c.c_uint32),  # ACTION_DUTY: share of the time that the rank runs
        ("period_ms", c.c_uint32),  # ACTION_DUTY: 0 is chosen by the number of threads
        ("returns", c.c_uint8),
        ("distribution", c.c_uint8),  # ptrace.plan.DISTRIBUTIONS
        ("padding", c.c_uint16),
    )


class Clear(Message):
    """End one fault now, or all of them (`fault` 0); answered by Done, and by Ended for each that was armed."""

    KIND = 3
    _fields_ = (("kind", c.c_uint32), ("request", c.c_uint32), ("fault", c.c_uint64))


class Ping(Message):
    """Answered by Done: proves that the executor's loop turns."""

    KIND = 4
    _fields_ = (("kind", c.c_uint32), ("request", c.c_uint32))


# --- executor to front ---------------------------------------------------------------------------------------------------------


class MapHandle(Message):
    """A map's descriptor travels with this datagram; read-only except for ring buffers, whose reader must write its position."""

    KIND = 64
    _fields_ = (("kind", c.c_uint32), ("writable", c.c_uint32), ("name", c.c_char * 32))


class CapabilityFound(Message):
    """One line of the doctor."""

    KIND = 65
    _fields_ = (
        ("kind", c.c_uint32),
        ("state", c.c_uint32),  # 0 no, 1 yes, 2 unknown
        ("name", c.c_char * 48),
        ("detail", c.c_char * 512),
        ("remedy", c.c_char * 512),
    )


class ProcessSeen(Message):
    """A process that maps a collective library; `environ` holds the allow-listed identity variables, NAME=value, newline-separated."""

    KIND = 66
    _fields_ = (
        ("kind", c.c_uint32),
        ("pid", c.c_uint32),
        ("start_time", c.c_uint64),
        ("parent", c.c_uint32),
        ("uid", c.c_uint32),
        ("name", c.c_char * 64),
        ("namespace_pids", c.c_uint32 * 8),
        ("environ", c.c_char * 4096),
    )


class LibraryMapped(Message):
    """One collective library of one process."""

    KIND = 67
    _fields_ = (
        ("kind", c.c_uint32),
        ("pid", c.c_uint32),
        ("start_time", c.c_uint64),
        ("device", c.c_uint64),
        ("inode", c.c_uint64),
        ("sites", c.c_uint32),
        ("backend", c.c_char * 16),
        ("version", c.c_char * 32),
        ("path", c.c_char * 1024),
        ("problem", c.c_char * 256),
    )


class ProcessEnded(Message):
    """A process seen before is gone; `code` is its exit code or -1, `signal` what killed it or 0, `known` 0 where neither is known."""

    KIND = 68
    _fields_ = (
        ("kind", c.c_uint32),
        ("pid", c.c_uint32),
        ("start_time", c.c_uint64),
        ("code", c.c_int32),
        ("signal", c.c_int32),
        ("known", c.c_uint32),
    )


class Armed(Message):
    """The fault is in force from `start_ns` to `end_ns` (CLOCK_MONOTONIC)."""

    KIND = 69
    _fields_ = (
        ("kind", c.c_uint32),
        ("request", c.c_uint32),
        ("fault", c.c_uint64),
        ("start_ns", c.c_uint64),
        ("end_ns", c.c_uint64),
        ("signal", c.c_uint32),
        ("threads", c.c_uint32),
        ("mechanism", c.c_char * 32),
    )


class Refused(Message):
    """The request was not carried out; `code` is one of errors.py."""

    KIND = 70
    _fields_ = (
        ("kind", c.c_uint32),
        ("request", c.c_uint32),
        ("fault", c.c_uint64),
        ("code", c.c_char * 48),
        ("words", c.c_char * 512),
        ("hint", c.c_char * 512),
    )


class Done(Message):
    """The request was carried out."""

    KIND = 71
    _fields_ = (("kind", c.c_uint32), ("request", c.c_uint32))


class Holding(Message):
    """A thread of the rank stands still since `at_ns`, or goes on again (`held` 0) after `held_ns`."""

    KIND = 72
    _fields_ = (
        ("kind", c.c_uint32),
        ("held", c.c_uint32),
        ("fault", c.c_uint64),
        ("at_ns", c.c_uint64),
        ("held_ns", c.c_uint64),
        ("tid", c.c_uint32),
        ("pad", c.c_uint32),
    )


class Ended(Message):
    """A fault is over; the counts are the kernel's."""

    KIND = 73
    _fields_ = (
        ("kind", c.c_uint32),
        ("pad", c.c_uint32),
        ("fault", c.c_uint64),
        ("hits", c.c_uint64),
        ("seen", c.c_uint64),
        ("reason", c.c_char * 64),
    )


class Attached(Message):
    """How many sites of a backend are attached in all files together."""

    KIND = 74
    _fields_ = (("kind", c.c_uint32), ("sites", c.c_uint32), ("backend", c.c_char * 16))


class AttachFailed(Message):
    """A file could not be searched or attached to; `reason` is short and bounded, for a label."""

    KIND = 75
    _fields_ = (("kind", c.c_uint32), ("pid", c.c_uint32), ("reason", c.c_char * 32), ("path", c.c_char * 1024), ("words", c.c_char * 512))


class Shed(Message):
    """The guard detached a site that was hit too often."""

    KIND = 76
    _fields_ = (
        ("kind", c.c_uint32),
        ("rate", c.c_uint32),
        ("limit", c.c_uint32),
        ("backend", c.c_char * 16),
        ("symbol", c.c_char * 128),
        ("path", c.c_char * 1024),
    )


class Notice(Message):
    """A line for the log."""

    KIND = 77
    _fields_ = (("kind", c.c_uint32), ("level", c.c_uint32), ("words", c.c_char * 1024))


class Started(Message):
    """Programs are loaded, the first look at the host is done: the executor watches."""

    KIND = 78
    _fields_ = (("kind", c.c_uint32), ("version", c.c_uint32), ("pid", c.c_uint32), ("restarts", c.c_uint32), ("boot_id", c.c_char * 64))


class LogLevel(Message):
    """Write log records of this level (10 debug to 40 error) and above from now on."""

    KIND = 90
    _fields_ = (("kind", c.c_uint32), ("level", c.c_uint32))


FROM_FRONT: dict[int, type[Message]] = {kind.KIND: kind for kind in (FrontReady, Arm, Clear, Ping)}
FROM_EXECUTOR: dict[int, type[Message]] = {
    kind.KIND: kind
    for kind in (
        MapHandle,
        CapabilityFound,
        ProcessSeen,
        LibraryMapped,
        ProcessEnded,
        Armed,
        Refused,
        Done,
        Holding,
        Ended,
        Attached,
        AttachFailed,
        Shed,
        Notice,
        Started,
        LogLevel,
    )
}


def decode(data: bytes, known: dict[int, type[Message]]) -> Message:
    """The message in a datagram; MessageError where it is none of the `known` kinds or has another size."""
    if len(data) < 4:
        raise MessageError(f"a datagram of {len(data)} bytes is too short for a kind")
    code = int.from_bytes(data[:4], "little")
    kind = known.get(code)
    if kind is None:
        raise MessageError(f"unknown message kind {code}")
    if len(data) != c.sizeof(kind):
        raise MessageError(f"{kind.__name__} has {c.sizeof(kind)} bytes, not {len(data)}")
    return kind.from_buffer_copy(data)
