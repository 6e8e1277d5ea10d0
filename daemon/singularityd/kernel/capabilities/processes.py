"""Checks of what we may do to other processes: trace them, look into them, learn how they ended."""

from __future__ import annotations

import contextlib
import ctypes as c
import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator

from singularityd.kernel.capabilities.trial import MAP_ARRAY, MAP_RINGBUF, Answer, Machine, closing, denial, refusal

_SEIZE, _INTERRUPT, _DETACH, _EXITKILL = 0x4206, 0x4207, 17, 0x00100000
_NOBODY = 65534
_PATIENCE = 0.15
_GET_INFO, _INFO_EXIT = 0xC050FF0B, 1 << 3
_EXIT_CODE = 60
"""Offset in struct pidfd_info of 80 bytes, whose size is part of the request's number."""

_PRIVILEGES = {
    "CAP_DAC_READ_SEARCH": (2, "reading libraries inside containers"),
    "CAP_KILL": (5, "signalling the ranks of other users"),
    "CAP_SETGID": (6, "starting the front under its own group"),
    "CAP_SETUID": (7, "starting the front under its own user"),
    "CAP_SYS_PTRACE": (19, "faults, and finding other users' libraries"),
    "CAP_SYS_ADMIN": (21, "probes of other processes where perf_event_paranoid is 3, read-only map descriptors"),
    "CAP_SYS_RESOURCE": (24, "raising the memlock limit on kernels before 5.11"),
    "CAP_PERFMON": (38, "attaching probes"),
    "CAP_BPF": (39, "loading programs"),
    "CAP_CHECKPOINT_RESTORE": (40, "opening /proc/PID/map_files"),
}
_OLD_KERNELS = "CAP_SYS_RESOURCE"
_IMPLIED_BY_ADMIN = ("CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE")


