"""The front's system call filter: what it denies, on both architectures, and that it lets the front work."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from singularityd import seccomp

KILL, ALLOW, EPERM, ENOSYS = 0x8000_0000, 0x7FFF_0000, 0x0005_0001, 0x0005_0026
CLONE_NEWUSER, CLONE_THREAD_FLAGS = 0x1000_0000, 0x003D_0F00
HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), "aarch64": Path("/usr/include/asm-generic/unistd.h")}


@functools.cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", seccomp.program(machine)))


def answer(machine: str, number: int, argument: int = 0, audit: int | None = None) -> int:
    """What the kernel would do: a small interpreter of the five instructions that the filter has."""
    code = instructions(machine)
    data = {0: number, 4: seccomp.MACHINES[machine].audit if audit is None else audit, 16: argument}
    at, value = 0, 0
    while True:
        kind, yes, no, operand = code[at]
        if kind == 0x06:
            return operand
        if kind == 0x20:
            value = data[operand]
            at += 1
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
        at += 1 + (yes if holds else no)


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_what_is_denied_and_what_is_not(machine: str) -> None:
    for name in seccomp.DENIED:
        number = seccomp.number(name, machine)
        assert number is None or answer(machine, number) == EPERM, name
    denied = {seccomp.number(name, machine) for name in [*seccomp.DENIED, "bpf", "clone", "clone3"]}
    for number in set(range(480)) - denied:
        assert answer(machine, number) == ALLOW, number
    assert answer(machine, 0, audit=0x4000_0003) == KILL
    assert answer(machine, 0, audit=0) == KILL


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_threads_start_and_namespaces_do_not(machine: str) -> None:
    clone = seccomp.number("clone", machine)
    assert clone is not None
    assert answer(machine, clone, CLONE_THREAD_FLAGS) == ALLOW
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert answer(machine, clone, CLONE_THREAD_FLAGS | 1 << bit) == EPERM
    assert answer(machine, seccomp.number("clone3", machine) or 0) == ENOSYS


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_tables_of_the_kernel_are_read_and_nothing_else(machine: str) -> None:
    bpf = seccomp.number("bpf", machine)
    assert bpf is not None
    assert [command for command in range(64) if answer(machine, bpf, command) == ALLOW] == [1, 4, 15, 24]


def test_the_other_numbering_of_x86_is_no_way_around() -> None:
    assert answer("x86_64", 0x4000_0000 + 101) == EPERM
    assert answer("x86_64", 0x4000_0000) == EPERM


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"no {HEADERS[machine]}: install linux-libc-dev")
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())}
    for name in [*seccomp.DENIED, "bpf", "clone", "clone3", "seccomp"]:
        number = seccomp.number(name, machine)
        assert known.get(name) == number or (number is None and name not in known), name


def test_an_architecture_without_numbers_is_refused_and_not_left_open() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program("riscv64")


IN_A_PROCESS = """
import ctypes, json, os, sqlite3, subprocess, sys, threading
from singularityd import seccomp
early = threading.Event()
said = []
def old():
    early.wait()
    said.append(open("/proc/thread-self/status").read())
thread = threading.Thread(target=old)
thread.start()
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
seccomp.install()
early.set()
thread.join()
libc.syscall.restype = ctypes.c_long
machine = os.uname().machine
errnos = {}
for name in seccomp.DENIED:
    number = seccomp.number(name, machine)
    if number is not None:
        ctypes.set_errno(0)
        errnos[name] = (libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno())
def starts():
    try:
        subprocess.run(["/bin/true"])
        return True
    except PermissionError:
        return False
worked = []
threading.Thread(target=lambda: worked.append(1)).start()
sqlite3.connect(":memory:").execute("create table t (a)")
pid = os.fork()
if not pid:
    os._exit(3)
child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps({"errnos": errnos, "starts": starts(), "worked": worked, "child": child,
    "status": open("/proc/self/status").read(), "older thread": said[0]}))
"""


@pytest.mark.skipif(platform.machine() not in seccomp.MACHINES, reason="the daemon supports x86-64 and aarch64")
def test_in_a_process_with_threads() -> None:
    run = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    got = json.loads(run.stdout)
    assert {name: tuple(pair) for name, pair in got["errnos"].items()} == dict.fromkeys(got["errnos"], (-1, 1))
    assert len(got["errnos"]) > 50
    assert got["starts"] is False
    assert (got["worked"], got["child"]) == ([1], 3)
    for status in (got["status"], got["older thread"]):
        assert "\nSeccomp:\t2\n" in status
