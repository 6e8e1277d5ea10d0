"""bpf(2) and perf_event_open(2) by system call: maps, links, raw tracepoints. No compiler, no library, both halves use it.

Everything raises OSError with the kernel's errno; callers turn that into errors of their own. Thread-safe: no state.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
import platform
from collections.abc import Iterator
from typing import TypeVar

_MACHINE = platform.machine()
_SYS_BPF = {"x86_64": 321, "aarch64": 280}[_MACHINE]
_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}[_MACHINE]

_MAP_LOOKUP, _MAP_UPDATE, _MAP_DELETE, _MAP_NEXT_KEY = 1, 2, 3, 4
_PROG_LOAD, _MAP_GET_FD_BY_ID, _OBJ_INFO, _RAW_TRACEPOINT_OPEN = 5, 14, 15, 17
_MAP_TAKE, _MAP_LOOKUP_BATCH, _LINK_CREATE = 21, 24, 28
_BPF_PERF_EVENT, _UPROBE_MULTI_ATTACH = 41, 48
_UPROBE_MULTI_RETURN = 1
_F_RDONLY = 1 << 3
_PERF_FLAG_FD_CLOEXEC = 8

_libc = c.CDLL(None, use_errno=True)
_libc.syscall.restype = c.c_long

Value = TypeVar("Value", bound=c.Structure)
Key = TypeVar("Key", bound=c.Structure)


class _Element(c.Structure):
    _fields_ = (("map_fd", c.c_uint32), ("pad", c.c_uint32), ("key", c.c_uint64), ("value", c.c_uint64), ("flags", c.c_uint64))


class _Batch(c.Structure):
    _fields_ = (
        ("in_batch", c.c_uint64),
        ("out_batch", c.c_uint64),
        ("keys", c.c_uint64),
        ("values", c.c_uint64),
        ("count", c.c_uint32),
        ("map_fd", c.c_uint32),
        ("elem_flags", c.c_uint64),
        ("flags", c.c_uint64),
    )


class _Link(c.Structure):
    _fields_ = (
        ("prog_fd", c.c_uint32),
        ("target_fd", c.c_uint32),
        ("attach_type", c.c_uint32),
        ("flags", c.c_uint32),
        ("cookie", c.c_uint64),
    )


class _UprobeMulti(c.Structure):
    _fields_ = (
        ("prog_fd", c.c_uint32),
        ("target_fd", c.c_uint32),
        ("attach_type", c.c_uint32),
        ("link_flags", c.c_uint32),
        ("path", c.c_uint64),
        ("offsets", c.c_uint64),
        ("ref_ctr_offsets", c.c_uint64),
        ("cookies", c.c_uint64),
        ("count", c.c_uint32),
        ("flags", c.c_uint32),
        ("pid", c.c_uint32),
        ("pad", c.c_uint32),
    )


class _RawTracepoint(c.Structure):
    _fields_ = (("name", c.c_uint64), ("prog_fd", c.c_uint32), ("pad", c.c_uint32))


class _ById(c.Structure):
    _fields_ = (("id", c.c_uint32), ("next_id", c.c_uint32), ("open_flags", c.c_uint32))


class _Info(c.Structure):
    _fields_ = (("fd", c.c_uint32), ("len", c.c_uint32), ("info", c.c_uint64))


class MapInfo(c.Structure):
    """The head of struct bpf_map_info."""

    _fields_ = (
        ("type", c.c_uint32),
        ("id", c.c_uint32),
        ("key_size", c.c_uint32),
        ("value_size", c.c_uint32),
        ("max_entries", c.c_uint32),
        ("map_flags", c.c_uint32),
        ("name", c.c_char * 16),
    )


class _PerfEventAttr(c.Structure):
    _fields_ = (
        ("type", c.c_uint32),
        ("size", c.c_uint32),
        ("config", c.c_uint64),
        ("sample_period", c.c_uint64),
        ("sample_type", c.c_uint64),
        ("read_format", c.c_uint64),
        ("flags", c.c_uint64),
        ("wakeup_events", c.c_uint32),
        ("bp_type", c.c_uint32),
        ("config1", c.c_uint64),
        ("config2", c.c_uint64),
        ("rest", c.c_uint64 * 6),
    )


def _bpf(command: int, attribute: c.Structure) -> int:
    result = int(_libc.syscall(_SYS_BPF, command, c.byref(attribute), c.sizeof(attribute)))
    if result < 0:
        code = c.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def lookup(fd: int, key: c._SimpleCData[int] | c.Structure, value: c.Structure | c._SimpleCData[int]) -> bool:
    """Fill `value` with the element at `key`; False where there is none."""
    try:
        _bpf(_MAP_LOOKUP, _Element(fd, 0, c.addressof(key), c.addressof(value), 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def update(fd: int, key: c._SimpleCData[int] | c.Structure, value: c.Structure | c._SimpleCData[int]) -> None:
    """Set the element at `key`."""
    _bpf(_MAP_UPDATE, _Element(fd, 0, c.addressof(key), c.addressof(value), 0))


def delete(fd: int, key: c._SimpleCData[int] | c.Structure) -> bool:
    """Remove the element at `key`; False where there was none."""
    try:
        _bpf(_MAP_DELETE, _Element(fd, 0, c.addressof(key), 0, 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def take(fd: int, key: c._SimpleCData[int] | c.Structure, value: c.Structure | c._SimpleCData[int]) -> bool:
    """Remove the element at `key` and fill `value` with its last state (Linux 5.14); False where there was none."""
    try:
        _bpf(_MAP_TAKE, _Element(fd, 0, c.addressof(key), c.addressof(value), 0))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return False
        raise
    return True


def keys(fd: int, kind: type[Key]) -> Iterator[Key]:
    """All keys of a map of few elements; an element deleted meanwhile may restart the walk, so callers bound it."""
    here, after = kind(), kind()
    first = True
    while True:
        try:
            _bpf(_MAP_NEXT_KEY, _Element(fd, 0, 0 if first else c.addressof(here), c.addressof(after), 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise
        first = False
        c.memmove(c.byref(here), c.byref(after), c.sizeof(kind))
        yield kind.from_buffer_copy(here)


def read_all(fd: int, key: type[Key], value: type[Value], limit: int) -> list[tuple[Key, Value]]:
    """Every element of a hash map in a few system calls, at most `limit` of them.

    The kernel copies bucket by bucket: elements that come or go meanwhile may be missing, none is half-written except for counters
    that move while they are read. ENOSPC (a bucket larger than the space left) widens the buffer.
    """
    found: list[tuple[Key, Value]] = []
    chunk = 256
    position, following = c.c_uint64(), c.c_uint64()
    first = True
    while len(found) < limit:
        key_space, value_space = (key * chunk)(), (value * chunk)()
        batch = _Batch(
            0 if first else c.addressof(position), c.addressof(following), c.addressof(key_space), c.addressof(value_space), chunk, fd, 0, 0
        )
        last = False
        try:
            _bpf(_MAP_LOOKUP_BATCH, batch)
        except OSError as error:
            if error.errno == errno.ENOSPC and chunk < 65536:
                chunk *= 4
                continue
            if error.errno != errno.ENOENT:
                raise
            last = True
        count = min(batch.count, chunk)
        found.extend((key.from_buffer_copy(key_space[i]), value.from_buffer_copy(value_space[i])) for i in range(count))
        if last:
            break
        first = False
        position.value = following.value
    return found


def map_info(fd: int) -> MapInfo:
    """What the kernel says of a map."""
    info = MapInfo()
    _bpf(_OBJ_INFO, _Info(fd, c.sizeof(info), c.addressof(info)))
    return info


def read_only(fd: int) -> int:
    """A second descriptor of the same map through which nothing can be written; needs CAP_SYS_ADMIN."""
    return _bpf(_MAP_GET_FD_BY_ID, _ById(map_info(fd).id, 0, _F_RDONLY))


def attach_raw_tracepoint(program: int, name: str) -> int:
    """Attach to a raw tracepoint; closing the descriptor detaches."""
    text = c.create_string_buffer(name.encode())
    return _bpf(_RAW_TRACEPOINT_OPEN, _RawTracepoint(c.addressof(text), program, 0))


def uprobe_type() -> int:
    """The number of the kernel's uprobe event source."""
    with open("/sys/bus/event_source/devices/uprobe/type", encoding="ascii") as file:
        return int(file.read())


