"""What the checks stand on: the machine as it is reached, the answer, and the few system calls that load tiny programs.

Programs are written as instructions: no compiler is needed to learn what a kernel permits, and a refusal is the kernel's, not bcc's.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import errno
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from singularityd.kernel import bpf, headers

State = Literal["yes", "no", "unknown"]

KPROBE, RAW_TRACEPOINT = 2, 17
MAP_ARRAY, MAP_RINGBUF = 2, 27
_MAP_CREATE, _PROG_LOAD = 0, 5
_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_PERF_FLAG_FD_CLOEXEC = 8
_LOG = 8192

FUNCTION = {
    "x86_64": bytes.fromhex("55 31c0 5d c3"),  # push rbp; xor eax, eax; pop rbp; ret
    "aarch64": bytes.fromhex("1f2003d5 00008052 c0035fd6"),  # nop; mov w0, 0; ret
}
RETURN_REGISTER = {"x86_64": 80, "aarch64": 0}
"""Offset of the register that carries a function's result in the kernel's struct pt_regs."""


class Answer(NamedTuple):
    """What one check learned."""

    state: State
    detail: str
    """What was done, and the kernel's answer."""
    remedy: str = ""
    """What an administrator can do, or why nothing needs to be done."""


class Found(NamedTuple):
    """An answer under the name of its check."""

    name: str
    state: State
    detail: str
    remedy: str = ""


class Kernel:
    """The system calls of the checks; tests put another in its place. Every method raises OSError with the kernel's errno."""

    def __init__(self) -> None:
        self.machine = platform.machine()
        self._libc = c.CDLL(None, use_errno=True)
        self._libc.syscall.restype = c.c_long
        self._libc.mmap.restype = c.c_void_p
        self._libc.mmap.argtypes = (c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_int, c.c_long)
        self._libc.munmap.argtypes = (c.c_void_p, c.c_size_t)
        self._libc.ptrace.restype = c.c_long
        self._libc.ptrace.argtypes = (c.c_long, c.c_long, c.c_void_p, c.c_void_p)

    def _bpf(self, command: int, attribute: bytes) -> int:
        space = c.create_string_buffer(attribute, len(attribute))
        return self._checked(self._libc.syscall(_SYS_BPF[self.machine], command, space, len(attribute)))

    def _checked(self, result: int) -> int:
        if result < 0:
            code = c.get_errno()
            raise OSError(code, os.strerror(code))
        return result

    def create_map(self, kind: int, key_size: int, value_size: int, entries: int) -> int:
        """Descriptor of a new map."""
        return self._bpf(_MAP_CREATE, struct.pack("=5I52x", kind, key_size, value_size, entries, 0))

    def load_program(self, kind: int, instructions: bytes, *, attach_type: int = 0) -> int:
        """Descriptor of a loaded program; the verifier's words, where it has any, are the OSError's text."""
        code, licence, log = c.create_string_buffer(instructions), c.create_string_buffer(b"GPL"), c.create_string_buffer(_LOG)
        # prog_type, insn_cnt, insns, license, log_level, log_size, log_buf, kern_version, prog_flags, prog_name[16], ifindex, attach_type
        attribute = struct.pack(
            "=IIQQIIQII16sII",
            *(kind, len(instructions) // 8, c.addressof(code), c.addressof(licence), 1, _LOG, c.addressof(log)),
            *(headers.version_code(headers.running().numbers), 0, b"singularity", 0, attach_type),
        )
        try:
            return self._bpf(_PROG_LOAD, attribute)
        except OSError as error:
            words = reason(log.value.decode("ascii", "replace"))
            raise OSError(error.errno, words or error.strerror) from error

    def attach_uprobe(self, program: int, path: str, cookie: int, *, returns: bool) -> list[int]:
        """Descriptors to close; inode-wide at offset 0, as the daemon attaches."""
        return list(bpf.attach_uprobe(program, path, 0, cookie, returns=returns, source=bpf.uprobe_type()))

    def attach_uprobe_without_cookie(self, program: int, path: str, *, returns: bool) -> list[int]:
        """The same by the ioctl that older kernels have."""
        event = self.open_probe(bpf.uprobe_type(), os.fsencode(path), returns=returns)
        try:
            self._checked(self._libc.ioctl(event, c.c_ulong(0x40042408), c.c_int(program)))  # PERF_EVENT_IOC_SET_BPF
            self._checked(self._libc.ioctl(event, c.c_ulong(0x2400), c.c_int(0)))  # PERF_EVENT_IOC_ENABLE
        except OSError:
            os.close(event)
            raise
        return [event]

    def open_probe(self, source: int, name: bytes, *, returns: bool = False) -> int:
        """A perf event of a uprobe (name: file) or kprobe (name: function) at offset 0."""
        text = c.create_string_buffer(name)
        attribute = struct.pack("=IIQQQQQIIQQ", source, 112, int(returns), 0, 0, 0, 0, 0, 0, c.addressof(text), 0).ljust(112, b"\0")
        space = c.create_string_buffer(attribute, len(attribute))
        number = _SYS_PERF_EVENT_OPEN[self.machine]
        return self._checked(self._libc.syscall(number, space, c.c_int(-1), c.c_int(0), c.c_int(-1), c.c_ulong(_PERF_FLAG_FD_CLOEXEC)))

    def attach_uprobe_multi(self, program: int, path: str, cookie: int) -> list[int]:
        """One link for many offsets; here for one."""
        return [bpf.attach_uprobes(program, path, [0], [cookie], returns=False)]

    def attach_raw_tracepoint(self, program: int, name: str) -> int:
        """Descriptor to close."""
        return bpf.attach_raw_tracepoint(program, name)

    def first_value(self, array: int) -> int:
        """Element 0 of an array map of 64-bit values."""
        value = c.c_uint64()
        bpf.lookup(array, c.c_uint32(0), value)
        return int(value.value)

    def ptrace(self, request: int, pid: int, data: int = 0) -> None:
        """ptrace(2) without an address."""
        self._checked(self._libc.ptrace(request, pid, None, data))

    @contextlib.contextmanager
    def function(self) -> Iterator[tuple[str, c._FuncPointer]]:
        """(path, callable) of a function that returns 0 and that nobody else maps, so that probing it disturbs nobody."""
        code = FUNCTION[self.machine]
        descriptor = os.memfd_create("singularity-trial", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, code.ljust(mmap.PAGESIZE, b"\0"))
            address = self._libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, descriptor, 0)
            if address == c.c_void_p(-1).value:
                self._checked(-1)
            try:
                yield f"/proc/{os.getpid()}/fd/{descriptor}", c.CFUNCTYPE(c.c_int)(address)
            finally:
                self._libc.munmap(address, mmap.PAGESIZE)
        finally:
            os.close(descriptor)


