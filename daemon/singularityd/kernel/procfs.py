"""What /proc says of other processes. Every read tolerates that the process vanishes meanwhile: the answer is then None.

Standard library only; the root is a setting so that recorded trees can stand in for it.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

IDENTITY = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid",
        "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_JOBID", "PMI_ID",
        "PALS_RANKID", "PALS_APID", "PALS_LOCAL_RANKID",
        "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS",
        "NCCL_COMM_ID", "SINGULARITY_DRILL",
    }
)  # fmt: skip
"""The only environment variables that ever leave this reader: environments hold secrets."""

_ENVIRON_LIMIT = 1 << 20
_VALUE_LIMIT = 1024
_PF_KTHREAD = 0x00200000
_VM_LIB = re.compile(rb"^VmLib:\s*(\d+)", re.MULTILINE)
_ESCAPED = re.compile(rb"\\[\\n]")
_FILE_LIMIT = 1 << 20
"""Bytes: a status file lists all the groups a process is in, tens of thousands where a directory service hands them out."""
_PIECE = 1 << 16


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that tell one process, and one program of a process, from the next."""

    start_time: int
    """Clock ticks after boot: with the pid it names one process for ever."""
    parent: int
    kernel_thread: bool
    image: tuple[int, int]
    """Where code and stack begin; exec changes them (addresses are random), nothing else does. Zeros without the right to see them."""


class Status(NamedTuple):
    """The lines of /proc/PID/status that matter here."""

    name: str
    parent: int
    uid: int
    namespace_pids: tuple[int, ...]
    tracer: int
    state: str
    blocked: int
    ignored: int
    caught: int
    threads: int


class ProcFs:
    """Reads below one root."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root

    def read(self, path: str, limit: int = _FILE_LIMIT) -> bytes | None:
        """At most `limit` bytes of a file below the root; None when it cannot be read."""
        try:
            with open(f"{self.root}/{path}", "rb", buffering=0) as file:
                parts, left = [], limit
                while left > 0 and (data := file.read(min(left, _PIECE))):
                    parts.append(data)
                    left -= len(data)
                return b"".join(parts)
        except OSError:
            return None

    def pids(self) -> list[int]:
        """All processes."""
        return [int(name) for name in os.listdir(self.root) if name.isdigit()]

    def threads(self, pid: int) -> list[int] | None:
        """The threads of a process."""
        try:
            return [int(name) for name in os.listdir(f"{self.root}/{pid}/task") if name.isdigit()]
        except OSError:
            return None

    def stat(self, pid: int) -> Stat | None:
        """Identity of the process and of the program it runs, in one read."""
        fields = self._stat(pid)
        if fields is None or len(fields) < 26:
            return None
        try:
            flags, start, code, stack = (int(fields[place]) for place in (6, 19, 23, 25))
            return Stat(start, int(fields[1]), bool(flags & _PF_KTHREAD), (code, stack))
        except ValueError:
            return None

    def _stat(self, pid: int) -> list[bytes] | None:
        data = self.read(f"{pid}/stat", 4096)
        # The name stands in parentheses and may hold any byte, parentheses and newlines too: what counts is after the last one.
        fields = data.rpartition(b")")[2].split() if data and b")" in data else []
        return fields if len(fields) > 19 else None

    def start_time(self, pid: int) -> int | None:
        """Clock ticks after boot (field 22)."""
        fields = self._stat(pid)
        return int(fields[19]) if fields and fields[19].isdigit() else None

    def state(self, pid: int) -> str | None:
        """The state letter: R, S, D, T (stopped), t (traced), Z, X."""
        fields = self._stat(pid)
        return fields[0].decode("ascii", "replace") if fields else None

    def vm_size(self, pid: int) -> int | None:
        """Pages of address space; changes whenever a library is mapped or unmapped. The cheapest read there is: 5 microseconds."""
        try:
            descriptor = os.open(f"{self.root}/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return int(os.read(descriptor, 256).partition(b" ")[0])
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)

    def code_size(self, pid: int) -> int | None:
        """KiB of code mapped from libraries (VmLib): unlike the whole, it does not change when memory is allocated."""
        data = self.read(f"{pid}/status")
        match = _VM_LIB.search(data) if data else None
        return int(match.group(1)) if match else None

    def status(self, pid: int, thread: int | None = None) -> Status | None:
        """Of a process, or of one thread of it."""
        data = self.read(f"{pid}/status" if thread is None else f"{pid}/task/{thread}/status")
        return parse_status(data) if data else None

    def environ(self, pid: int) -> dict[str, str]:
        """The identity variables of a process, as they were when it started; empty where they cannot be read."""
        return parse_environ(self.read(f"{pid}/environ", _ENVIRON_LIMIT) or b"")

    def boot_id(self) -> str | None:
        """Names this boot of the host."""
        data = self.read("sys/kernel/random/boot_id", 64)
        return data.decode("ascii", "replace").strip() if data else None


def parse_status(data: bytes) -> Status | None:
    """From the text of a status file; None when lines are missing (the process was ending)."""
    lines: dict[bytes, bytes] = {}
    for line in data.split(b"\n"):
        name, colon, value = line.partition(b":")
        if colon:
            lines.setdefault(name, value.strip())
    try:
        return Status(
            name=_unescape(lines[b"Name"]).decode("utf-8", "replace"),
            parent=int(lines[b"PPid"]),
            uid=int(lines[b"Uid"].split()[0]),
            namespace_pids=tuple(int(number) for number in lines.get(b"NSpid", b"").split()),
            tracer=int(lines.get(b"TracerPid", b"0")),
            state=lines[b"State"][:1].decode("ascii", "replace"),
            blocked=int(lines.get(b"SigBlk", b"0"), 16),
            ignored=int(lines.get(b"SigIgn", b"0"), 16),
            caught=int(lines.get(b"SigCgt", b"0"), 16),
            threads=int(lines.get(b"Threads", b"0")),
        )
    except (KeyError, ValueError, IndexError):
        return None


def parse_environ(data: bytes) -> dict[str, str]:
    """The identity variables of NUL-separated NAME=value; the first of a name counts, as it does for getenv."""
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        key = name.decode("utf-8", "replace")
        if equals and key in IDENTITY and key not in found:
            found[key] = value[:_VALUE_LIMIT].decode("utf-8", "replace")
    return found


def _unescape(name: bytes) -> bytes:
    # One pass: a backslash before an n is written as two and an n.
    return _ESCAPED.sub(lambda match: b"\n" if match.group() == b"\\n" else b"\\", name)
