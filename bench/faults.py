"""Faults: how exactly each does what was asked, to whom, and what is left when the daemon is killed in the middle of it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import random
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from cost import library
from harness import STEPS, Daemon, Row, daemon, free_port, job, median, until
from singularityd.api.client import Client

CALLER = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
/* caller SHARED LIBRARY: calls ncclAllReduce on no communicator, which answers 4 at once, about every 200 us of work */
static unsigned long now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ul + t.tv_nsec; }
int main(int argc, char **argv) {
    volatile unsigned long *shared = mmap(0, 8 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
    void *nccl = dlopen(argv[2], RTLD_NOW);
    if (!nccl) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    int (*call)(const void *, void *, size_t, int, int, void *, void *) = dlsym(nccl, "ncclAllReduce");
    volatile unsigned long work = 0;
    puts("up"); fflush(stdout);
    for (;;) {
        for (int i = 0; i < 60000; i++) work += i;
        unsigned long began = now();
        int result = call(0, 0, 8, 7, 0, 0, 0);
        unsigned long n = shared[0] & 0xffff;
        shared[8 + 2 * n] = now() - began; shared[9 + 2 * n] = result;
        shared[0]++;
    }
}
"""
PATTERNS = (
    ("timeout", {}),
    ("timeout", {"mode": "return"}),
    ("delay", {"ms": "1000"}),
    ("error", {}),
    ("hang", {}),
    ("slow", {"percent": "30%"}),
    ("flap", {"on": "2s", "off": "1s"}),
    ("kill", {"after": "1000000"}),
)
SETTINGS = ("faults.per_minute=10000", "faults.budget=86400", "kernel.guard=false")


