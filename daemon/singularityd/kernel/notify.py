"""The service manager's protocol: READY, STOPPING, WATCHDOG. Does nothing where no manager listens.

The socket's name is taken out of the environment at import, so that no child inherits it and speaks in our name.
"""

from __future__ import annotations

import os
import socket

_ADDRESS = os.environ.pop("NOTIFY_SOCKET", "")


def send(text: str) -> None:
    """One datagram; failures are the manager's, not ours."""
    if not _ADDRESS:
        return
    address = "\0" + _ADDRESS[1:] if _ADDRESS.startswith("@") else _ADDRESS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendto(text.encode(), address)
    except OSError:
        return


def ready(status: str) -> None:
    """The daemon serves and watches."""
    send(f"READY=1\nSTATUS={status}")


def stopping() -> None:
    """It ends on request."""
    send("STOPPING=1")


def watchdog() -> None:
    """The loop turns."""
    send("WATCHDOG=1")
