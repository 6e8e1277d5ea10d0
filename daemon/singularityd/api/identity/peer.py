"""The process at the other end of a unix socket, pinned: its pid cannot come to mean another process unnoticed.

SO_PEERCRED is what the peer was when it connected. A pidfd stays that of one process whatever becomes of its number; the start time
says the same in a form that can be compared and written down.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from singularityd.errors import Busy, Unauthenticated

SO_PEERGROUPS, SO_PEERPIDFD = 59, 77
"""include/uapi/asm-generic/socket.h; the second since Linux 6.5."""
_CREDENTIALS = struct.Struct("3i")
_MOST_GROUPS = 65_536

Key = tuple[int, int]
"""pid, start time."""


def credentials(peer: socket.socket) -> tuple[int, int, tuple[int, ...]]:
    """(pid, uid, gids) of the process that connected, as the host counts. Raises Unauthenticated for one the host cannot see."""
    pid, uid, gid = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if pid <= 0:
        raise Unauthenticated(
            "your process is not in a pid namespace below this host's", hint="ask from the host or from a container of it"
        )
    groups = {gid, *_supplementary(peer)}
    return pid, uid, tuple(sorted(groups))


def _supplementary(peer: socket.socket) -> list[int]:
    """By the C function: Python's getsockopt takes 1024 bytes at most, which 256 groups fill. Without an answer: none, so no role."""
    room = (ctypes.c_uint32 * _MOST_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(room))
    if ctypes.CDLL(None).getsockopt(peer.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, room, ctypes.byref(size)) != 0:
        return []
    return list(room[: size.value // 4])


def pidfd(peer: socket.socket, pid: int) -> int:
    """A pidfd of the process that connected; the caller closes it. Raises Unauthenticated when it has ended.

    Before Linux 6.5 it is opened by number, which is that process as long as it has not ended since it connected.
    """
    try:
        return peer.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        raise _ended(pid) from None


def alive(fd: int) -> bool:
    """Whether the process of a pidfd runs; a zombie does not."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(0)


def start_time(proc: Path, pid: int) -> int | None:
    """Field 22 of stat; None where there is no such process."""
    try:
        text = (proc / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[19])  # a name may hold spaces and brackets


class Pins:
    """The processes that hold tokens, each with one pidfd. Loop thread only."""

    def __init__(self, proc: Path, *, most: int, most_of_user: int, clock: Callable[[], float]) -> None:
        self._proc = proc
        self._most = most
        self._most_of_user = most_of_user
        self._clock = clock
        self._pins: OrderedDict[Key, tuple[int, int, float]] = OrderedDict()  # -> pidfd, uid, until

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, fd: int, pid: int, uid: int, until: float) -> int:
        """Keep the pidfd, which is ours from here; returns the start time. Raises Unauthenticated for the dead, and Busy."""
        try:
            started = start_time(self._proc, pid)
            # In this order: it lives after its start time was read, so that was its own.
            if started is None or not alive(fd):
                raise _ended(pid)
            key = (pid, started)
            if key not in self._pins:
                self._make_room(uid)
        except BaseException:
            os.close(fd)
            raise
        if (before := self._pins.pop(key, None)) is not None:
            os.close(before[0])
        self._pins[key] = fd, uid, until
        return started

    def check(self, pid: int, started: int) -> None:
        """Raises Unauthenticated when the process has ended, or its pid is another's."""
        pin = self._pins.get((pid, started))
        if pin is None or not alive(pin[0]):
            self._drop((pid, started))
            raise _ended(pid)
        if start_time(self._proc, pid) != started:
            self._drop((pid, started))
            raise Unauthenticated(f"process {pid} is not the one that took this token: its pid was used again", hint="take a new token")

    def close(self) -> None:
        """Let go of all."""
        for key in list(self._pins):
            self._drop(key)

    def _make_room(self, uid: int) -> None:
        mine = sum(1 for _, owner, _ in self._pins.values() if owner == uid)
        if mine < self._most_of_user and len(self._pins) < self._most:
            return
        now = self._clock()
        for key, (fd, _, until) in list(self._pins.items()):
            if until <= now or not alive(fd):
                self._drop(key)
        mine = sum(1 for _, owner, _ in self._pins.values() if owner == uid)
        if mine >= self._most_of_user or len(self._pins) >= self._most:
            raise Busy("too many processes hold tokens", hint="try again in a minute: tokens of the past then count no more")

    def _drop(self, key: Key) -> None:
        if (pin := self._pins.pop(key, None)) is not None:
            os.close(pin[0])


def _ended(pid: int) -> Unauthenticated:
    return Unauthenticated(f"process {pid}, which took this token, has ended", hint="each process takes its own token")
