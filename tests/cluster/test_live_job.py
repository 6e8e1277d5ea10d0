"""A live, unmodified gloo job: it is seen, counted exactly, held at one rank, and unharmed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from conftest import BIN, Daemon, Job, threads_run, until

Start = Callable[..., Job]


def all_ranks(daemon: Daemon, job: Job, expected: list[int], seconds: float = 90) -> dict[int, dict]:
    """The job's ranks, once all of them are known."""

    def known() -> dict[int, dict] | None:
        found = daemon.ranks(job.job)
        return found if sorted(found) == expected else None

    return until(known, seconds)


def test_a_job_that_ran_before_the_daemon_is_listed_within_seconds(jobs: Start) -> None:
    job = jobs("steps.py")
    until(lambda: len(job.steps(3)) > 3, 90)
    late = Daemon().start()
    try:
        began = time.monotonic()
        ranks = all_ranks(late, job, [0, 1, 2, 3], 30)

        assert time.monotonic() - began < 30
        assert {row["world"] for row in ranks.values()} == {4}
        assert all(row["libraries"][0]["backend"] == "gloo" and row["libraries"][0]["sites"] > 0 for row in ranks.values())
        until(lambda: late.metric("singularity_collective_calls_total", job_id=job.job, op="allreduce", rank="2") > 0, 30)
    finally:
        assert late.stop() == 0
    assert len(job.steps(3)) > 3
    assert job.process.poll() is None


def test_counts_and_bytes_are_exact(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py", "--steps", "53", "--pause", "0", "--gate", "--elements", "750")
    job.go(daemon)
    assert job.process.wait(120) == 0, job.log.read_text()

    for rank in "0123":
        labels = {"job_id": job.job, "rank": rank, "op": "allreduce", "result": "ok", "backend": "gloo"}
        assert daemon.metric("singularity_collective_calls_total", **labels) == 53
        assert daemon.metric("singularity_collective_bytes_total", **labels) == 53 * 750 * 4
        assert daemon.metric("singularity_collective_seconds_count", job_id=job.job, rank=rank, op="allreduce") == 53


def test_one_rank_is_held_until_the_deadline_and_the_others_wait(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py")
    until(lambda: sorted(daemon.ranks(job.job)) == [0, 1, 2, 3] and len(job.steps(0)) > 5, 90)

    done = daemon.ctl("inject", "--rank", "3", "--job", job.job, "timeout", "--for", "3s", "--wait")

    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        longest = until(lambda rank=rank: max(step["seconds"] for step in job.steps(rank)) > 2.5 and job.steps(rank), 20)
        assert sum(step["seconds"] > 2.5 for step in longest) == 1
    assert [event["rank"] for event in daemon.events("fault_held")][-1:] == [3]
    assert daemon.metric("singularity_fault_hits_total", rank="3") >= 1
    seen = len(job.steps(3))
    until(lambda: len(job.steps(3)) > seen + 10, 20)
    assert all(threads_run(row["pid"]) for row in daemon.ranks(job.job).values())


def test_a_rank_that_is_not_there_is_named_with_those_that_are(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py")
    until(lambda: sorted(daemon.ranks(job.job)) == [0, 1, 2, 3], 90)

    done = daemon.ctl("inject", "--rank", "7", "--job", job.job, "timeout")

    assert done.returncode == 3
    assert "ranks 0-3" in done.stderr


def test_a_peers_death_under_probes_stays_a_catchable_error(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py", plain=True)
    ranks = all_ranks(daemon, job, [0, 1, 2, 3], 90)
    until(lambda: len(job.steps(0)) > 5, 60)

    os.kill(ranks[2]["pid"], signal.SIGKILL)

    until(lambda: any(line.get("caught") == "RuntimeError" for line in job.lines()), 30)
    until(lambda: any(event["pid"] == ranks[2]["pid"] for event in daemon.events("rank_dying")), 20)
    until(lambda: any(event["pid"] == ranks[2]["pid"] and "SIGKILL" in event["text"] for event in daemon.events("rank_exited")), 20)


def test_stop_and_continue_are_told(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py", ranks=2)
    ranks = all_ranks(daemon, job, [0, 1], 90)
    pid = ranks[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: any(event["pid"] == pid for event in daemon.events("rank_stopped")), 20)
    os.kill(pid, signal.SIGCONT)
    until(lambda: any(event["pid"] == pid for event in daemon.events("rank_continued")), 20)


def test_a_held_rank_goes_on_when_either_half_is_killed(jobs: Start) -> None:
    job = jobs("steps.py", ranks=2)
    for victim in ("front", "pid"):
        own = Daemon().start()
        try:
            until(lambda own=own: sorted(own.ranks(job.job)) == [0, 1] and len(job.steps(0)) > 5, 90)
            ranks = own.ranks(job.job)
            assert own.ctl("inject", "--rank", "1", "--job", job.job, "timeout", "--for", "50s").returncode == 0
            until(lambda own=own: own.events("fault_held"), 20)
            seen = len(job.steps(0))

            os.kill(getattr(own, victim), signal.SIGKILL)

            until(lambda seen=seen: len(job.steps(0)) > seen + 10, 15)
            assert all(threads_run(row["pid"]) for row in ranks.values())
            if victim == "front":
                until(lambda own=own: own.ctl("status").returncode == 0 and sorted(own.ranks(job.job)) == [0, 1], 30)
                history = own.json("faults", "--history")["faults"]
                assert [fault["state"] for fault in history] == ["ended"]
        finally:
            own.stop()


def test_a_second_daemon_is_refused(daemon: Daemon) -> None:
    done = subprocess.run([str(BIN / "singularityd")], env=daemon.environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 69
    assert str(daemon.pid) in done.stderr


def test_the_front_has_no_privilege_and_the_executor_no_network(daemon: Daemon) -> None:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{daemon.front}/status").read_text().splitlines() if ":\t" in line)
    assert status["Uid"].split()[0] != "0"
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"


def test_a_directory_the_front_cannot_reach_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    environment = dict(os.environ, SINGULARITYD_RUNTIME_DIR=str(closed / "run"), SINGULARITYD_STATE_DIR=str(closed / "state"))
    done = subprocess.run([str(BIN / "singularityd")], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 77
    assert "singularityd" in done.stderr
    assert "lets nobody else in" in done.stderr
