"""Register tables, and how a call is skipped: set the result, jump to a `ret`, leave the stack pointer of the entry.

Never pop the frame instead: where another tool has a return probe on the function, the caller's slot holds the kernel's trampoline.
"""

from __future__ import annotations

import ctypes as c
import platform


class X86Registers(c.Structure):
    """struct user_regs_struct."""

    _fields_ = tuple(
        (name, c.c_uint64)
        for name in [
            "r15",
            "r14",
            "r13",
            "r12",
            "rbp",
            "rbx",
            "r11",
            "r10",
            "r9",
            "r8",
            "rax",
            "rcx",
            "rdx",
            "rsi",
            "rdi",
            "orig_rax",
            "rip",
            "cs",
            "eflags",
            "rsp",
            "ss",
            "fs_base",
            "gs_base",
            "ds",
            "es",
            "fs",
            "gs",
        ]
    )

    def skip_call(self, value: int, *, entry_sp: int, gadget: int) -> None:
        """Return `value` from the function entered with `entry_sp`, through the `ret` at `gadget`."""
        self.rax = value & 0xFFFFFFFFFFFFFFFF
        self.orig_rax = 0xFFFFFFFFFFFFFFFF  # in no system call: a result such as -512 would otherwise be taken for one to restart
        self.rip = gadget
        self.rsp = entry_sp


class Aarch64Registers(c.Structure):
    """struct user_pt_regs."""

    _fields_ = (("x", c.c_uint64 * 31), ("sp", c.c_uint64), ("pc", c.c_uint64), ("pstate", c.c_uint64))

    def skip_call(self, value: int, *, entry_sp: int, gadget: int = 0) -> None:
        """Return `value`: the return address is in x30, so no `ret` need be found."""
        del gadget
        self.x[0] = value & 0xFFFFFFFFFFFFFFFF
        self.pc = self.x[30]
        self.sp = entry_sp


NEEDS_RET = platform.machine() != "aarch64"
"""Whether a `ret` must be found; where the return address is in a register, none need be."""


def registers() -> X86Registers | Aarch64Registers:
    """An empty table of this machine."""
    return Aarch64Registers() if platform.machine() == "aarch64" else X86Registers()


def find_ret(code: bytes, address: int) -> int | None:
    """The address of a `ret` in x86-64 code that begins at `address`: any byte c3, also inside an instruction, is one."""
    place = code.find(b"\xc3", 1)
    return address + place if place >= 0 else None
