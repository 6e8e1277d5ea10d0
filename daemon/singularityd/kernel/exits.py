"""How a process that is not our child ended: watched by pidfd, told by the best source this kernel has.

A pidfd becomes readable when the process is a zombie. Its code is then in /proc/PID/stat until the parent reaps it; after that only
the kernel's PIDFD_GET_INFO has it (Linux 6.15). Executor only.
"""

from __future__ import annotations

import ctypes as c
import fcntl
import os
import signal
from typing import NamedTuple

_PIDFD_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3


class _PidfdInfo(c.Structure):
    _fields_ = (("mask", c.c_uint64), ("cgroup", c.c_uint64), ("ids", c.c_uint32 * 11), ("exit_code", c.c_int32))


class Exit(NamedTuple):
    """code: exit status or -1; signal: what killed it or 0; known: False where no source had it."""

    code: int
    signal: int
    known: bool


UNKNOWN = Exit(-1, 0, False)


def watch(pid: int) -> int | None:
    """A descriptor that becomes readable at the process's end; None when it is gone already."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def decode(status: int) -> Exit:
    """From a wait status."""
    number = status & 0x7F
    if number:
        return Exit(-1, number, True)
    return Exit((status >> 8) & 0xFF, 0, True)


def how(pid: int, descriptor: int, proc: str = "/proc") -> Exit:
    """Ask the sources in turn."""
    status = _from_stat(pid, proc)
    if status is None:
        status = _from_pidfd(descriptor)
    return UNKNOWN if status is None else decode(status)


def _from_stat(pid: int, proc: str) -> int | None:
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    # field 3 is the state, field 52 the exit code; it reads 0 where the reader may not trace the process, as root may
    return int(fields[49]) if len(fields) > 49 and fields[0] in (b"Z", b"X") else None


def _from_pidfd(descriptor: int) -> int | None:
    info = _PidfdInfo(mask=_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    return int(info.exit_code) if info.mask & _INFO_EXIT else None


def reason(ended: Exit) -> str:
    """A short label: `code 1`, `SIGKILL`, `unknown`."""
    if not ended.known:
        return "unknown"
    if ended.signal:
        try:
            return signal.Signals(ended.signal).name
        except ValueError:
            return f"signal {ended.signal}"
    return f"code {ended.code}"
