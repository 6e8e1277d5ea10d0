"""Capabilities and headers on the kernel at hand: what it says, how long it takes, and that nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from singularityd.kernel import capabilities, headers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def found() -> dict[str, capabilities.Found]:
    return {item.name: item for item in capabilities.probe_all()}


@pytest.mark.parametrize("name", ["ring_buffer", "uprobe", "attach_cookie", "raw_tracepoint", "kernel_headers", "bcc", "signal_helper"])
def test_what_the_daemon_cannot_do_without(found: dict[str, capabilities.Found], name: str) -> None:
    assert found[name].state == "yes", found[name]


def test_each_answer_is_complete_and_fits_its_message(found: dict[str, capabilities.Found]) -> None:
    assert len(found) == len(capabilities.CHECKS)
    for item in found.values():
        assert item.state in {"yes", "no", "unknown"}
        assert item.detail, item
        assert item.remedy or item.state == "yes", item
        assert len(item.detail.encode()) < 512, item
        assert len(item.remedy.encode()) < 512, item
        assert "check itself failed" not in item.detail, item


def test_register_write_agrees_with_a_second_way(found: dict[str, capabilities.Found], tmp_path: Path) -> None:
    """bcc compiles the same write and is told the same."""
    code = (
        "from bcc import BPF\n"
        "b = BPF(text='#include <uapi/linux/ptrace.h>\\nint f(struct pt_regs *ctx) { ctx->ax = 7; return 0; }')\n"
        "b.load_func('f', BPF.KPROBE)\n"
    )
    tree = headers.prepare("", tmp_path)
    done = subprocess.run(
        [SYSTEM_PYTHON, "-I", "-c", code],
        env={"BCC_KERNEL_SOURCE": str(tree.path), "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
    )

    loads = done.returncode == 0
    if found["register_write"].state == "yes":
        assert loads
    elif not loads:
        assert b"invalid bpf_context access" in done.stderr
        assert "EACCES: invalid bpf_context access" in found["register_write"].detail


def test_quick_and_leaves_nothing_behind() -> None:
    code = (
        "import os, time\n"
        "from singularityd.kernel import capabilities\n"
        "capabilities.probe_all()\n"
        "before = os.listdir('/proc/self/fd'), os.listdir('/proc/self/map_files')\n"
        "start = time.perf_counter()\n"
        "capabilities.probe_all()\n"
        "took = time.perf_counter() - start\n"
        "assert before == (os.listdir('/proc/self/fd'), os.listdir('/proc/self/map_files'))\n"
        "try:\n"
        "    raise SystemExit(f'child left: {os.waitpid(-1, os.WNOHANG)}')\n"
        "except ChildProcessError:\n"
        "    print(took)\n"
    )
    took = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(Path(headers.__file__).parents[2])},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        took.append(float(done.stdout))

    assert min(took) < 1.5, took


def test_ptrace_leaves_no_process() -> None:
    before = set(filter(str.isdigit, os.listdir("/proc")))
    assert capabilities.processes.ptrace(capabilities.Machine()).state == "yes"
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    text = children.read_text() if children.exists() else ""

    assert not set(text.split()) - before


def test_without_privileges_everything_is_told_and_nothing_raised() -> None:
    code = (
        "import os\n"
        "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "for item in capabilities.probe_all(): print(item.name, item.state, item.detail)\n"
    )
    source = str(Path(headers.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"from singularityd.kernel import capabilities\n{code}"],
        env={"PYTHONPATH": source},
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    for name in ("privileges", "ring_buffer", "uprobe", "raw_tracepoint", "map_files", "perf_event_paranoid"):
        assert states[name] == "no", done.stdout
    assert "CAP_BPF" in done.stdout
    assert "check itself failed" not in done.stdout


def test_installed_headers_merge_quickly_and_compile(tmp_path: Path) -> None:
    start = time.perf_counter()
    tree = headers.prepare("", tmp_path)
    took = time.perf_counter() - start

    program = "#include <uapi/linux/ptrace.h>\nint f(struct pt_regs *ctx) { return 0; }"
    code = f"from bcc import BPF; BPF(text={program!r}).load_func('f', BPF.KPROBE)"
    environment = {"BCC_KERNEL_SOURCE": str(tree.path), "BCC_LINUX_VERSION_CODE": str(tree.version_code), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([SYSTEM_PYTHON, "-I", "-c", code], env=environment, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert took < 0.5
