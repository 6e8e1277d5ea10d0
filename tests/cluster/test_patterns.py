"""Each pattern does what it says to the rank it names, for as long as it says, and leaves it running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from conftest import Daemon, Job, threads_run, until
from workshop import Caller, Workshop

Start = Callable[..., Job]


def inject(daemon: Daemon, caller: Caller, *words: str) -> None:
    done = daemon.ctl("inject", "--job", caller.job, "--rank", "0", *words)
    assert done.returncode == 0, done.stderr


def watched(daemon: Daemon, caller: Caller) -> None:
    until(lambda: any(row["job"] == caller.job and row["libraries"] for row in daemon.json("ranks")["ranks"]), 60)


@pytest.fixture
def caller(daemon: Daemon, workshop: Workshop) -> Callable[..., Caller]:
    """A caller that the daemon watches and that has not begun."""

    def start(calls: int, **options: float) -> Caller:
        started = workshop.call(workshop.library(), calls, **options)
        watched(daemon, started)
        return started

    return start


@pytest.fixture
def endless(caller: Callable[..., Caller], workshop: Workshop) -> Caller:
    started = caller(1_000_000, pause=0.005)
    workshop.begin(started)
    return started


@pytest.fixture(autouse=True)
def nothing_left(daemon: Daemon) -> Iterator[None]:
    yield
    daemon.ctl("clear", "all")


def test_error_after_and_count_are_exact(daemon: Daemon, caller: Callable[..., Caller], workshop: Workshop) -> None:
    started = caller(60)
    inject(daemon, started, "error", "code=ncclRemoteError", "after=10", "count=7")
    (results,) = workshop.done(started)
    del results["longest"]
    assert results == {str(number): 6 for number in range(10, 17)}
    labels = {"job_id": started.job, "op": "allreduce"}
    assert daemon.metric("singularity_collective_calls_total", **labels, result="remote_error") == 7
    assert daemon.metric("singularity_collective_calls_total", **labels, result="ok") == 53
    assert daemon.metric("singularity_fault_hits_total", job_id=started.job) == 7


def test_probability_is_a_share_and_its_seed_chooses_the_same_calls(
    daemon: Daemon, caller: Callable[..., Caller], workshop: Workshop
) -> None:
    found = []
    for seed in (5, 5, 6):
        started = caller(10_000, pause=0.0001)
        inject(daemon, started, "error", "probability=10%", f"seed={seed}", "--for", "50s")
        (results,) = workshop.done(started)
        del results["longest"]
        assert 900 <= len(results) <= 1100  # 1000 +- 3.3 standard deviations of 30
        assert daemon.metric("singularity_fault_hits_total", job_id=started.job) == len(results)
        found.append(results)
        daemon.ctl("clear", "all")
        workshop.end()
    assert found[0] == found[1]
    assert found[0].keys() != found[2].keys()


@pytest.mark.parametrize(("words", "code"), [((), 8), (("code=ncclSystemError",), 2), (("code=-ETIMEDOUT",), 8)])
def test_timeout_that_returns(daemon: Daemon, caller: Callable[..., Caller], workshop: Workshop, words: tuple[str, ...], code: int) -> None:
    started = caller(5)
    inject(daemon, started, "timeout", "mode=return", "ms=300", "count=1", *words)
    (results,) = workshop.done(started)
    assert results.pop("longest") >= 300_000
    assert results == {"0": code}


def test_timeout_returns_at_the_deadline_and_not_when_cleared(daemon: Daemon, caller: Callable[..., Caller], workshop: Workshop) -> None:
    for clear in (False, True):
        started = caller(3)
        inject(daemon, started, "timeout", "mode=return", "count=1", "--for", "50s" if clear else "1s")
        workshop.begin(started)
        until(lambda started=started: any(event["pid"] == started.pid for event in daemon.events("fault_held")), 20)
        if clear:
            assert daemon.ctl("clear", "all").returncode == 0
        results = workshop.results(started)
        del results["longest"]
        assert results == ({} if clear else {"0": 8})


def test_delay(daemon: Daemon, caller: Callable[..., Caller], workshop: Workshop) -> None:
    started = caller(20)
    began = time.monotonic()
    inject(daemon, started, "delay", "ms=50", "--for", "20s")
    (results,) = workshop.done(started)
    assert results.pop("longest") >= 50_000
    assert results == {}
    assert time.monotonic() - began >= 20 * 0.05


def test_kill_at_the_call_that_was_named(daemon: Daemon, caller: Callable[..., Caller], workshop: Workshop) -> None:
    started = caller(100, pause=0.002)
    inject(daemon, started, "kill", "after=20", "--for", "20s")
    workshop.begin(started)
    assert started.process.wait(30) == -signal.SIGKILL
    until(lambda: any(event["pid"] == started.pid and "SIGKILL" in event["text"] for event in daemon.events("rank_exited")), 20)
    assert daemon.metric("singularity_collective_calls_total", job_id=started.job) == 20
    (fault,) = [fault for fault in daemon.json("faults", "--history")["faults"] if fault["pid"] == started.pid]
    assert (fault["hits"], fault["mechanism"], fault["ending"]) == (1, "signal", "rank exited")


def test_kill_that_never_hits_ends_at_its_deadline(daemon: Daemon, endless: Caller) -> None:
    inject(daemon, endless, "kill", "after=1000000", "--for", "500ms")
    until(lambda: daemon.json("faults")["faults"] == [], 10)
    assert endless.process.poll() is None


def test_flap_holds_in_turns(daemon: Daemon, endless: Caller) -> None:
    inject(daemon, endless, "flap", "on=300ms", "off=200ms", "--for", "2900ms")
    until(lambda: daemon.json("faults")["faults"] == [], 20)
    released = [event for event in daemon.events("fault_released") if event["pid"] == endless.pid]
    assert 4 <= len(released) <= 6
    assert threads_run(endless.pid)


def test_hang_stops_the_whole_rank_and_lets_it_go_on(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py")
    until(lambda: sorted(daemon.ranks(job.job)) == [0, 1, 2, 3] and len(job.steps(0)) > 5, 90)
    ranks = daemon.ranks(job.job)

    done = daemon.ctl("inject", "--rank", "1", "--job", job.job, "hang", "--for", "3s", "--wait")

    assert done.returncode == 0, done.stderr
    assert "all threads" in "".join(event["text"] for event in daemon.events("fault_held"))
    for other in range(4):
        until(lambda other=other: any(step["seconds"] > 2 for step in job.steps(other)) or other == 1, 20)
    seen = len(job.steps(1))
    until(lambda: len(job.steps(1)) > seen + 10, 20)
    assert all(threads_run(row["pid"]) for row in ranks.values())


def test_slow_leaves_a_share_of_the_time(daemon: Daemon, endless: Caller) -> None:
    inject(daemon, endless, "slow", "percent=20%", "period=50ms", "--for", "3s")
    process = psutil.Process(endless.pid)
    states = [process.status() for _ in range(200) if not time.sleep(0.01)]
    stopped = sum(state in (psutil.STATUS_TRACING_STOP, psutil.STATUS_STOPPED) for state in states) / len(states)
    assert 0.5 < stopped < 0.95
    until(lambda: daemon.json("faults")["faults"] == [], 20)
    assert threads_run(endless.pid)


def test_error_is_refused_on_gloo_with_the_reason(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py", ranks=2)
    until(lambda: sorted(daemon.ranks(job.job)) == [0, 1], 90)
    for words in (("error",), ("timeout", "mode=return"), ("error", "backend=gloo")):
        done = daemon.ctl("inject", "--rank", "1", "--job", job.job, *words)
        assert done.returncode == 2, done.stderr
        assert "throw" in done.stderr
        assert "hang" in done.stderr


PATTERNS = [
    ("timeout",),
    ("delay", "ms=2000"),
    ("timeout", "mode=return"),
    ("hang",),
    ("slow", "percent=5%", "period=1s"),
    ("flap", "on=5s", "off=1s"),
    ("kill", "after=1000000"),
]


@pytest.mark.parametrize("words", PATTERNS, ids=[" ".join(words) for words in PATTERNS])
def test_kill_9_of_the_daemon_leaves_the_rank_running(workshop: Workshop, words: tuple[str, ...]) -> None:
    own = Daemon().start()
    workshop.daemon = own
    try:
        started = workshop.call(workshop.library(), 1_000_000, pause=0.005)
        workshop.begin(started)
        inject(own, started, *words, "--for", "50s")
        if words[0] != "kill":
            until(lambda: own.events("fault_held"), 20)
        assert own.process is not None

        os.kill(own.pid, signal.SIGKILL)

        until(lambda: threads_run(started.pid), 5)
        switches = psutil.Process(started.pid).num_ctx_switches().voluntary
        until(lambda: psutil.Process(started.pid).num_ctx_switches().voluntary > switches + 50, 10)
    finally:
        own.stop()


def test_the_off_switch_ends_what_is_armed_and_refuses_more(workshop: Workshop) -> None:
    own = Daemon()
    switch = own.place / "no-faults"
    own._settings = (f"faults.off_switch={switch}",)
    own.start()
    workshop.daemon = own
    try:
        started = workshop.call(workshop.library(), 1_000_000, pause=0.005)
        workshop.begin(started)
        inject(own, started, "timeout", "--for", "50s")
        until(lambda: own.events("fault_held"), 20)

        switch.touch()

        until(lambda: threads_run(started.pid), 5)
        until(lambda: own.json("faults")["faults"] == [], 5)
        assert own.json("faults", "--history")["faults"][0]["ending"] == "switched off"
        refused = own.ctl("inject", "--job", started.job, "--rank", "0", "timeout")
        assert (refused.returncode, "no-faults exists" in refused.stderr) == (1, True)
        switch.unlink()
        inject(own, started, "timeout", "--for", "300ms", "--wait")
    finally:
        own.stop()


def test_a_hold_longer_than_half_of_gloos_own_time_out_is_refused(daemon: Daemon, jobs: Start) -> None:
    job = jobs("steps.py", "--timeout", "30", ranks=2)
    until(lambda: sorted(daemon.ranks(job.job)) == [0, 1] and len(job.steps(0)) > 3, 90)
    done = daemon.ctl("inject", "--rank", "1", "--job", job.job, "timeout", "--for", "20s")
    assert done.returncode == 1
    assert "give up after 30 s" in done.stderr
    assert daemon.ctl("inject", "--rank", "1", "--job", job.job, "timeout", "--for", "20s", "--may-kill-job", "--dry-run").returncode == 0
    assert daemon.ctl("inject", "--rank", "1", "--job", job.job, "timeout", "--for", "14s", "--dry-run").returncode == 0


def test_several_ranks_are_armed_together_or_not_at_all(workshop: Workshop, jobs: Start) -> None:
    own = Daemon("faults.max_ranks_per_job=2").start()
    try:
        job = jobs("steps.py", ranks=3)
        until(lambda: sorted(own.ranks(job.job)) == [0, 1, 2], 90)
        done = own.ctl("inject", "--rank", "0,2", "--job", job.job, "delay", "ms=5", "--for", "20s", "-o", "json")
        assert done.returncode == 0, done.stderr
        assert sorted(fault["rank"] for fault in own.json("faults")["faults"]) == [0, 2]
        assert own.ctl("clear", "all").returncode == 0
        done = own.ctl("inject", "--rank", "all", "--job", job.job, "delay", "ms=5")
        assert done.returncode == 1
        assert "cleared" in done.stderr
        assert own.json("faults")["faults"] == []
    finally:
        own.stop()
