"""Runs a command as systemd/singularityd.service would, where no service manager runs: `python sandbox.py UNIT WRITABLE COMMAND...`

What of the unit is applied, read from the unit itself: limits, umask, the read-only file system with a private /tmp, the bounding set of
capabilities, NoNewPrivileges, MemoryDenyWriteExecute and SystemCallFilter (a call outside it kills, so that a test cannot overlook one).
Not applied: what needs a cgroup (memory, CPU, devices, addresses).
"""

from __future__ import annotations

import ctypes as c
import os
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
CAPABILITIES = Path("/usr/include/linux/capability.h")
NEWER = {"CAP_PERFMON": 38, "CAP_BPF": 39, "CAP_CHECKPOINT_RESTORE": 40}

libc = c.CDLL(None, use_errno=True)
libc.syscall.restype = c.c_long


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(c.get_errno(), f"{what}: {os.strerror(c.get_errno())}")


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        name, mark, value = line.partition("=")
        if mark and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def allowed_calls(words: list[str]) -> set[str]:
    """SystemCallFilter= as systemd merges it: the first line makes it an allow list, one with ~ takes away."""
    allowed: set[str] = set()
    for line in words:
        members: set[str] = set()
        for word in line.removeprefix("~").split():
            members |= group(word) if word.startswith("@") else {word}
        allowed = allowed - members if line.startswith("~") else allowed | members
    return allowed | group("@default")


def group(name: str) -> set[str]:
    told = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True).stdout
    members: set[str] = set()
    for word in re.sub(r"#.*", "", told.partition("\n")[2]).split():
        members |= group(word) if word.startswith("@") else {word}
    return members


def numbers(names: set[str]) -> list[int]:
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", NAMES.read_text())}
    return sorted(known[name] for name in names if name in known)


def mounts(writable: list[str]) -> None:
    check(libc.unshare(0x0002_0000), "unshare")
    check(libc.mount(None, b"/", None, c.c_ulong(16384 | 1 << 19), None), "slave")  # MS_REC | MS_SLAVE
    for place in writable:
        check(libc.mount(place.encode(), place.encode(), None, c.c_ulong(4096), None), place)
    for place, read_only in [("/", 1), *((place, 0) for place in ("/proc", "/dev", *writable)), ("/proc/sys", 1), ("/sys", 1)]:
        if place == "/proc/sys":
            check(libc.mount(place.encode(), place.encode(), None, c.c_ulong(4096), None), place)
        attribute = struct.pack("<QQQQ", read_only, 1 - read_only, 0, 0)
        recursive = 0x8000
        check(libc.syscall(442, -100, place.encode(), recursive, attribute, len(attribute)), f"mount_setattr {place}")
    checkout = os.open(ROOT, os.O_PATH)
    for place in (b"/tmp", b"/var/tmp"):
        check(libc.mount(b"tmpfs", place, b"tmpfs", c.c_ulong(0), None), "private tmp")
    if not ROOT.exists():  # a checkout below /tmp
        mask = os.umask(0o022)
        ROOT.mkdir(parents=True)
        os.umask(mask)
        check(libc.mount(f"/proc/self/fd/{checkout}".encode(), str(ROOT).encode(), None, c.c_ulong(4096), None), "checkout")
    os.close(checkout)


def limits(unit: dict[str, list[str]]) -> set[str]:
    """Raise them; where a container forbids it, the capability that stands in for the limit."""
    (nice,) = unit["LimitNICE"]
    assert unit["LimitMEMLOCK"] == ["infinity"]
    instead = set()
    for number, value, capability in ((13, 20 - int(nice), "CAP_SYS_NICE"), (8, resource.RLIM_INFINITY, "")):  # RLIMIT_NICE, RLIMIT_MEMLOCK
        try:
            resource.setrlimit(number, (value, value))
        except ValueError:
            instead.add(capability)
    return instead - {""}


def capabilities(kept: set[str]) -> None:
    known = {name: int(number) for name, number in re.findall(r"#define (CAP_\w+)\s+(\d+)\b", CAPABILITIES.read_text())} | NEWER
    for number in range(64):
        if number not in {known[name] for name in kept}:
            libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP; numbers above the last do not matter


def system_calls(unit: dict[str, list[str]]) -> None:
    allow, kill, deny = 0x7FFF_0000, 0x8000_0000, 0x0005_0001
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, 0xC000_003E), (0x06, 0, 0, kill), (0x20, 0, 0, 0)]
    for number in numbers(allowed_calls(unit["SystemCallFilter"])):
        code += [(0x15, 0, 1, number), (0x06, 0, 0, allow)]
    code.append((0x06, 0, 0, kill if os.environ.get("SANDBOX_MODE") != "deny" else deny))
    data = b"".join(struct.pack("<HBBI", *line) for line in code)
    buffer = c.create_string_buffer(data, len(data))

    class Program(c.Structure):
        _fields_ = (("length", c.c_ushort), ("code", c.c_void_p))

    program = Program(len(code), c.addressof(buffer))
    check(libc.syscall(317, 1, 0, c.byref(program)), "seccomp")


def main() -> None:
    unit, writable, command = settings(Path(sys.argv[1])), sys.argv[2].split(":"), sys.argv[3:]
    (mask,) = unit["UMask"]
    os.umask(int(mask, 8))
    kept = {word for line in unit["CapabilityBoundingSet"] for word in line.split()}
    if without := os.environ.get("SANDBOX_WITHOUT"):
        kept.remove(without)
    kept |= limits(unit)
    mounts(writable)
    os.chdir("/")
    capabilities(kept)
    check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    if unit["MemoryDenyWriteExecute"] == ["yes"]:
        check(libc.prctl(65, 1, 0, 0, 0), "PR_SET_MDWE")
    system_calls(unit)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
