"""ptrace(2), prctl(2) and friends by ctypes. Errors are OSError with the kernel's errno."""

from __future__ import annotations

import contextlib
import ctypes as c
import os

SEIZE, INTERRUPT, LISTEN, CONT, DETACH = 0x4206, 0x4207, 0x4208, 7, 17
GETREGSET, SETREGSET = 0x4204, 0x4205
O_TRACECLONE, O_TRACEEXEC = 1 << 3, 1 << 4
EVENT_CLONE, EVENT_EXEC, EVENT_STOP = 3, 4, 128
NT_PRSTATUS = 1
WALL = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

_libc = c.CDLL(None, use_errno=True)
_libc.ptrace.restype = c.c_long
_libc.ptrace.argtypes = (c.c_long, c.c_long, c.c_void_p, c.c_void_p)


class IoVec(c.Structure):
    """struct iovec."""

    _fields_ = (("base", c.c_void_p), ("length", c.c_size_t))


def ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    """One request to one thread."""
    if _libc.ptrace(request, tid, address, data) < 0:
        code = c.get_errno()
        raise OSError(code, os.strerror(code))


def resume(tid: int, signal_number: int = 0) -> bool:
    """Let a stopped thread go on, with a signal or without; False where the thread is gone meanwhile."""
    try:
        ptrace(CONT, tid, 0, signal_number)
    except ProcessLookupError:
        return False
    return True


def detach(tid: int, signal_number: int = 0) -> None:
    """Trace a stopped thread no longer; it goes on."""
    with contextlib.suppress(ProcessLookupError):
        ptrace(DETACH, tid, 0, signal_number)


def get_registers(tid: int, registers: c.Structure) -> None:
    """Fill the architecture's general registers."""
    vector = IoVec(c.addressof(registers), c.sizeof(registers))
    ptrace(GETREGSET, tid, NT_PRSTATUS, c.addressof(vector))


def set_registers(tid: int, registers: c.Structure) -> None:
    """Write them back."""
    vector = IoVec(c.addressof(registers), c.sizeof(registers))
    ptrace(SETREGSET, tid, NT_PRSTATUS, c.addressof(vector))


def die_with_parent(parent: int, signal_number: int) -> bool:
    """Be killed when the parent dies; False where it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    return os.getppid() == parent


def set_name(name: str) -> None:
    """As ps shows it; 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