class Rank:
    """A process that calls the real libnccl all the time and writes down how long each call took and what it returned."""

    def __init__(self, place: Path) -> None:
        source, program, shared = place / "caller.c", place / "caller", place / "shared"
        source.write_text(CALLER)
        subprocess.run(["gcc", "-O1", "-o", str(program), str(source), "-ldl"], check=True)
        shared.write_bytes(bytes(8 << 20))
        port = free_port()
        self.job = f"tcp-127.0.0.1:{port}"
        environment = dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self.process = subprocess.Popen([str(program), str(shared), str(library())], env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self._map = mmap.mmap(os.open(shared, os.O_RDWR), 8 << 20)

    @property
    def calls(self) -> int:
        return int(struct.unpack_from("<Q", self._map)[0])

    def results(self, first: int, last: int) -> list[tuple[float, int]]:
        """(seconds, result) of calls by number."""
        return [
            (taken / 1e9, result)
            for taken, result in (struct.unpack_from("<QQ", self._map, 64 + 16 * (n & 0xFFFF)) for n in range(first, last))
        ]

    def rate(self, seconds: float) -> float:
        before, began = self.calls, time.monotonic()
        time.sleep(seconds)
        return (self.calls - before) / (time.monotonic() - began)

    def runs(self) -> bool:
        """No thread stopped or traced."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            status = (task / "status").read_text()
            if "State:\tT" in status or "State:\tt" in status or "TracerPid:\t0" not in status:
                return False
        return True


@contextlib.contextmanager
def rank() -> Iterator[Rank]:
    with tempfile.TemporaryDirectory() as place:
        one = Rank(Path(place))
        try:
            yield one
        finally:
            one.process.kill()
            one.process.wait()


def watched(client: Client, one: Rank) -> None:
    until(lambda: any(found.pid == one.process.pid and found.libraries for found in client.ranks().ranks), 60)


def inject(client: Client, one: Rank, pattern: str, options: dict[str, str], duration: str = "50s") -> str:
    return str(client.inject(rank=0, job=one.job, pattern=pattern, options=options, duration=duration, reason="bench").id)


def run(quick: bool) -> list[Row]:
    return [*exactness(quick), bystanders(), left_behind(9 if quick else 100)]


def exactness(quick: bool) -> list[Row]:
    rows: list[Row] = []
    with daemon(*SETTINGS) as running, rank() as one, Client(running.socket, 30) as client:
        watched(client, one)
        trials = {1: 10, 10: 10, 100: 10, 1000: 3} if quick else {1: 100, 10: 100, 100: 100, 1000: 20}
        rows += [delay(client, one, asked, count) for asked, count in trials.items()]
        rows.append(slow(client, one, 3 if quick else 10))
        rows += chances(client, one, 2_000 if quick else 10_000)
    return rows


def delay(client: Client, one: Rank, asked: int, trials: int) -> Row:
    first = one.calls
    fault = inject(client, one, "delay", {"ms": str(asked), "count": str(trials)})
    time.sleep(trials * asked / 1000 + 1)
    client.clear(fault)
    over = [(taken - asked / 1000) * 1000 for taken, _ in one.results(max(first, one.calls - 60_000), one.calls) if taken >= asked / 1000]
    value = median(over) if len(over) >= trials else math.inf
    measured = f"+ {value:.2f} ms (worst {max(over, default=math.inf):.2f}; {len(over)} calls)"
    return Row(f"delay of {asked} ms, median over what was asked", "<= 2 ms", measured, value <= 2)


def slow(client: Client, one: Rank, turns: int) -> Row:
    full, half = [], []
    for _ in range(turns):
        full.append(one.rate(1.0))
        fault = inject(client, one, "slow", {"percent": "50%"})
        half.append(one.rate(1.0))
        client.clear(fault)
    share = median(half) / median(full)
    return Row("slow percent=50: call rate", "0.45 to 0.55", f"{share:.3f} of {median(full):.0f} a second", 0.45 <= share <= 0.55)


def chances(client: Client, one: Rank, calls: int) -> list[Row]:
    """probability, after and count as an error on the real library, by what the caller got back."""
    found = []
    for seed in (11, 11, 12):
        fault = inject(client, one, "error", {"probability": "10%", "seed": str(seed), "code": "ncclRemoteError"})
        time.sleep(calls / 3000)
        (ended,) = client.clear(fault).faults
        got = [number for number, (_, result) in enumerate(one.results(max(0, one.calls - 60_000), one.calls)) if result == 6]
        found.append((ended.hits, ended.seen, len(got)))
        time.sleep(0.1)
        wipe(one)
    worst = max(abs(hits - seen / 10) / math.sqrt(seen * 0.09) for hits, seen, _ in found)
    exact = all(hits == got for hits, _, got in found)
    rows = [
        Row(
            "probability=10%, standard deviations off",
            "<= 3.29",
            f"{worst:.2f} ({', '.join(f'{h} of {s}' for h, s, _ in found)})",
            worst <= 3.29,
        ),
        Row("hits told = results that the caller got", "equal", str(found), exact),
    ]
    first = one.calls
    fault = inject(client, one, "error", {"after": "50", "count": "17", "code": "ncclRemoteError"})
    time.sleep(1)
    (ended,) = client.clear(fault).faults
    got = [number for number, (_, result) in enumerate(one.results(first, one.calls)) if result == 6]
    straight = len(got) == 17 and got[-1] - got[0] == 16
    rows.append(Row("after=50 count=17", "17, in a row", f"{len(got)} ({ended.hits} told)", straight and ended.hits == 17))
    return rows


def wipe(one: Rank) -> None:
    for place in range(64, 64 + 16 * 65536, 16):
        struct.pack_into("<Q", one._map, place + 8, 0)


def bystanders() -> Row:
    """Of a real job: only the rank that was named has hits, and nobody's step is longer than the hold."""
    with daemon(*SETTINGS) as running, job(STEPS, "--pause", "0.005") as (name, _), Client(running.socket, 30) as client:
        until(lambda: sum(found.job == name and found.HasField("rank") for found in client.ranks().ranks) == 4, 90)
        time.sleep(2)
        fault = client.inject(rank=2, job=name, pattern="delay", options={"ms": "20"}, duration="5s", reason="bench")
        client.wait(fault.id, 30)
        hits = {number: running.metric("singularity_fault_hits_total", job_id=name, rank=str(number)) for number in range(4)}
    others = sum(count for number, count in hits.items() if number != 2)
    return Row("hits of ranks that were not named", "0", f"{others:.0f} ({hits[2]:.0f} of the one that was)", others == 0 and hits[2] > 0)


def left_behind(trials: int) -> Row:
    """Every pattern x every way of killing the daemon: a second later the rank runs as before."""
    chance = random.Random(4)
    bad: list[str] = []
    slowest = 1.0
    with rank() as one:
        for trial in range(trials):
            pattern, options = PATTERNS[trial % len(PATTERNS)]
            victim = ("executor", "front", "group")[trial // len(PATTERNS) % 3]
            share, problem = killed(one, pattern, options, victim, chance.random() * 0.3)
            slowest = min(slowest, share)
            if problem:
                bad.append(f"{pattern} {victim}: {problem}")
    measured = f"{len(bad)} of {trials} trials bad{': ' + bad[0] if bad else ''}; lowest call rate {slowest:.2f} of before"
    return Row("1 s after kill -9 of executor, front or all", "0 bad, >= 0.95", measured, not bad and slowest >= 0.95)


def killed(one: Rank, pattern: str, options: dict[str, str], victim: str, pause: float) -> tuple[float, str]:
    running = Daemon(*SETTINGS)
    try:
        with Client(running.socket, 30) as client:
            watched(client, one)
            time.sleep(0.5)
            before = median([one.rate(0.3) for _ in range(3)])
            inject(client, one, pattern, options)
        time.sleep(0.2 + pause)
        processes = [running.process.pid, *(child.pid for child in psutil.Process(running.process.pid).children(recursive=True))]
        for pid in {"executor": [running.process.pid], "front": [running.front], "group": processes}[victim]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(1)
        problem = "" if one.runs() else "a thread is stopped or traced"
        if victim == "front" and not problem:
            until(lambda: _nothing_armed(running), 20)
        share = max(one.rate(0.3) for _ in range(3)) / before
        return min(share, 1.0), problem
    finally:
        running.stop()


def _nothing_armed(running: Daemon) -> bool:
    from singularityd.errors import SingularityError

    try:
        with Client(running.socket, 5) as client:
            return not client.faults().faults
    except SingularityError:
        return False
