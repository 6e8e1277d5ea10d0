"""Checks of how the host is set up: security modes, limits, and what the compiler of the probes needs."""

from __future__ import annotations

import errno
import os
import resource
import subprocess

from singularityd.kernel import headers
from singularityd.kernel.capabilities.processes import effective_capabilities, holds
from singularityd.kernel.capabilities.trial import MAP_ARRAY, Answer, Machine, denial, refusal

_BTF_MAGIC = b"\x9f\xeb"
_MAP_BYTES = 16 << 20
_BCC_LIMIT = 10.0
"""Seconds; the import takes 0.1 s from the page cache and several from a cold disk."""


def lockdown(machine: Machine) -> Answer:
    """The lockdown mode: confidentiality forbids programs to read kernel memory. Not mounted is unknown, never none."""
    text = machine.read(machine.sys / "kernel/security/lockdown")
    if text is None:
        if any(kind == "securityfs" for kind, _ in machine.mounts()):
            return Answer("yes", "this kernel has no lockdown")
        return Answer("unknown", "securityfs is not mounted", "mount -t securityfs securityfs /sys/kernel/security")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "confidentiality":
        remedy = "boot with lockdown=integrity, or accept that deaths of ranks are told without details"
        return Answer("no", "lockdown is confidentiality: programs may not read kernel memory, kprobes are off", remedy)
    if mode in ("none", "integrity"):
        return Answer("yes", f"lockdown is {mode}: it forbids nothing that is used")
    return Answer("unknown", f"lockdown reads {text!r}", "")


def btf(machine: Machine) -> Answer:
    """The kernel's description of its own structures; the offset of a task's tgid is taken from it."""
    path = machine.sys / "kernel/btf/vmlinux"
    try:
        with path.open("rb") as file:
            magic = file.read(2)
    except OSError as error:
        return Answer(
            "no", f"{path}: {refusal(error)}", "use a kernel with CONFIG_DEBUG_INFO_BTF; without it a dying rank is known by its pid only"
        )
    if magic not in (_BTF_MAGIC, _BTF_MAGIC[::-1]):
        return Answer("no", f"{path} is no BTF", "")
    return Answer("yes", f"{path} is there")


def kernel_headers(machine: Machine) -> Answer:
    """The headers that bcc would compile with."""
    try:
        source = headers.find(machine.header_setting, roots=machine.header_roots)
    except headers.HeadersError as error:
        return Answer("no", str(error), error.remedy)
    return Answer("yes", f"headers of {source.release} in {' and '.join(map(str, source.parts))}")


def bcc(machine: Machine) -> Answer:
    """Import bcc with the distribution's Python, which alone has it."""
    package = "apt-get install python3-bpfcc (PyPI's package bcc is something else)"
    command = [machine.system_python, "-I", "-c", "import bcc; print(bcc.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_BCC_LIMIT, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        return Answer("no", f"{machine.system_python}: {refusal(error)}", "set kernel.system_python to the distribution's Python 3")
    except subprocess.TimeoutExpired:
        return Answer("unknown", f"importing bcc took more than {_BCC_LIMIT:.0f} s", "try again when the host is less busy")
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Answer("no", f"{machine.system_python} cannot import bcc: {words[-1] if words else f'status {done.returncode}'}", package)
    return Answer("yes", f"{machine.system_python} has bcc {done.stdout.decode('ascii', 'replace').strip()}")


def perf_event_paranoid(machine: Machine) -> Answer:
    """Who may open perf events on other processes: Debian's level 3 leaves it to CAP_SYS_ADMIN, level 2 to CAP_PERFMON."""
    text = machine.read(machine.proc / "sys/kernel/perf_event_paranoid")
    mask = effective_capabilities(machine)
    if text is None or mask is None or not text.lstrip("-").isdigit():
        return Answer("unknown", f"kernel.perf_event_paranoid reads {text!r}", "mount procfs at /proc")
    needed = "CAP_SYS_ADMIN" if int(text) >= 3 else "CAP_PERFMON"
    if holds(mask, needed):
        return Answer("yes", f"kernel.perf_event_paranoid = {text}, and {needed} is held")
    remedy = f"give {needed}" + (", or sysctl kernel.perf_event_paranoid=2 and CAP_PERFMON" if int(text) >= 3 else "")
    return Answer("no", f"kernel.perf_event_paranoid = {text}, and {needed} is not held", remedy)


def memlock(machine: Machine) -> Answer:
    """Create a map of 16 MiB: kernels before 5.11 account it to RLIMIT_MEMLOCK."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "the memlock limit is unlimited" if limit == resource.RLIM_INFINITY else f"the memlock limit is {limit >> 10} KiB"
    try:
        os.close(machine.kernel.create_map(MAP_ARRAY, 4, _MAP_BYTES, 1))
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return Answer("no", f"{told}; creating a map of 16 MiB: {refusal(error)}", "raise MemoryMax= of the unit")
        remedy = "LimitMEMLOCK=infinity in the unit" if limit != resource.RLIM_INFINITY else "run as root with CAP_BPF"
        return Answer(denial(error), f"{told}; creating a map of 16 MiB: {refusal(error)}", remedy)
    return Answer("yes", f"{told}; a map of 16 MiB was created")


def cgroup_v2(machine: Machine) -> Answer:
    """The unified hierarchy with its controllers, by which a rank can be slowed; a hybrid set-up leaves them to version 1."""
    remedy = "boot with systemd.unified_cgroup_hierarchy=1; nothing of collectives or holds needs it"
    points = [point for kind, point in machine.mounts() if kind == "cgroup2"]
    if not points:
        return Answer("no", "no cgroup2 file system is mounted", remedy)
    root = machine.sys / "fs/cgroup" if points[0] == "/sys/fs/cgroup" else None
    text = machine.read(root / "cgroup.controllers") if root else ""
    if text is None:
        return Answer("unknown", f"{points[0]}/cgroup.controllers cannot be read", "")
    if "cpu" not in text.split():
        return Answer("no", f"cgroup2 is mounted at {points[0]}, but version 1 holds the cpu controller", remedy)
    return Answer("yes", f"{points[0]} has the controllers {text}")
