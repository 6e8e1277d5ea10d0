"""The service manager's protocol: READY, RELOADING, STOPPING, WATCHDOG. Does nothing where no manager listens.

The socket's name is taken out of the environment at import, so that no child inherits it and speaks in our name.
"""

from __future__ import annotations

import os
import socket
import time

_ADDRESS = os.environ.pop("NOTIFY_SOCKET", "")
for _name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
    os.environ.pop(_name, None)


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
