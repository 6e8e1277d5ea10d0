"""The border between the halves: what a front that has been taken over can do, and what outlives either half."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, threads_run, until
from workshop import Workshop

HOSTILE_FRONT = r"""
import array, os, random, socket, sys
from singularityd.kernel import messages
said = open({log!r}, "a")
channel = socket.socket(fileno=int(sys.argv[sys.argv.index("--channel") + 1]))
def heard(kind, **wanted):
    while True:
        data = channel.recv(messages.LARGEST)
        if not data:
            raise SystemExit
        if int.from_bytes(data[:4], "little") == kind.KIND:
            message = messages.decode(data, messages.FROM_EXECUTOR)
            if all(getattr(message, name) == value for name, value in wanted.items()):
                return message
heard(messages.Started)
channel.send(bytes(messages.FrontReady(version=1)))
def arm(**values):
    order = dict(request=1, fault=1, pid={pid}, start_time={start}, ms=0, ppm=1_000_000, duration_ms=500, point=0, backend=0) | values
    channel.send(bytes(messages.Arm(**order)))
    return heard(messages.Refused, request=order["request"]).text("code")
codes = [
    arm(request=1, pid=1, start_time=1),
    arm(request=2, pid=os.getpid(), start_time=0),
    arm(request=3, start_time={start} + 1),
    arm(request=4, duration_ms=4_000_000_000),
    arm(request=5, duration_ms=0),
    arm(request=6, ppm=1_000_001),
    arm(request=7, point=60_000),
    arm(request=8, backend=200),
]
random.seed(len(open({log!r}).read()))
said.write("asked " + " ".join(codes) + "\n")
said.flush()
for number in range(200):
    data = bytearray(bytes(messages.Arm(request=9)))
    data[:4] = random.randrange(70).to_bytes(4, "little")
    channel.send(bytes(data[: random.randrange(1, len(data))]) if number % 2 else os.urandom(random.randrange(1, 8000)))
heard(messages.Done, request=999_999)
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    running = Daemon()
    yield running
    running.stop()


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_front_that_was_taken_over_reaches_no_other_process_and_no_limit(daemon: Daemon) -> None:
    bystander = subprocess.Popen(["sleep", "100"])
    place = daemon.place
    log, script = place / "said", place / "hostile.py"
    script.write_text(HOSTILE_FRONT.format(log=str(log), pid=bystander.pid, start=start_time(bystander.pid)))
    log.write_text("")
    change = f"m.sys.executable = {str(place / 'python')!r}"
    (place / "python").write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && shift 2 && exec {sys.executable} {script} "$@"\nexec {sys.executable} "$@"\n'
    )
    (place / "python").chmod(0o755)
    code = f"from singularityd import __main__ as m; {change}; m.main()"
    with daemon.log.open("ab") as out:
        daemon.process = subprocess.Popen([sys.executable, "-c", code], env=daemon.environment, stdout=out, stderr=out, cwd="/")
    try:
        until(lambda: log.read_text().count("asked") >= 3, 60)  # it spoke nonsense, was replaced, and so was the next
        assert daemon.process.poll() is None
        assert threads_run(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()
    expected = "rank_gone rank_gone rank_gone not_allowed not_allowed bad_option bad_option bad_option"
    assert set(log.read_text().splitlines()) == {f"asked {expected}"}
    assert "what is no message" in daemon.log.read_text()


def test_arguments_that_everybody_can_read_carry_no_setting_of_otel(daemon: Daemon) -> None:
    daemon._settings = ('otel.headers={"authorization" = "Bearer secret-token"}',)
    daemon.start()
    for pid in (daemon.pid, daemon.front):
        assert b"secret-token" not in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b'otel.headers={"authorization" = "', b"")


