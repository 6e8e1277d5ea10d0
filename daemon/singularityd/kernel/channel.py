"""The executor's end of the pair to the front: never blocks, never loses, gives up on a front that stops reading.

Executor only, single thread.
"""

from __future__ import annotations

import array
import collections
import socket

from singularityd.kernel import messages

BACKLOG = 20_000
"""Datagrams kept for a slow front; a front this far behind is wedged and is replaced."""


class ChannelClosed(Exception):
    """Raised when the front is gone, speaks nonsense, or no longer reads."""


class Channel:
    """One front's connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._waiting: collections.deque[tuple[bytes, int | None]] = collections.deque()

    def fileno(self) -> int:
        """For the selector."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether datagrams wait for room."""
        return bool(self._waiting)

    def send(self, message: messages.Message, descriptor: int | None = None) -> None:
        """Send now or keep in order for later; the descriptor, if any, stays the caller's."""
        if len(self._waiting) >= BACKLOG:
            raise ChannelClosed("the front does not read")
        self._waiting.append((bytes(message), descriptor))
        self.flush()

    def flush(self) -> None:
        """Send what fits."""
        while self._waiting:
            data, descriptor = self._waiting[0]
            extra = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            try:
                self._socket.sendmsg([data], extra)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(error.strerror) from error
            self._waiting.popleft()

    def receive(self) -> list[messages.Message]:
        """All messages there are; ChannelClosed at the end or for anything that is no message."""
        received: list[messages.Message] = []
        while True:
            try:
                data = self._socket.recv(messages.LARGEST)
            except BlockingIOError:
                return received
            except OSError as error:
                raise ChannelClosed(error.strerror) from error
            if not data:
                raise ChannelClosed("the front is gone")
            try:
                received.append(messages.decode(data, messages.FROM_FRONT))
            except messages.MessageError as error:
                raise ChannelClosed(f"the front sent what is no message: {error}") from error

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
