"""Finding the libraries of a torch job: its whole map list, nothing known before."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from harness import Row, median
from singularityd.kernel.discovery import Discovery, LibraryFound
from singularityd.kernel.executor import table_wanted
from singularityd.kernel.libraries import tables
from singularityd.kernel.procfs import ProcFs


class Only(ProcFs):
    """A /proc of one process."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def pids(self) -> list[int]:
        return [self._pid]


def run(quick: bool) -> list[Row]:
    code = "import torch, time; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    try:
        assert process.stdout is not None
        process.stdout.readline()
        rounds = [search(process.pid) for _ in range(3 if quick else 9)]
    finally:
        process.kill()
        process.wait()
    found, loop = median([first for first, _ in rounds]) * 1000, max(busy for _, busy in rounds) * 1000
    return [
        Row(
            "symbol search of a torch process's map list, cold",
            "<= 300 ms",
            f"{found:.0f} ms, off the loop (longest call on it {loop:.1f} ms)",
            found <= 300,
        )
    ]


def search(pid: int) -> tuple[float, float]:
    """Seconds until the library is found, and the longest time the loop was busy."""
    discovery = Discovery(Only(pid), [table_wanted(table) for table in tables()], clock=time.monotonic)
    began, busy = time.monotonic(), 0.0
    try:
        while True:
            turn = time.monotonic()
            found = discovery.tick(turn)
            busy = max(busy, time.monotonic() - turn)
            if select.select([discovery.fileno()], [], [], 0.02)[0]:
                turn = time.monotonic()
                found = found + discovery.on_readable()
                busy = max(busy, time.monotonic() - turn)
            if any(isinstance(item, LibraryFound) for item in found):
                return time.monotonic() - began, busy
    finally:
        discovery.close()
