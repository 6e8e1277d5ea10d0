"""Starts the front and tells how it ended. Executor only, single thread."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

from singularityd.kernel.channel import Channel

_STEADY = 30.0
"""A front that lived this many seconds was healthy: the next restart does not wait."""


class FrontChild:
    """The front's process and its channel."""

    def __init__(self, command: list[str]) -> None:
        """`command` is started with `--channel FD` appended; it drops its privileges itself once its modules are loaded."""
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._delay = 0.0
        self.restarts = -1
        self.channel: Channel | None = None

    def start(self) -> Channel:
        """Start it; the pair's other end is the only descriptor it gets beside the standard ones."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        environment = dict(os.environ, GRPC_ENABLE_FORK_SUPPORT="0", GRPC_VERBOSITY="ERROR")
        environment.pop("NOTIFY_SOCKET", None)
        try:
            self._process = subprocess.Popen(
                [*self._command, "--channel", str(there.fileno())],
                pass_fds=(there.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        finally:
            there.close()
        self._started = time.monotonic()
        self.restarts += 1
        self.channel = Channel(here)
        return self.channel

    @property
    def pid(self) -> int:
        """0 where none runs."""
        return self._process.pid if self._process else 0

    def end(self) -> None:
        """Ask it to end; its channel then says that it has."""
        if self._process is not None:
            self._process.terminate()

    def lost(self) -> float:
        """Reap a front that is gone or misbehaves; returns the seconds to wait before the next."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        steady = time.monotonic() - self._started > _STEADY
        self._delay = 0.1 if steady else min(5.0, max(0.1, self._delay * 2))
        return self._delay

    def stop(self, seconds: float) -> None:
        """Ask it to end, then make it."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
