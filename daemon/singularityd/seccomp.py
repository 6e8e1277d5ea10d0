"""The front's system call filter: what it has no business calling answers EPERM, whatever code runs in it.

A deny list in classic BPF, assembled here: the front serves gRPC and SQLite from an interpreter whose calls differ between libc and
kernel versions, and a call that is missing from an allow list would be a daemon that fails at 3 a.m. What is denied is what turns a
foothold into more: other processes, kernel surface, namespaces, mounts, keys, other programs. The capabilities and the user are gone
already; this takes away the ways to win them back.

A thread cannot take a filter off, and every thread and child after it has it.
"""

from __future__ import annotations

import ctypes as c
import errno
import os
import platform
import struct
from collections.abc import Iterable
from typing import NamedTuple

from singularityd.errors import NotPermitted

# linux/bpf_common.h and linux/seccomp.h
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_SET_MODE_FILTER, _TSYNC = 1, 1
_AT_NUMBER, _AT_MACHINE, _AT_FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data. Both architectures are little-endian, so an argument's low half comes first."""
_X32 = 0x4000_0000
"""Numbers of x86-64's 32-bit-pointer calls start here: the same calls under other numbers."""

_NAMESPACES = 0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: a user namespace hands out every capability inside it."""
_BPF_READS = (1, 4, 15, 24)
"""bpf(2): look an element up, next key, ask for a map's shape, look many up. The front reads the kernel's tables with these."""


class Machine(NamedTuple):
    """One architecture."""

    audit: int
    """AUDIT_ARCH_*: what the kernel says a call was made as."""
    column: int
    """Of `DENIED` and `_SPECIAL`."""


MACHINES = {"x86_64": Machine(0xC000_003E, 0), "aarch64": Machine(0xC000_00B7, 1)}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes: their memory, registers and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # other programs: the front starts none
    "execve": (59, 221),
    "execveat": (322, 281),
    # surface of the kernel that unprivileged exploits use
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
}
"""System call -> its number on x86-64 and aarch64 (None: it has none there). Each answers EPERM."""

_SPECIAL = {"bpf": (321, 280), "clone": (56, 220), "clone3": (435, 435), "seccomp": (317, 277)}


class _Program(c.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", c.c_ushort), ("code", c.c_void_p))


def number(name: str, machine: str) -> int | None:
    """The number of a system call that this module knows; None where the architecture lacks it."""
    return (DENIED | _SPECIAL)[name][MACHINES[machine].column]


def program(machine: str) -> bytes:
    """The filter as the kernel takes it: 8 bytes an instruction. ValueError for an architecture without numbers here."""
    if machine not in MACHINES:
        raise ValueError(f"there is no filter for {machine}")
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    special = {name: pair[MACHINES[machine].column] for name, pair in _SPECIAL.items()}
    denied = sorted(pair[MACHINES[machine].column] or -1 for pair in DENIED.values())
    code = [
        _load(_AT_MACHINE),
        _unless(_JUMP_EQUAL, MACHINES[machine].audit, _KILL_PROCESS),  # a 32-bit call: numbers mean other things, and nothing makes one
        _load(_AT_NUMBER),
    ]
    if machine == "x86_64":
        code.append(_where(_JUMP_GREATER_EQUAL, _X32, refuse))
    code += [_where(_JUMP_EQUAL, call, refuse) for call in denied if call >= 0]
    # Its flags lie in memory, which a filter cannot read: glibc goes on with clone where there is none.
    code.append(_where(_JUMP_EQUAL, special["clone3"], absent))
    code.append(_only(special["clone"], [_load(_AT_FIRST_ARGUMENT), _where(_JUMP_SET, _NAMESPACES, refuse), _return(_ALLOW)]))
    reads = [_where(_JUMP_EQUAL, command, _ALLOW) for command in _BPF_READS]
    code.append(_only(special["bpf"], [_load(_AT_FIRST_ARGUMENT), *reads, _return(refuse)]))
    return b"".join([*code, _return(_ALLOW)])


def install() -> None:
    """Put the filter on every thread of this process, for good. NotPermitted where the kernel takes none; call after no_new_privs."""
    machine = platform.machine()
    try:
        code = program(machine)
    except ValueError as error:
        raise NotPermitted(f"the front's system calls cannot be limited: {error}", hint="x86-64 and aarch64 are supported") from error
    buffer = c.create_string_buffer(code, len(code))
    filter_ = _Program(len(code) // 8, c.addressof(buffer))
    libc = c.CDLL(None, use_errno=True)
    libc.syscall.restype = c.c_long
    if (result := libc.syscall(number("seccomp", machine), _SET_MODE_FILTER, _TSYNC, c.byref(filter_))) != 0:
        words = os.strerror(c.get_errno()) if result < 0 else f"thread {result} has another filter"
        raise NotPermitted(f"the front's system calls cannot be limited: {words}", hint="the kernel needs CONFIG_SECCOMP_FILTER")


# --- assembling: one instruction is u16 code, u8 if true, u8 if false, u32 operand -----------------------------------------------


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _return(action: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, action)


def _where(test: int, operand: int | None, action: int) -> bytes:
    """Return `action` where the test holds, else go on."""
    assert operand is not None, "every architecture has this call"
    return struct.pack("<HBBI", test, 0, 1, operand) + _return(action)


def _unless(test: int, operand: int, action: int) -> bytes:
    return struct.pack("<HBBI", test, 1, 0, operand) + _return(action)


def _only(call: int | None, body: Iterable[bytes]) -> bytes:
    """The body, which ends in a return, for one system call; the number is still loaded for those after it."""
    assert call is not None, "every architecture has this call"
    inside = b"".join(body)
    return struct.pack("<HBBI", _JUMP_EQUAL, 0, len(inside) // 8, call) + inside
