"""Reads the kernel's ring buffers by libbpf and hands each record on, on the loop thread.

The descriptors come from the executor. The kernel lets a reader write nothing but its own position page.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable

from singularityd.errors import KernelRefused
from singularityd.kernel.abi import KernelEvent

_SAMPLE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_size_t)


class Rings:
    """Several ring buffers behind one epoll descriptor."""

    def __init__(self, buffers: dict[str, int], handle: Callable[[str, KernelEvent], None]) -> None:
        """`handle` gets the buffer's name and a record that is valid during the call only; it must not raise."""
        try:
            self._lib = c.CDLL("libbpf.so.1")
        except OSError as error:
            raise KernelRefused("libbpf.so.1 is not installed", hint="apt-get install libbpf1") from error
        self._lib.ring_buffer__new.restype = c.c_void_p
        self._lib.ring_buffer__new.argtypes = (c.c_int, _SAMPLE, c.c_void_p, c.c_void_p)
        self._lib.ring_buffer__add.argtypes = (c.c_void_p, c.c_int, _SAMPLE, c.c_void_p)
        self._lib.ring_buffer__epoll_fd.argtypes = self._lib.ring_buffer__consume.argtypes = (c.c_void_p,)
        self._lib.ring_buffer__free.argtypes = (c.c_void_p,)
        self._lib.ring_buffer__free.restype = None
        self._callbacks = []
        self.received = dict.fromkeys(buffers, 0)
        """Records read from each buffer."""
        self._ring: int | None = None
        for name, descriptor in buffers.items():
            callback = _SAMPLE(self._sample(name, handle))
            self._callbacks.append(callback)
            if self._ring is None:
                self._ring = self._lib.ring_buffer__new(descriptor, callback, None, None)
                failed = not self._ring
            else:
                failed = self._lib.ring_buffer__add(self._ring, descriptor, callback, None) != 0
            if failed:
                raise KernelRefused(f"the ring buffer {name} cannot be mapped", hint="singularityctl doctor tells what this kernel offers")

    def _sample(self, name: str, handle: Callable[[str, KernelEvent], None]) -> Callable[[int, int, int], int]:
        size = c.sizeof(KernelEvent)

        def sample(_context: int, data: int, length: int) -> int:
            self.received[name] += 1
            if length >= size:
                handle(name, KernelEvent.from_address(data))
            return 0

        return sample

    def fileno(self) -> int:
        """Readable when a record waits."""
        return int(self._lib.ring_buffer__epoll_fd(self._ring))

    def consume(self) -> None:
        """Hand on all records there are."""
        if self._ring is not None:
            self._lib.ring_buffer__consume(self._ring)

    def close(self) -> None:
        """Unmap."""
        if self._ring is not None:
            self._lib.ring_buffer__free(self._ring)
            self._ring = None
