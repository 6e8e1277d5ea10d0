"""Arming: how long it takes, what it costs the rank, how exactly it ends."""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import STEPS, Row, daemon, free_port, job, median, percentile, until
from singularityd.api.client import Client

CROWD = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
static unsigned long *worst;                 /* the longest gap between two looks at the clock, ns; the reader sets it to 0 */
static void *wait_for_ever(void *unused) { for (;;) pause(); return 0; }
int main(int argc, char **argv) {
    worst = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
    if (!dlopen(argv[2], RTLD_NOW)) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    for (int i = 0; i < 500; i++) { pthread_t t; pthread_attr_t a; pthread_attr_init(&a); pthread_attr_setstacksize(&a, 65536);
        if (pthread_create(&t, &a, wait_for_ever, 0)) return 2; }
    puts("up"); fflush(stdout);
    struct timespec t; unsigned long last = 0, now;
    for (;;) {
        clock_gettime(CLOCK_MONOTONIC, &t); now = t.tv_sec * 1000000000ul + t.tv_nsec;
        if (last && now - last > *worst) *worst = now - last;
        last = now;
    }
}
"""


def run(quick: bool) -> list[Row]:
    return [*speed(quick), crowd(quick), idle_cost(quick)]


def speed(quick: bool) -> list[Row]:
    """Accepted -> armed and release after the deadline, on a live 4-rank job."""
    trials = 20 if quick else 300
    asked, late = [], []
    with (
        daemon("faults.per_minute=10000", "faults.budget=86400") as running,
        job(STEPS, "--pause", "0.005") as (name, _),
        Client(running.socket, 30) as client,
    ):
        until(lambda: sum(rank.job == name and rank.HasField("rank") for rank in client.ranks().ranks) == 4, 90)
        time.sleep(2)
        for _ in range(trials):
            began = time.monotonic()
            fault = inject(client, name, 3, "point=allreduce", "200ms")
            asked.append(time.monotonic() - began)
            ended = client.wait(fault.id, 30)
            late.append(max(0.0, ended.ended_at - ended.armed_at - 0.2))
            time.sleep(0.05)
    p99, over = percentile(asked, 99) * 1000, percentile(late, 99) * 1000
    return [
        Row(
            "inject accepted -> armed, p99",
            "<= 50 ms",
            f"{p99:.1f} ms (median {median(asked) * 1000:.1f}, worst {max(asked) * 1000:.1f})",
            p99 <= 50,
        ),
        Row(
            "release after the deadline, p99",
            "<= 20 ms",
            f"{over:.1f} ms (median {median(late) * 1000:.1f}, worst {max(late) * 1000:.1f})",
            over <= 20,
        ),
    ]


def inject(client: Client, job_id: str, rank: int, option: str, duration: str) -> object:
    key, _, value = option.partition("=")
    return client.inject(rank=rank, job=job_id, pattern="timeout", options={key: value}, duration=duration, reason="bench", dry_run=False)


def crowd(quick: bool) -> Row:
    """The longest gap of a spinning thread while the other 500 are being seized, above the longest without."""
    from cost import library

    with tempfile.TemporaryDirectory() as place, daemon("faults.per_minute=10000", "faults.budget=86400") as running:
        source, program, shared = Path(place) / "crowd.c", Path(place) / "crowd", Path(place) / "worst"
        source.write_text(CROWD)
        subprocess.run(["gcc", "-O2", "-pthread", "-o", str(program), str(source), "-ldl"], check=True)
        shared.write_bytes(b"\0" * 4096)
        port = free_port()
        environment = dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        target = subprocess.Popen([str(program), str(shared), str(library())], env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert target.stdout is not None
            target.stdout.readline()
            descriptor = os.open(shared, os.O_RDWR)
            worst = mmap.mmap(descriptor, 4096)

            def gap(seconds: float) -> float:
                worst[:8] = struct.pack("<Q", 0)
                time.sleep(seconds)
                return struct.unpack("<Q", worst[:8])[0] / 1e6

            with Client(running.socket, 30) as client:
                until(lambda: any(rank.pid == target.pid and rank.HasField("rank") for rank in client.ranks().ranks))
                without, during = [], []
                for _ in range(3 if quick else 10):
                    without.append(gap(1.0))
                    worst[:8] = struct.pack("<Q", 0)
                    inject(client, f"tcp-127.0.0.1:{port}", 0, "point=reduce_scatter", "500ms")
                    time.sleep(1.0)
                    during.append(struct.unpack("<Q", worst[:8])[0] / 1e6)
            added = median(during) - median(without)
        finally:
            target.kill()
            target.wait()
    measured = f"{max(0.0, added):.1f} ms ({median(during):.1f} armed, {median(without):.1f} without)"
    return Row("arming a rank of 500 threads: stall added", "<= 20 ms", measured, added <= 20)


def idle_cost(quick: bool) -> Row:
    """Step time of a job while a fault that is never hit is armed, against the same job without; alternating."""
    demo = Path(sys.argv[0]).resolve().parent.parent / "demo/train.py"
    with daemon("faults.per_minute=10000", "faults.budget=86400") as running, job(demo, "--json", "--seconds", "0") as (name, log):

        def steps() -> list[float]:
            lines = [line for line in log.read_text().splitlines() if line.startswith('{"step"')]
            return [json.loads(line)["seconds"] for line in lines]

        with Client(running.socket, 30) as client:
            until(lambda: len(steps()) > 8, 120)
            armed, free = [], []
            for _ in range(4 if quick else 12):
                begin = len(steps())
                time.sleep(3)
                free += steps()[begin + 1 :]
                inject(client, name, 3, "point=scatter", "4s")
                begin = len(steps())
                time.sleep(3)
                armed += steps()[begin + 1 :]
                time.sleep(1.5)
    ratio = median(armed) / median(free)
    measured = f"{ratio:.3f}x ({median(armed) * 1000:.1f} ms, {median(free) * 1000:.1f} ms; {len(armed)} and {len(free)} steps)"
    return Row("step time while armed with 0 hits", "<= 1.01x", measured, ratio <= 1.01)
