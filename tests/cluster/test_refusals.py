"""What cannot or must not be done to a rank is refused by name, and leaves the rank running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BIN, JOBS, Daemon, Job, free_port, threads_run, until

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    running = Job(tmp_path_factory.mktemp("job"), JOBS / "steps.py", ranks=2)
    yield running
    running.stop()


@pytest.fixture
def ranks(daemon: Daemon, job: Job) -> dict[int, dict]:
    def known() -> dict[int, dict] | None:
        found = daemon.ranks(job.job)
        return found if sorted(found) == [0, 1] and len(job.steps(0)) > 3 else None

    return until(known, 90)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--rank", "5", "timeout"), 3, "ranks 0-1"),
        (("--rank", "1", "timeoot"), 2, "timeout"),
        (("--rank", "1", "timeout", "pont=allreduce"), 2, "point"),
        (("--rank", "1", "timeout", "point=alreduce"), 2, "allreduce"),
        (("--rank", "1", "timeout", "probability=0%"), 2, "probability"),
        (("--rank", "1", "timeout", "probability=101%"), 2, "probability"),
        (("--rank", "1", "timeout", "ms=-5"), 2, "ms"),
        (("--rank", "1", "timeout", "--for", "5"), 2, "5s"),
        (("--rank", "1", "timeout", "--for", "-5s"), 2, "longer than 0"),
        (("--rank", "1", "timeout", "--for", "5parsecs"), 2, "5parsecs"),
        (("--rank", "1", "timeout", "--for", "3h"), 2, "3h"),
        (("--rank", "1", "timeout", "--for", "90s"), 1, "faults.max_duration"),
        (("--rank", "1", "timeout", "point=reduce_scatter"), 1, "no reduce_scatter call of process"),
        (("--rank", "-1", "timeout"), 2, "rank"),
        (("timeout",), 2, "--rank"),
    ],
)
def test_bad_requests(daemon: Daemon, job: Job, ranks: dict, words: tuple[str, ...], code: int, said: str) -> None:
    done = daemon.ctl("inject", "--job", job.job, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert daemon.json("faults")["faults"] == []


def test_an_unknown_job_is_named_with_those_there_are(daemon: Daemon, job: Job, ranks: dict) -> None:
    done = daemon.ctl("inject", "--job", "nobody", "--rank", "1", "timeout")
    assert done.returncode == 3
    assert job.job in done.stderr


@pytest.mark.parametrize("tracer", [["gdb", "-nx", "-batch", "-ex", "shell sleep 60", "-p"], ["strace", "-f", "-o", "/dev/null", "-p"]])
def test_a_rank_that_another_tracer_has_is_refused_by_the_tracers_name(daemon: Daemon, job: Job, ranks: dict, tracer: list[str]) -> None:
    pid = ranks[1]["pid"]
    other = subprocess.Popen([*tracer, str(pid)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text(), 60)
        done = daemon.ctl("inject", "--job", job.job, "--rank", "1", "timeout")
        assert done.returncode == 1
        assert tracer[0] in done.stderr
    finally:
        other.send_signal(signal.SIGINT if tracer[0] == "strace" else signal.SIGKILL)
        other.wait(30)
    until(lambda: threads_run(pid), 20)


def test_waiting_for_a_call_that_is_never_made_says_so(daemon: Daemon, job: Job, ranks: dict) -> None:
    done = daemon.ctl("inject", "--job", job.job, "--rank", "1", "timeout", "point=broadcast", "--for", "1s", "--wait")
    assert done.returncode == 5
    assert "0 hits" in done.stdout + done.stderr


def test_clear_lets_go_at_once_and_a_second_fault_is_refused_meanwhile(daemon: Daemon, job: Job, ranks: dict) -> None:
    assert daemon.ctl("inject", "--job", job.job, "--rank", "1", "timeout", "--for", "50s").returncode == 0
    second = daemon.ctl("inject", "--job", job.job, "--rank", "1", "timeout")
    assert second.returncode == 1
    assert "clear" in second.stderr
    until(lambda: daemon.metric("singularity_collective_oldest_in_flight_seconds", job_id=job.job, rank="0") > 1, 20)
    seen = len(job.steps(0))

    assert daemon.ctl("clear", "all").returncode == 0

    until(lambda: len(job.steps(0)) > seen + 5, 10)
    assert threads_run(ranks[1]["pid"])
    assert daemon.json("faults")["faults"] == []


def test_without_a_daemon_the_exit_code_is_4(tmp_path: Path) -> None:
    environment = dict(os.environ, SINGULARITYD_RUNTIME_DIR=str(tmp_path))
    done = subprocess.run([str(BIN / "singularityctl"), "status"], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 4
    assert "is singularityd running?" in done.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("kernel.headers=/var/empty-headers", "kernel.headers"),
        ("kernel.system_python=/nonexistent/python", "system_python"),
        (f"kernel.system_python={sys.executable}", "python3-bpfcc"),  # a Python without bcc
    ],
)
def test_a_daemon_that_cannot_load_says_what_to_install(setting: str, said: str) -> None:
    place = Path(tempfile.mkdtemp(prefix="singularity-test-"))
    place.chmod(0o755)
    environment = dict(os.environ, SINGULARITYD_RUNTIME_DIR=str(place / "run"), SINGULARITYD_STATE_DIR=str(place / "state"))
    words = [str(BIN / "singularityd"), f"--set={setting}", f"--set=metrics.port={free_port()}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    shutil.rmtree(place)
    assert done.returncode == 69, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_settings_are_refused_all_at_once() -> None:
    words = [str(BIN / "singularityd"), "--set=kernel.gard=true", "--set=metrics.prt=1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 78
    assert "guard" in done.stderr
    assert "port" in done.stderr


def test_another_user_is_told_to_be_root() -> None:
    done = subprocess.run([str(BIN / "singularityd")], user=65534, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 77
    assert "root" in done.stderr


def test_sigterm_while_starting_leaves_nothing(tmp_path: Path) -> None:
    for pause in (0.3, 0.8, 1.5, 2.5):
        starting = Daemon()
        environment = starting.environment
        process = subprocess.Popen(
            [str(BIN / "singularityd"), f"--set=metrics.port={starting.port}"], env=environment, stderr=subprocess.DEVNULL
        )
        time.sleep(pause)
        process.terminate()
        assert process.wait(20) in (0, -signal.SIGTERM)
        left = subprocess.run(["pgrep", "-f", str(starting.runtime)], capture_output=True, text=True, check=False).stdout.split()
        assert left == []
        shutil.rmtree(starting.place)
