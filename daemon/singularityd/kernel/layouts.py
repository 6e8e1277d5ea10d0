"""Teaches the kernel program where a communicator keeps its rank, for communicators that began before the daemon.

Only files that carry debug information say it (NVIDIA's wheels do, most builds of torch do not). It is looked up once for each file,
in a child of low priority, and nothing waits for it. Executor only, single thread.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from singularityd.kernel import abi, bpf
from singularityd.kernel.ptrace import calls

FIELDS = ("rank", "nRanks", "commHash")
SECONDS = 20.0


class Loop(Protocol):
    """What the executor's loop offers."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back when readable."""

    def forget(self, descriptor: int) -> None:
        """Stop watching."""


class Layouts:
    """One look-up at a time for each file."""

    def __init__(self, *, maps: Mapping[str, int], loop: Loop, packages: Sequence[str]) -> None:
        """`packages` are the folders that hold pyelftools: the executor itself runs without them."""
        self._map = maps["layouts"]
        self._loop = loop
        self._packages = packages
        self._children: set[int] = set()

    def ask(self, number: int, open_path: str, structure: str, *, still: Callable[[], bool]) -> None:
        """Look the structure up in a file; the answer goes into entry `number` of the map, if that is `still` the file's by then."""
        reading, writing = socket.socketpair()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._child(writing, parent, open_path, structure)
        writing.close()
        reading.setblocking(False)
        self._children.add(child)
        self._loop.watch(reading.fileno(), lambda: self._on_answer(reading, child, number, still))

    def _child(self, channel: socket.socket, parent: int, open_path: str, structure: str) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            if calls.die_with_parent(parent, signal.SIGKILL):
                os.setpriority(os.PRIO_PROCESS, 0, 10)
                sys.path.extend(self._packages)
                from singularityd.kernel import dwarf

                descriptor = os.open(open_path, os.O_RDONLY | os.O_CLOEXEC)
                channel.sendall(json.dumps(dwarf.struct_offsets(descriptor, structure, FIELDS, SECONDS)).encode())
                status = 0
        finally:
            os._exit(status)

    def _on_answer(self, reading: socket.socket, child: int, number: int, still: Callable[[], bool]) -> None:
        data = reading.recv(4096)
        self._loop.forget(reading.fileno())
        reading.close()
        os.waitpid(child, 0)
        self._children.discard(child)
        try:
            found = json.loads(data or b"{}")
            offsets = [int(found[field]) for field in FIELDS]
        except (ValueError, KeyError, TypeError):
            return
        rank, size, identity = offsets
        if still():
            bpf.update(self._map, c.c_uint32(number), abi.Layout(known=1, rank=rank, size=size, identity=identity))

    def close(self) -> None:
        """End the children that still look."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._children.clear()
