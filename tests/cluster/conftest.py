"""A real daemon, real jobs: what these tests start they end, by pid."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
JOBS = Path(__file__).resolve().parent / "jobs"


def until(what: Callable[[], Any], seconds: float = 30.0, every: float = 0.05) -> Any:
    """The first true answer; fails with what was asked when there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = what()
        if answer:
            return answer
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    """One singularityd with directories and a metrics port of its own."""

    def __init__(self, *settings: str) -> None:
        # pytest's own temporary directories let nobody but root in; the front is another user.
        place = Path(tempfile.mkdtemp(prefix="singularity-test-"))
        place.chmod(0o755)
        self.place = place
        self.runtime, self.state = place / "run", place / "state"
        self.port = free_port()
        self.log = place / "daemon.log"
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ, SINGULARITYD_RUNTIME_DIR=str(self.runtime), SINGULARITYD_STATE_DIR=str(self.state))

    @property
    def command(self) -> list[str]:
        return [str(BIN / "singularityd")]

    def start(self) -> Daemon:
        words = [f"--set={word}" for word in (f"metrics.port={self.port}", *self._settings)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        try:
            until(lambda: "executor    pid" in self.ctl("status").stdout, 60)
        except AssertionError:
            words = self.log.read_text()
            self.stop()
            raise AssertionError(f"the daemon did not start:\n{words}") from None
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def front(self) -> int:
        for line in self.ctl("status").stdout.splitlines():
            if line.startswith("daemon") and " pid " in line:
                return int(line.split(" pid ")[1].split(",")[0])
        raise AssertionError("no front")

    def ctl(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "singularityctl"), *words], env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )

    def json(self, *words: str) -> Any:
        done = self.ctl(*words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ranks(self, job: str = "") -> dict[int, dict[str, Any]]:
        rows = self.json("ranks")["ranks"]
        found = [row for row in rows if row["rank"] is not None and row["state"] == "running" and row["job"].startswith(job)]
        return {row["rank"]: row for row in found}

    def page(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the series that carry these labels."""
        total = 0.0
        for line in self.page().splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def events(self, kind: str) -> list[dict[str, Any]]:
        done = self.ctl("events", "--kind", kind, "-o", "json")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def stop(self) -> int:
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.place, ignore_errors=True)


class Job:
    """A torchrun of its own, in its own session so that everything of it can be ended."""

    def __init__(
        self,
        place: Path,
        script: Path,
        *words: str,
        ranks: int = 4,
        prefix: tuple[str, ...] = (),
        plain: bool = False,
        wrap: str = "",
        address: str = "127.0.0.1",
    ) -> None:
        """`plain`: ranks started by a shell, so that nobody ends the survivors when one dies (torchrun does).

        `wrap` is put before the last rank.
        """
        self.log = place / f"{script.stem}-{time.monotonic_ns()}.log"
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.gate = self.log.with_suffix(".gate")
        environment["TEST_GATE"] = str(self.gate)
        port = str(free_port())
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", port]
        if plain:
            last = "$([ $rank = $((WORLD_SIZE - 1)) ] && echo $WRAP)"
            loop = f'for rank in $(seq 0 $((WORLD_SIZE - 1))); do RANK=$rank LOCAL_RANK=$rank {last} "$@" & done; wait'
            environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port, "WRAP": wrap}
            command = [*prefix, "bash", "-c", loop, "ranks", sys.executable]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(script), *words], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.job = f"tcp-{address}:{port}"

    def go(self, daemon: Daemon, ranks: int = 4) -> None:
        """Open the gate that the job's ranks wait at, once all of them are watched."""
        until(lambda: sorted(daemon.ranks(self.job)) == list(range(ranks)), 90)
        until(lambda: all(row["libraries"] for row in daemon.ranks(self.job).values()), 30)
        self.gate.touch()

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines the job has printed."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("rank") == rank and "step" in line]

    def stop(self) -> None:
        # torchrun gives each rank a session of its own: the tree is ended, not the group.
        tree = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        tree += [child for root in tree for child in root.children(recursive=True)]
        orphans = [process for process in psutil.process_iter(["environ"]) if self._is_rank(process.info["environ"] or {})]
        for process in {*tree, *orphans}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _is_rank(self, environ: dict[str, str]) -> bool:
        return "RANK" in environ and environ.get("MASTER_PORT") == self.job.rpartition(":")[2]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    if os.geteuid() != 0:
        pytest.fail("these tests attach probes and need root")
    running = Daemon()
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(script: str, *words: str, **options: Any) -> Job:
        started.append(Job(tmp_path, JOBS / script, *words, **options))
        return started[-1]

    yield start
    for job in started:
        job.stop()


@pytest.fixture
def workshop(daemon: Daemon) -> Iterator[Any]:
    from workshop import Workshop

    place = Path(tempfile.mkdtemp(prefix="singularity-reports-"))
    place.chmod(0o755)
    shop = Workshop(place, daemon)
    yield shop
    shop.end()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def counted(daemon: Daemon) -> Callable[..., float]:
    def count(job: str, **labels: str) -> float:
        return daemon.metric("singularity_collective_calls_total", job_id=job, op="allreduce", **labels)

    return count


def threads_run(pid: int) -> bool:
    """Whether no thread of a process is stopped or traced."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = (task / "status").read_text()
        if "\nState:\tT" in status or "\nState:\tt" in status or "TracerPid:\t0" not in status:
            return False
    return True
