"""The demonstration's own parts: what it reads, how it ends what it started, and that it fails when a step does not happen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "demo"))

import reading  # noqa: E402
import run  # noqa: E402
from processes import Process, Processes, until  # noqa: E402
from reading import Outcome, Step  # noqa: E402

PAGE = """\
# TYPE singularity_collective_calls_total counter
singularity_collective_calls_total{job_id="demo",rank="0",op="allreduce",result="ok"} 12
singularity_collective_calls_total{job_id="demo",rank="1",op="allreduce",result="ok"} 11
singularity_collective_calls_total{job_id="demo",rank="1",op="broadcast",result="ok"} 99
singularity_collective_calls_total{job_id="other",rank="2",op="allreduce",result="ok"} 5
singularity_collective_calls_total{job_id="demo",rank="unknown",op="allreduce",result="ok"} 7
# TYPE singularity_collective_oldest_in_flight_seconds gauge
singularity_collective_oldest_in_flight_seconds{job_id="demo",rank="0",op="allreduce"} 3.5
singularity_collective_oldest_in_flight_seconds{job_id="demo",rank="0",op="broadcast"} 1.5
"""


def test_values_by_rank_of_one_job() -> None:
    page = reading.Page(PAGE)

    assert page.by_rank(reading.CALLS, "demo", op="allreduce") == {0: 12.0, 1: 11.0}
    assert page.by_rank(reading.OLDEST, "demo") == {0: 3.5}
    assert page.by_rank(reading.OLDEST, "nobody") == {}
    assert reading.Page("").by_rank(reading.CALLS, "demo") == {}


def test_excerpt_reads_like_the_page() -> None:
    first = reading.Page(PAGE).excerpt(reading.CALLS, "demo", 1)

    assert first == ['singularity_collective_calls_total{job_id="demo",op="allreduce",rank="0",result="ok"} 12']


def test_progress_is_read_from_among_other_output() -> None:
    lines = (
        "W1201 torchrun says",
        '{"step": 0, "loss": 5.5, "seconds": 0.3}',
        "[1]",
        '{"step": 1, "loss": 5.2, "seconds": 8.1}',
        '{"step": 2, "lo',
    )
    text = "\n".join(lines)

    assert reading.steps(text) == [Step(0, 5.5, 0.3), Step(1, 5.2, 8.1)]
    assert reading.calls('{"nccl": "2.32.3"}\n{"call": 3, "result": 4, "seconds": 5.0}') == [reading.Call(3, 4, 5.0)]


@given(st.text())
def test_no_output_breaks_the_reading(text: str) -> None:
    assert isinstance(reading.json_lines(text), list)
    assert isinstance(reading.ranks(text), list)


def test_job_is_the_one_of_our_processes() -> None:
    rows = [
        {"pid": 10, "rank": 0, "job": "theirs"},
        {"pid": 11, "rank": 1, "job": "theirs"},
        {"pid": 20, "rank": 0, "job": "ours"},
        {"pid": 21, "rank": 1, "job": "ours"},
        {"pid": 22, "rank": None, "job": "ours"},
    ]

    assert reading.job_with_ranks(rows, range(2), [20, 21, 22]) == "ours"
    assert reading.job_with_ranks(rows, range(3), [20, 21, 22]) == ""
    assert reading.job_with_ranks(rows, range(2), [20]) == ""


@pytest.mark.parametrize("text", ['[{"rank": 1}]', '{"ranks": [{"rank": 1}]}'])
def test_ranks_as_a_list_or_under_their_name(text: str) -> None:
    assert reading.ranks(text) == [{"rank": 1}]


def test_longest_of_the_new_steps() -> None:
    before = [Step(0, 5.0, 20.0)]

    assert reading.longest(before, [*before, Step(1, 4.9, 0.2), Step(2, 4.8, 8.2)]) == Step(2, 4.8, 8.2)
    assert reading.longest(before, before) is None


def test_loss_falls() -> None:
    falling = [Step(number, 5.0 - number / 10, 0.2) for number in range(20)]

    assert reading.loss_falls(falling)
    assert not reading.loss_falls(falling[::-1])
    assert not reading.loss_falls(falling[:3])


@given(st.lists(st.builds(Outcome, st.text(max_size=24), st.text(max_size=120), st.text(max_size=120), st.booleans()), max_size=5))
def test_summary_fits_100_columns(rows: list[Outcome]) -> None:
    plain = [Outcome(*(" ".join(cell.split()) for cell in row[:3]), row.ok) for row in rows]

    assert all(len(line) <= reading.WIDTH for line in reading.table(plain).split("\n"))


def test_summary_says_no() -> None:
    assert reading.table([Outcome("fault hit", "1 hit", "0 hits", False)]).splitlines()[-1].split()[-1] == "NO"


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path, {})


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_everything_is_ended_even_children_in_sessions_of_their_own(processes: Processes) -> None:
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = processes.start("parent", [sys.executable, "-c", code])
    child = int(until(10, lambda: parent.text.strip()) or 0)
    assert alive(child)

    processes.end()

    assert not alive(parent.pid)
    assert until(5, lambda: not alive(child))


def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(60)"
    process = Process("deaf", [sys.executable, "-c", code], tmp_path / "log", {})
    assert until(10, lambda: "deaf" in process.text)

    process.end(seconds=0.3)

    assert process.code == -9


def test_until_gives_up() -> None:
    begun = time.monotonic()

    assert until(0.3, lambda: None, every=0.05) is None
    assert time.monotonic() - begun < 5


def test_daemon_of_the_demonstration_shares_nothing(tmp_path: Path) -> None:
    environment = run.settings(tmp_path, 12345)

    assert all(value.startswith(str(tmp_path)) for value in environment.values())
    assert "port = 12345" in Path(environment["SINGULARITYD_CONFIG"]).read_text()


FAKE_DAEMON = "#!/bin/sh\necho 'singularityd: cannot load the probes' >&2\nexit 69\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="the demonstration wants root")
def test_a_step_that_does_not_happen_fails_the_demonstration(tmp_path: Path) -> None:
    for name in ("singularityd", "singularityctl"):
        (tmp_path / name).write_text(FAKE_DAEMON)
        (tmp_path / name).chmod(0o755)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'demo')!r}); import run; from pathlib import Path\n"
        f"run.BIN, run.CONTROL = Path({str(tmp_path)!r}), {str(tmp_path / 'singularityctl')!r}; sys.exit(run.main())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    assert done.returncode == 1
    assert "cannot load the probes" in done.stdout
    assert "daemon ready" in done.stdout
    assert "NOT every step happened" in done.stdout


def test_nccl_answers_invalid_argument_without_a_gpu() -> None:
    pytest.importorskip("nvidia.nccl")
    command = [sys.executable, str(ROOT / "demo/nccl_caller.py"), "--json", "--seconds", "0.5", "--interval", "0.05"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["nccl"].startswith("2.")
    made = reading.calls(done.stdout)
    assert len(made) >= 2
    assert {call.result for call in made} == {4}
