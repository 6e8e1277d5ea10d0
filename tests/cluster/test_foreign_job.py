"""A script that knows nothing of us, as a user would run it: under torchrun, and with one rank in namespaces of its own."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Daemon, Job, threads_run, until

Start = Callable[..., Job]
TUTORIAL = ROOT / "tests/data/foreign/ddp_tutorial.py"
LIBTORCH = next(iter((ROOT / ".venv").glob("lib/python*/site-packages/torch/lib/libtorch_cpu.so")), Path("libtorch_cpu.so"))
ALLREDUCE = "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE"


def bpftrace(place: Path) -> subprocess.Popen[bytes]:
    """Counts gloo's all-reduces by pid until it is ended; returns once it counts."""
    program = f"uprobe:{LIBTORCH}:{ALLREDUCE} {{ @calls[pid] = count(); }}"
    log = place / "bpftrace.log"
    with log.open("wb") as out:
        counting = subprocess.Popen(["bpftrace", "-e", program], stdout=out, stderr=out)
    until(lambda: b"Attaching" in log.read_bytes(), 60)
    time.sleep(2)
    return counting


def test_counts_equal_bpftraces_on_the_same_symbol(daemon: Daemon, jobs: Start, tmp_path: Path) -> None:
    counting = bpftrace(tmp_path)
    try:
        job = jobs("steps.py", "--steps", "97", "--pause", "0", "--gate")
        job.go(daemon)
        assert job.process.wait(120) == 0, job.log.read_text()
        pids = {line["rank"]: line["pid"] for line in job.lines() if "pid" in line}
    finally:
        counting.send_signal(2)
        counting.wait(30)
    theirs = {int(pid): int(calls) for pid, calls in re.findall(r"@calls\[(\d+)\]: (\d+)", (tmp_path / "bpftrace.log").read_text())}

    for rank, pid in pids.items():
        ours = daemon.metric("singularity_collective_calls_total", job_id=job.job, rank=str(rank), op="allreduce")
        assert theirs[pid] == ours == 97


def test_the_tutorial_is_watched_and_held(daemon: Daemon, jobs: Start) -> None:
    job = jobs(str(TUTORIAL), "100000")

    def known() -> bool:
        return sorted(daemon.ranks(job.job)) == [0, 1, 2, 3]

    until(known, 90)
    until(lambda: daemon.metric("singularity_collective_calls_total", job_id=job.job, op="allreduce") > 40, 60)

    done = daemon.ctl("inject", "--rank", "3", "--job", job.job, "timeout", "--for", "3s", "--wait")

    assert done.returncode == 0, done.stderr
    missing = daemon.ctl("inject", "--rank", "7", "--job", job.job, "timeout")
    assert missing.returncode == 3
    assert "ranks 0-3" in missing.stderr
    before = daemon.metric("singularity_collective_calls_total", job_id=job.job, op="allreduce")
    until(lambda: daemon.metric("singularity_collective_calls_total", job_id=job.job, op="allreduce") > before + 20, 30)


@pytest.fixture
def namespace() -> Iterator[tuple[str, str, str]]:
    """A network namespace joined to the host by a veth pair: (namespace, host's interface, the other's interface)."""
    name = f"sg{os.getpid()}"
    inside, outside = f"{name}i", f"{name}o"
    run = ["ip", "netns", "add", name]
    subprocess.run(run, check=True)
    try:
        for words in (
            f"ip link add {outside} type veth peer name {inside} netns {name}",
            f"ip addr add 10.213.7.1/24 dev {outside}",
            f"ip link set {outside} up",
            f"ip -n {name} addr add 10.213.7.2/24 dev {inside}",
            f"ip -n {name} link set {inside} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(words.split(), check=True)
        yield name, outside, inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_rank_in_its_own_mount_pid_and_network_namespace(
    daemon: Daemon, jobs: Start, namespace: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, outside, inside = namespace
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside)
    wrap = f"env GLOO_SOCKET_IFNAME={inside} ip netns exec {name} unshare --mount --pid --fork --mount-proc"
    job = jobs("steps.py", plain=True, wrap=wrap, address="10.213.7.1")

    def known() -> bool:
        return sorted(daemon.ranks(job.job)) == [0, 1, 2, 3]

    until(known, 90)
    rank = daemon.ranks(job.job)[3]
    assert rank["pid_inside"] != rank["pid"]
    until(lambda: len(job.steps(3)) > 5, 60)

    done = daemon.ctl("inject", "--rank", "3", "--job", job.job, "timeout", "--for", "3s", "--wait")

    assert done.returncode == 0, done.stderr
    for other in range(4):
        until(lambda other=other: any(step["seconds"] > 2 for step in job.steps(other)), 20)
    assert threads_run(rank["pid"])
    calls = daemon.metric("singularity_collective_calls_total", job_id=job.job, rank="3", op="allreduce")
    assert calls > 5