def attach_uprobe(program: int, path: str, offset: int, cookie: int, *, returns: bool, source: int) -> tuple[int, int]:
    """Attach to a file offset in every process that maps the file, now or later; needs Linux 5.15 for the cookie.

    Returns (event, link) descriptors; closing both detaches. `source` is uprobe_type().
    """
    name = c.create_string_buffer(os.fsencode(path))
    attribute = _PerfEventAttr(type=source, size=c.sizeof(_PerfEventAttr), config=int(returns), config1=c.addressof(name), config2=offset)
    event = int(_libc.syscall(_SYS_PERF_EVENT_OPEN, c.byref(attribute), -1, 0, -1, _PERF_FLAG_FD_CLOEXEC))
    if event < 0:
        code = c.get_errno()
        raise OSError(code, os.strerror(code), path)
    try:
        link = _bpf(_LINK_CREATE, _Link(program, event, _BPF_PERF_EVENT, 0, cookie))
    except OSError:
        os.close(event)
        raise
    return event, link


def attach_uprobes(program: int, path: str, offsets: list[int], cookies: list[int], *, returns: bool) -> int:
    """Attach one program to many offsets of a file by one link (Linux 6.6; the program was loaded for it).

    One link is what makes stopping quick: each perf-event probe waits for its own grace period when it is closed (measured: 92 of
    them take 10 s), a link of many waits once.
    """
    name = c.create_string_buffer(os.fsencode(path))
    where, which = (c.c_uint64 * len(offsets))(*offsets), (c.c_uint64 * len(cookies))(*cookies)
    flags = _UPROBE_MULTI_RETURN if returns else 0
    request = _UprobeMulti(
        program, 0, _UPROBE_MULTI_ATTACH, 0, c.addressof(name), c.addressof(where), 0, c.addressof(which), len(offsets), flags, 0, 0
    )
    return _bpf(_LINK_CREATE, request)
