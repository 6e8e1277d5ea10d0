"""The service manager's protocol: READY, RELOADING, STOPPING, WATCHDOG, priorities of lines. Does nothing where no manager listens.

The socket's name is taken out of the environment at import, so that no child inherits it and speaks in our name.
"""

from __future__ import annotations

import os
import socket
import time

_ADDRESS = os.environ.pop("NOTIFY_SOCKET", "")
for _name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
    os.environ.pop(_name, None)


_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}


def say(level: str, text: str) -> None:
    """A line of our own on standard error, with the priority in front where that is the journal, which strips it and files by it."""
    try:
        status = os.fstat(2)
        journal = os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
        mark = f"<{_PRIORITIES[level]}>" if journal else ""
        os.write(2, "".join(f"{mark}{line}\n" for line in text.splitlines()).encode("utf-8", "backslashreplace"))
    except OSError:
        return


def send(text: str) -> None:
    """One datagram; failures are the manager's, not ours."""
    if not _ADDRESS:
        return
    address = "\0" + _ADDRESS[1:] if _ADDRESS.startswith("@") else _ADDRESS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            channel.sendto(text.encode(), address)
    except OSError:
        return


def ready(status: str) -> None:
    """The daemon serves and watches."""
    send(f"READY=1\nSTATUS={' '.join(status.split())}")


def reloading() -> None:
    """It reads its settings again; `ready` ends it."""
    send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}\nSTATUS=reading the settings again")


def stopping() -> None:
    """It ends on request."""
    send("STOPPING=1")


def watchdog() -> None:
    """Both halves make progress."""
    send("WATCHDOG=1")
