"""Other tools on the same functions and processes: they see what they would see without us, and so do we."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Daemon, until
from workshop import Caller, Workshop


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Starts bpftrace with a program; returns its output's file once it is attached."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(program: str) -> Path:
        log = tmp_path / f"bpftrace{len(started)}.log"
        with log.open("wb") as out:
            started.append((subprocess.Popen(["bpftrace", "-e", program], stdout=out, stderr=out), log))
        until(lambda: b"Attaching" in log.read_bytes(), 60)
        time.sleep(2)
        return log

    yield start
    for process, _ in started:
        process.send_signal(2)
        process.wait(30)


def counted(log: Path) -> dict[int, int]:
    return {int(value): int(count) for value, count in re.findall(r"@returned\[(-?\d+)\]: (\d+)", log.read_text())}


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_return_probe_of_another_tool_sees_the_injected_results(
    daemon: Daemon, workshop: Workshop, watch: Callable[[str], Path], first: str, tmp_path: Path
) -> None:
    """The stack slot of the return address holds the kernel's trampoline then: a frame that is popped by hand would be torn."""
    library = workshop.library()
    program = f"uretprobe:{library}:ncclAllReduce {{ @returned[(int32)retval] = count(); }} interval:s:1 {{ print(@returned); }}"
    if first == "theirs":
        log = watch(program)
    started = workshop.call(library, 300, pause=0.001)
    until(lambda: any(row["job"] == started.job and row["libraries"] for row in daemon.json("ranks")["ranks"]), 60)
    if first == "ours":
        log = watch(program)
    words = ("error", "code=ncclRemoteError", "probability=40%", "seed=3", "--for", "50s")
    assert daemon.ctl("inject", "--job", started.job, "--rank", "0", *words).returncode == 0

    (results,) = workshop.done(started)

    del results["longest"]
    assert set(results.values()) == {6}
    until(lambda: counted(log) == {0: 300 - len(results), 6: len(results)}, 10)
    assert daemon.metric("singularity_collective_calls_total", job_id=started.job, result="remote_error") == len(results)
    assert daemon.metric("singularity_fault_hits_total", job_id=started.job) == len(results)
    daemon.ctl("clear", "all")


def stacks_by(tool: str, caller: Caller, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    words = {
        "gdb": ["gdb", "-nx", "-batch", "-ex", "bt", "-p", str(caller.pid)],
        "strace": ["timeout", "-s", "INT", "1", "strace", "-f", "-o", str(tmp_path / "strace"), "-p", str(caller.pid)],
    }[tool]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("tool", ["gdb", "strace"])
def test_a_tracer_may_come_and_go_while_nothing_is_armed(daemon: Daemon, workshop: Workshop, tool: str, tmp_path: Path) -> None:
    assert shutil.which(tool), f"{tool} is missing: tools/setup.sh installs it"
    started = workshop.call(workshop.library(), 400, pause=0.01)
    workshop.begin(started)
    time.sleep(0.5)
    done = stacks_by(tool, started, tmp_path)
    assert done.returncode in (0, 124), done.stderr
    assert workshop.results(started).keys() == {"longest"}
    assert daemon.metric("singularity_collective_calls_total", job_id=started.job, result="ok") == 400


@pytest.mark.parametrize("tool", ["gdb", "strace"])
def test_a_tracer_that_comes_while_a_fault_is_armed_is_told_so_by_the_kernel(
    daemon: Daemon, workshop: Workshop, tool: str, tmp_path: Path
) -> None:
    started = workshop.call(workshop.library(), 600, pause=0.01)
    workshop.begin(started)
    assert daemon.ctl("inject", "--job", started.job, "--rank", "0", "delay", "ms=20", "--for", "50s").returncode == 0
    done = stacks_by(tool, started, tmp_path)
    assert "ptrace" in (done.stdout + done.stderr).lower()
    assert daemon.ctl("clear", "all").returncode == 0
    assert workshop.results(started).keys() == {"longest"}
    assert daemon.metric("singularity_collective_calls_total", job_id=started.job, result="ok") == 600
