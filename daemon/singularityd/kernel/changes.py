"""Says at once when a file that carries probes is written to in place.

A breakpoint belongs to an offset. Once other bytes stand there, the next process that maps the file would have its instructions torn,
so the probes must go before anybody maps it. inotify watches the inode, whatever its path, and neither waits for the file system nor
holds its mount. Writes by another host to a network file system are not told; the search's own comparison finds those when a process
maps the file next. Executor only, single thread.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Iterator

_IN_MODIFY = 0x2
_IN_IGNORED = 0x8000
_IN_Q_OVERFLOW = 0x4000
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_libc = c.CDLL(None, use_errno=True)


class _Header(c.Structure):
    _fields_ = (("watch", c.c_int32), ("mask", c.c_uint32), ("cookie", c.c_uint32), ("name_bytes", c.c_uint32))


class Changes:
    """Watches by number; without inotify (all instances of this user taken) nothing is watched and nothing fails."""

    def __init__(self) -> None:
        self._descriptor: int = _libc.inotify_init1(_FLAGS)

    def fileno(self) -> int:
        """For the selector; -1 where the kernel gave none."""
        return self._descriptor

    def add(self, open_path: str) -> int:
        """Watch a file; 0 where that is not possible. The same inode has the same number."""
        number = int(_libc.inotify_add_watch(self._descriptor, os.fsencode(open_path), _IN_MODIFY))
        return max(number, 0)

    def remove(self, number: int) -> None:
        """Stop watching."""
        if number:
            _libc.inotify_rm_watch(self._descriptor, number)

    def read(self) -> set[int]:
        """Numbers of files that were written to; 0 among them says that some were not told."""
        written: set[int] = set()
        for number, mask in self._events():
            if mask & _IN_Q_OVERFLOW:
                written.add(0)
            elif not mask & _IN_IGNORED:
                written.add(number)
        return written

    def _events(self) -> Iterator[tuple[int, int]]:
        while True:
            try:
                data = os.read(self._descriptor, 16384)
            except BlockingIOError:
                return
            position = 0
            while position < len(data):
                header = _Header.from_buffer_copy(data, position)
                yield header.watch, header.mask
                position += c.sizeof(_Header) + header.name_bytes

    def close(self) -> None:
        """Watch nothing any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
