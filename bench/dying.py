"""From SIGKILL of a large rank to `rank_dying` on an agent's Watch stream, while a 4-rank job runs beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import grpc
from harness import STEPS, Row, daemon, free_port, job, percentile, until
from singularityd.api.client import Client
from singularityd.api.v1 import node_pb2, node_pb2_grpc

VICTIM = """
import os, sys, time, torch
ballast = bytearray(os.urandom(1 << 20)) * 220
print("up", flush=True)
time.sleep(600)
"""


def victim(port: int, rank: int) -> subprocess.Popen[str]:
    environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="1000", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    return subprocess.Popen([sys.executable, "-c", VICTIM], env=environment, stdout=subprocess.PIPE, text=True)


class Watcher(threading.Thread):
    """Notes when each pid was told to be dying."""

    def __init__(self, socket: str, pid: int, start_time: int) -> None:
        super().__init__(daemon=True)
        self.seen: dict[int, float] = {}
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        stub = node_pb2_grpc.AgentStub(self._channel)
        self._stream = stub.Watch(node_pb2.WatchRequest(pid=pid, start_time_ticks=start_time))

    def run(self) -> None:
        try:
            for event in self._stream:
                if event.kind == "rank_dying":
                    self.seen.setdefault(event.pid, time.monotonic())
        except grpc.RpcError:
            return

    def close(self) -> None:
        self._stream.cancel()
        self._channel.close()


def run(quick: bool) -> list[Row]:
    trials = 20 if quick else 200
    taken: list[float] = []
    with daemon("ranks.expire_after=5") as running, job(STEPS, "--pause", "0.02"):
        port = free_port()
        witness = victim(port, 0)
        assert witness.stdout is not None
        witness.stdout.readline()
        client = Client(running.socket)

        def known(pid: int) -> int:
            return next((rank.start_time_ticks for rank in client.ranks().ranks if rank.pid == pid and rank.HasField("rank")), 0)

        watcher = Watcher(running.socket, witness.pid, until(lambda: known(witness.pid)))
        watcher.start()
        time.sleep(0.5)
        rank = 0
        while len(taken) < trials:
            batch = []
            for _ in range(4):
                rank += 1
                batch.append(victim(port, rank))
            for one in batch:
                assert one.stdout is not None
                one.stdout.readline()
            for one in batch:
                until(lambda one=one: known(one.pid))
            for one in batch:
                began = time.monotonic()
                os.kill(one.pid, signal.SIGKILL)
                until(lambda one=one: one.pid in watcher.seen, 10, 0.001)
                taken.append(watcher.seen[one.pid] - began)
                one.wait()
                time.sleep(0.05)
        watcher.close()
        witness.kill()
        witness.wait()
    p50, p99 = (percentile(taken, percent) * 1000 for percent in (50, 99))
    measured = f"{p99:.2f} ms (median {p50:.2f}, worst {max(taken) * 1000:.2f}, {len(taken)} trials)"
    return [Row("SIGKILL of a 220 MB rank -> dying on a Watch stream, p99", "<= 10 ms", measured, p99 <= 10)]
