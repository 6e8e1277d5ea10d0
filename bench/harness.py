"""A daemon and jobs for the measurements, each in its own place, ended by pid."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
STEPS = ROOT / "tests/cluster/jobs/steps.py"


class Row(NamedTuple):
    """One line of the table."""

    what: str
    target: str
    measured: str
    ok: bool


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def median(values: list[float]) -> float:
    return statistics.median(values)


def until(what: Callable[[], Any], seconds: float = 60.0, every: float = 0.02) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := what():
            return answer
        time.sleep(every)
    raise SystemExit(f"bench: not within {seconds} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Daemon:
    """singularityd with directories and a port of its own."""

    def __init__(self, *settings: str) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="singularity-bench-"))
        self.place.chmod(0o755)
        self.port = free_port()
        self.socket = str(self.place / "run" / "control.sock")
        environment = dict(os.environ, SINGULARITYD_RUNTIME_DIR=str(self.place / "run"), SINGULARITYD_STATE_DIR=str(self.place / "state"))
        words = [f"--set={word}" for word in (f"metrics.port={self.port}", *settings)]
        self.log = self.place / "log"
        began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([str(BIN / "singularityd"), *words], env=environment, stdout=log, stderr=log)
        until(self._watching)
        self.start_seconds = time.monotonic() - began

    def _watching(self) -> bool:
        from singularityd.api.client import Client
        from singularityd.errors import SingularityError

        try:
            with Client(self.socket, 2.0) as client:
                return bool(client.status().executor_started_at)
        except SingularityError:
            return False

    @property
    def front(self) -> int:
        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if "singularityd.front" in " ".join(child.cmdline()))

    def page(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.page().splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


@contextlib.contextmanager
def daemon(*settings: str) -> Iterator[Daemon]:
    running = Daemon(*settings)
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def job(script: Path, *words: str, ranks: int = 4) -> Iterator[tuple[str, Path]]:
    """A torchrun; gives (job id, log)."""
    port = free_port()
    log = Path(tempfile.mkstemp(prefix="singularity-bench-", suffix=".log")[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port), str(script)]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *words], stdout=out, stderr=out, env=dict(os.environ, OMP_NUM_THREADS="1"))
    try:
        yield f"tcp-127.0.0.1:{port}", log
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in [*tree, *([psutil.Process(process.pid)] if process.poll() is None else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        log.unlink(missing_ok=True)


def pss(pid: int) -> float:
    """MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
