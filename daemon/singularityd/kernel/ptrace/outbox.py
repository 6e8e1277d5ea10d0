"""Reports from the holder to the executor that never make the holder wait: an executor that does not read must not keep a rank held."""

from __future__ import annotations

import os
import socket
from collections import deque

_LIMIT = 10_000
"""Reports kept for an executor that does not read; the oldest are given up first."""


class Outbox:
    """One end of a SOCK_SEQPACKET pair. Holder only."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._waiting: deque[bytes] = deque(maxlen=_LIMIT)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, record: bytes) -> None:
        """Send, now or when there is room."""
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Send what fits."""
        while self._waiting:
            try:
                self._channel.send(self._waiting[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                os._exit(1)  # the executor is gone; so are we, which lets the rank go
            self._waiting.popleft()
