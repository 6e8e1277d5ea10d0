"""systemd's journal, with fields: `journalctl -u singularityd SINGULARITY_EVENT=...` finds records by what they are about.

Used where standard error is the journal's own stream (JOURNAL_STREAM says which), as it is under the unit and not in a pipe of somebody
who inherited the variable. Each field of a record is SINGULARITY_<NAME>; MESSAGE is the record for people. What cannot be sent is
written to the stream instead.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any, TextIO

PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
SOCKET = "/run/systemd/journal/socket"
_OWN = ("time", "level", "event")
_LONGEST_NAME = 64


def is_stream(stream: TextIO, variables: Mapping[str, str] | None = None) -> bool:
    """Whether a stream is the journal's, by its device and inode."""
    said = (os.environ if variables is None else variables).get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return said == f"{status.st_dev}:{status.st_ino}"


def fields(method: str, record: Mapping[str, Any]) -> dict[str, str]:
    """A log record as the journal's fields; all values are texts."""
    rest = {name: str(value) for name, value in record.items() if name not in _OWN}
    trace = rest.get("traceback", "")
    words = [str(record.get("event", "")), *(f"{name}={value}" for name, value in rest.items() if name not in ("traceback", "logger"))]
    found = {
        "MESSAGE": " ".join(words) + (f"\n{trace}" if trace else ""),
        "PRIORITY": str(PRIORITIES.get(method, 6)),
        "SYSLOG_IDENTIFIER": "singularityd",
        "SINGULARITY_EVENT": words[0],
    }
    for name, value in rest.items():
        found.setdefault(_name(name), value)
    return found


def datagram(values: Mapping[str, str]) -> bytes:
    """The journal's native form: NAME=value, or the length before a value that has several lines."""
    parts = []
    for name, value in values.items():
        data = value.encode("utf-8", "backslashreplace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


def _name(name: str) -> str:
    return f"SINGULARITY_{re.sub('[^A-Z0-9_]', '_', name.upper())}"[:_LONGEST_NAME]


class Journal:
    """A connection to the journal. Any thread: one datagram is one record."""

    def __init__(self, address: str = SOCKET) -> None:
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            self._socket = None

    def send(self, method: str, record: Mapping[str, Any]) -> bool:
        """False where the record was not taken: no journal, or one datagram cannot hold it. Waits for room, as standard error would."""
        if self._socket is None:
            return False
        try:
            self._socket.send(datagram(fields(method, record)))
        except OSError:
            return False
        return True