def effective_capabilities(machine: Machine) -> int | None:
    """The bit mask of this process, None where /proc does not tell."""
    for line in (machine.read(machine.proc / "self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            with contextlib.suppress(ValueError):
                return int(line.split()[1], 16)
    return None


def holds(mask: int, name: str) -> bool:
    """Whether a capability, or CAP_SYS_ADMIN where the kernel takes that for it, is in the mask."""
    number = _PRIVILEGES[name][0]
    implied = name in _IMPLIED_BY_ADMIN and bool(mask >> _PRIVILEGES["CAP_SYS_ADMIN"][0] & 1)
    return bool(mask >> number & 1) or implied


def privileges(machine: Machine) -> Answer:
    """The capabilities(7) that this process holds."""
    mask = effective_capabilities(machine)
    if mask is None:
        return Answer("unknown", f"{machine.proc}/self/status does not tell", "mount procfs at /proc")
    missing = [name for name in _PRIVILEGES if not holds(mask, name)]
    if not missing:
        return Answer("yes", "all that are used are held")
    if missing == [_OLD_KERNELS]:
        return Answer("yes", f"all that are needed are held; not {_OLD_KERNELS} ({_PRIVILEGES[_OLD_KERNELS][1]})")
    lost = "; ".join(f"{name} ({_PRIVILEGES[name][1]})" for name in missing)
    return Answer("no", f"missing: {lost}", f"run as root, or add to the unit's CapabilityBoundingSet: {' '.join(missing)}")


def ptrace(machine: Machine) -> Answer:
    """Seize, stop and release a process of another user, as a fault does with a rank."""
    remedy = "faults are not possible: give CAP_SYS_PTRACE, and see yama and selinux below"
    with _child(lambda: _become(_NOBODY)) as pid:
        try:
            machine.kernel.ptrace(_SEIZE, pid, _EXITKILL)
            machine.kernel.ptrace(_INTERRUPT, pid)
        except OSError as error:
            return Answer(denial(error), f"seizing a process: {refusal(error)}", remedy)
        status = _wait(pid)
        if status is None or not os.WIFSTOPPED(status):
            return Answer(
                "unknown", f"a seized process did not stop within {_PATIENCE * 1000:.0f} ms", "try again when the host is less busy"
            )
        machine.kernel.ptrace(_DETACH, pid)
    return Answer("yes", "seized, stopped and released a process of another user")


def yama(machine: Machine) -> Answer:
    """Yama's ptrace_scope: 3 forbids tracing to everyone until reboot, 1 and 2 leave it to CAP_SYS_PTRACE."""
    scope = machine.read(machine.proc / "sys/kernel/yama/ptrace_scope")
    if scope is None:
        if not (machine.proc / "sys/kernel").is_dir():
            return Answer("unknown", f"{machine.proc}/sys is not there", "mount procfs at /proc")
        return Answer("yes", "this kernel has no Yama: tracing is not restricted by it")
    if scope == "3":
        remedy = "remove kernel.yama.ptrace_scope=3 from sysctl.d and reboot (it cannot be lowered on a running system)"
        return Answer("no", "kernel.yama.ptrace_scope = 3: nobody may trace, not even root", remedy)
    return Answer("yes", f"kernel.yama.ptrace_scope = {scope}: a process with CAP_SYS_PTRACE may trace")


def selinux(machine: Machine) -> Answer:
    """SELinux's boolean deny_ptrace refuses tracing even to root."""
    boolean = machine.read(machine.sys / "fs/selinux/booleans/deny_ptrace")
    if boolean is None:
        supported = "selinuxfs" in (machine.read(machine.proc / "filesystems") or "")
        mounted = any(kind == "selinuxfs" for kind, _ in machine.mounts())
        if supported and not mounted:
            return Answer("unknown", "the kernel has SELinux, but selinuxfs is not mounted", "mount -t selinuxfs selinuxfs /sys/fs/selinux")
        return Answer("yes", "SELinux does not restrict tracing here")
    if boolean.startswith("1"):
        return Answer("no", "the SELinux boolean deny_ptrace is on: nobody may trace", "setsebool -P deny_ptrace off")
    return Answer("yes", "the SELinux boolean deny_ptrace is off")


def map_files(machine: Machine) -> Answer:
    """Open a mapped file through /proc/PID/map_files: the only way to a library that was deleted or lies in another mount namespace."""
    folder = machine.proc / "self/map_files"
    remedy = "give CAP_CHECKPOINT_RESTORE (or CAP_SYS_ADMIN); without it deleted libraries are not attached"
    try:
        first = next(iter(sorted(folder.iterdir())))
        os.close(os.open(first, os.O_RDONLY | os.O_CLOEXEC))
    except StopIteration:
        return Answer("unknown", f"{folder} is empty", "")
    except FileNotFoundError as error:
        return Answer("no", f"{folder}: {refusal(error)}", "use a kernel with CONFIG_PROC_PAGE_MONITOR and CONFIG_CHECKPOINT_RESTORE")
    except OSError as error:
        return Answer(denial(error), f"opening {folder}/…: {refusal(error)}", remedy)
    return Answer("yes", "opened a mapped file through map_files")


def pidfd_exit(machine: Machine) -> Answer:
    """Learn the exit code of a process through its pidfd (Linux 6.15), which also works where we are not its parent."""
    remedy = "none needed: how a rank ended is then taken from the kernel's exit tracepoint (Linux 6.15 or later has it)"
    try:
        with _child(lambda: os._exit(7), waits=False) as pid:
            pidfd = os.pidfd_open(pid)
            with closing(pidfd):
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
                answer = fcntl.ioctl(pidfd, _GET_INFO, struct.pack("=Q72x", _INFO_EXIT))
    except OSError as error:
        return Answer("no", f"asking a pidfd for the exit code: {refusal(error)}", remedy)
    (mask,), (status,) = struct.unpack_from("=Q", answer), struct.unpack_from("=i", answer, _EXIT_CODE)
    if not mask & _INFO_EXIT or os.waitstatus_to_exitcode(status) != 7:
        return Answer("no", f"the pidfd of a process that ended with 7 tells status {status}", remedy)
    return Answer("yes", "a pidfd told the exit code of a process that had ended")


def front_reads_maps(machine: Machine) -> Answer:
    """Read maps through inherited descriptors as a user without capabilities, as the front does."""
    setting = machine.read(machine.proc / "sys/kernel/unprivileged_bpf_disabled")
    told = f"kernel.unprivileged_bpf_disabled = {setting}" if setting is not None else "kernel.unprivileged_bpf_disabled is not known"
    remedy = "use Linux 5.19 or later, or set kernel.unprivileged_bpf_disabled=0"
    kernel = machine.kernel
    try:
        array = kernel.create_map(MAP_ARRAY, 4, 8, 1)
        with closing(array):
            ring = kernel.create_map(MAP_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE"))
            with closing(ring):
                code = _as_nobody(lambda: _read_maps(machine, array, ring))
    except OSError as error:
        return Answer("unknown", f"{told}; no map to try it with: {refusal(error)}", "see ring_buffer")
    if code is None:
        return Answer("unknown", f"{told}; the trial did not end in time", "try again when the host is less busy")
    if code:
        return Answer("no", f"{told}; reading a map without capabilities: {refusal(OSError(code, os.strerror(code)))}", remedy)
    return Answer("yes", f"{told}; a user without capabilities read a map and mapped a ring buffer")


def _read_maps(machine: Machine, array: int, ring: int) -> None:
    machine.kernel.first_value(array)
    mmap.mmap(ring, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ).close()


def _as_nobody(action: Callable[[], None]) -> int | None:
    """errno of the action in a child without privileges, 0 when it worked, None when it did not end in time."""

    def body() -> None:
        try:
            _become(_NOBODY)
            action()
        except OSError as error:
            os._exit(error.errno or 255)

    with _child(body, waits=False) as pid:
        status = _wait(pid)
        return None if status is None else os.waitstatus_to_exitcode(status)


def _become(uid: int) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


@contextlib.contextmanager
def _child(body: Callable[[], None], *, waits: bool = True) -> Iterator[int]:
    """A child that runs `body` and, if it `waits`, sleeps until we let it go; it is gone and reaped afterwards, whatever happened."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    ready, started = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            os.close(writing)
            c.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it never outlives us
            body()
            os.close(started)
            if waits:
                os.read(reading, 1)
            code = 0
        finally:
            os._exit(code)
    os.close(reading)
    os.close(started)
    try:
        if waits:
            os.read(ready, 1)  # end of file: the body has run
        yield pid
    finally:
        os.close(writing)
        os.close(ready)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _wait(pid: int) -> int | None:
    """The child's next wait status, or None when it takes too long."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    return None