@pytest.fixture
def caller(daemon: Daemon, workshop: Workshop) -> tuple[str, int]:
    """A rank that calls all the time."""
    daemon.start()
    started = workshop.call(workshop.library(), 1_000_000, pause=0.005)
    workshop.begin(started)
    return started.job, started.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_learnt_and_what_was_armed_over_a_restart(daemon: Daemon, caller: tuple[str, int], number: int) -> None:
    job, pid = caller
    assert daemon.ctl("inject", "--job", job, "--rank", "0", "timeout", "--for", "50s").returncode == 0
    until(lambda: daemon.events("fault_held"), 20)
    assert daemon.process is not None

    daemon.process.send_signal(number)
    daemon.process.wait(20)

    until(lambda: threads_run(pid), 5)
    daemon.start()
    faults = daemon.json("faults", "--history")["faults"]
    assert [(fault["state"], fault["rank"]) for fault in faults] == [("ended", 0)]
    until(lambda: job in {row["job"] for row in daemon.json("ranks")["ranks"]}, 20)
    assert daemon.json("faults")["faults"] == []
    assert daemon.ctl("inject", "--job", job, "--rank", "0", "timeout", "--for", "300ms", "--wait").returncode == 0


def test_sigterm_while_arming(daemon: Daemon, caller: tuple[str, int]) -> None:
    job, pid = caller
    for pause in (0.0, 0.01, 0.05, 0.2, 0.4, 0.6):
        asking = subprocess.Popen(
            [str(Path(sys.executable).parent / "singularityctl"), "inject", "--job", job, "--rank", "0", "timeout", "--for", "50s"],
            env=daemon.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(pause)
        assert daemon.process is not None
        daemon.process.terminate()
        assert daemon.process.wait(20) == 0
        said = asking.communicate(timeout=60)
        assert asking.returncode in (0, 1, 4), said
        assert "Traceback" not in said[1]
        until(lambda: threads_run(pid), 5)
        daemon.start()
        until(lambda: job in {row["job"] for row in daemon.json("ranks")["ranks"]}, 20)
        assert daemon.json("faults")["faults"] == []
        assert {fault["state"] for fault in daemon.json("faults", "--history")["faults"]} <= {"ended", "refused"}


def test_several_jobs_are_refused_with_their_list(daemon: Daemon, caller: tuple[str, int], workshop: Workshop) -> None:
    other = workshop.call(workshop.library("libnccl.so.3"), 5)
    until(lambda: other.job in {row["job"] for row in daemon.json("ranks")["ranks"]}, 20)

    done = daemon.ctl("inject", "--rank", "0", "timeout")

    assert done.returncode == 3
    assert caller[0] in done.stderr
    assert other.job in done.stderr
    assert "--job" in done.stderr


def test_the_guard_takes_a_probe_away_that_is_hit_too_often(daemon: Daemon, workshop: Workshop) -> None:
    daemon._settings = ("kernel.guard_hits=100",)
    daemon.start()
    started = workshop.call(workshop.library(), 1_000_000_000)
    workshop.begin(started)

    until(lambda: daemon.events("probe_shed"), 20)

    shed = daemon.events("probe_shed")[0]["text"]
    assert "ncclAllReduce" in shed
    assert "100" in shed
    until(lambda: daemon.metric("singularity_probes_attached", backend="nccl") == 1, 10)  # the other function keeps its probe
    calls = daemon.metric("singularity_collective_calls_total", job_id=started.job)
    time.sleep(1)
    assert daemon.metric("singularity_collective_calls_total", job_id=started.job) == calls, "it costs the job nothing any more"
    done = daemon.ctl("inject", "--job", started.job, "--rank", "0", "timeout", "point=allreduce")
    assert done.returncode == 1
    assert "the guard detached ncclAllReduce" in done.stderr, "a fault that would do nothing is refused"


def test_the_same_seed_hits_the_same_calls(daemon: Daemon, workshop: Workshop) -> None:
    daemon.start()
    hits = []
    for _ in range(2):
        started = workshop.call(workshop.library(), 400)
        until(lambda started=started: started.job in {row["job"] for row in daemon.json("ranks")["ranks"] if row["libraries"]}, 60)
        words = ("timeout", "ms=1", "probability=5%", "seed=77", "point=allreduce", "--for", "20s")
        assert daemon.ctl("inject", "--job", started.job, "--rank", "0", *words).returncode == 0
        workshop.done(started)
        hits.append(daemon.metric("singularity_fault_hits_total", job_id=started.job))
        assert daemon.ctl("clear", "all").returncode == 0
        workshop.end()
    assert hits[0] == hits[1]
    assert 5 <= hits[0] <= 40