class Machine:
    """Where the checks look; every root is a setting so that a test can be any machine."""

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        header_setting: Path | str = "",
        header_roots: headers.Roots = headers.DISTRIBUTION,
        system_python: str = "/usr/bin/python3",
        kernel: Kernel | None = None,
    ) -> None:
        self.proc, self.sys = proc, sys
        self.header_setting, self.header_roots = header_setting, header_roots
        self.system_python = system_python
        self.kernel = kernel or Kernel()

    def read(self, path: Path) -> str | None:
        """The stripped text of a small file; None where it is not there or not to be read."""
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def mounts(self) -> list[tuple[str, str]]:
        """(type, mount point) of each mount of this process."""
        lines = (self.read(self.proc / "self/mounts") or "").splitlines()
        return [(fields[2], fields[1]) for fields in (line.split() for line in lines) if len(fields) > 2]


def instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    """One BPF instruction."""
    return struct.pack("=BBhi", code, target | source << 4, offset, value)


EXIT = instruction(0xB7, 0, value=0) + instruction(0x95)
"""r0 = 0; exit"""


def call(helper: int) -> bytes:
    """Call a helper function by number."""
    return instruction(0x85, value=helper)


def store_cookie(array: int) -> bytes:
    """A program that stores its attach cookie in element 0 of an array map."""
    return (
        call(174)  # r0 = bpf_get_attach_cookie(ctx)
        + instruction(0x7B, 10, 0, -8)  # *(u64 *)(fp - 8) = r0
        + _update(array)
        + EXIT
    )


def store_one(array: int) -> bytes:
    """A program that stores 1 in element 0 of an array map."""
    return instruction(0x7A, 10, 0, -8, 1) + _update(array) + EXIT


def _update(array: int) -> bytes:
    return (
        instruction(0x62, 10, 0, -12, 0)  # *(u32 *)(fp - 12) = 0
        + instruction(0x18, 1, 1, value=array)  # r1 = map
        + instruction(0)
        + instruction(0xBF, 2, 10)
        + instruction(0x07, 2, value=-12)  # r2 = &key
        + instruction(0xBF, 3, 10)
        + instruction(0x07, 3, value=-8)  # r3 = &value
        + instruction(0xB7, 4, value=0)
        + call(2)  # bpf_map_update_elem
    )


def reason(log: str) -> str:
    """The line of a verifier's log that says why: the last that is neither an instruction, a register dump nor a statistic."""
    noise = ("processed ", "verification time", "stack depth", "func#", "0: R", "; ", "R0", "R1")
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith(noise) and ": (" not in line), "")


def refusal(error: OSError) -> str:
    """The kernel's answer by the errno's name, with the verifier's words or the text."""
    # Python knows this number under a name that no kernel source uses.
    name = "EOPNOTSUPP" if error.errno == errno.EOPNOTSUPP else errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{name}: {error.strerror}"


def denial(error: OSError) -> State:
    """A refusal is `no`; what only says that we could not try (no descriptors or memory left) is `unknown`."""
    return "unknown" if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOENT) else "no"


@contextlib.contextmanager
def closing(*descriptors: int) -> Iterator[None]:
    """Close them in the end, whatever happens."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
