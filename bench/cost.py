"""What one counted call costs: bare, under an empty probe, under a bpftrace script that does the same work, under the daemon.

A C program calls ncclAllReduce of the real libnccl with a null communicator (without a GPU it answers 4). The variants alternate in
one run; medians are compared. The bpftrace script counts calls, sums bytes and keeps a histogram of durations by operation and result,
at the same entry and return.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from harness import ROOT, Row, daemon, job, median, until

CALLER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);
int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    all_reduce call = (all_reduce)dlsym(library, "ncclAllReduce");
    long calls = atol(argv[2]);
    struct timespec a, b;
    call(0, 0, 16, 7, 0, 0, 0);
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long i = 0; i < calls; i++) call(0, 0, 16, 7, 0, 0, 0);
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%.1f\n", ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / calls);
    return 0;
}
"""
EMPTY = "uprobe:{lib}:ncclAllReduce {{ }}"
SAME = """
uprobe:{lib}:ncclAllReduce {{ @start[tid] = nsecs; @size[tid] = arg2 * 4; }}
uretprobe:{lib}:ncclAllReduce /@start[tid]/ {{
    $took = nsecs - @start[tid];
    @calls[pid, "allreduce", retval] = count();
    @bytes[pid, "allreduce", retval] = sum(@size[tid]);
    @took[pid, "allreduce", retval] = hist($took / 1000);
    delete(@start[tid]); delete(@size[tid]);
}}
"""


def library() -> Path:
    import nvidia.nccl

    return Path(next(iter(nvidia.nccl.__path__))) / "lib" / "libnccl.so.2"


@contextmanager
def bpftrace(program: str) -> Iterator[None]:
    with tempfile.NamedTemporaryFile("w+b", suffix=".log") as log:
        tracing = subprocess.Popen(["bpftrace", "-e", program], stdout=log, stderr=log)
        try:
            until(lambda: b"Attaching" in Path(log.name).read_bytes())
            time.sleep(1.5)
            yield
        finally:
            tracing.send_signal(2)
            tracing.wait(60)


def measure(caller: Path, calls: int, repeats: int) -> float:
    return median([float(subprocess.check_output([str(caller), str(library()), str(calls)])) for _ in range(repeats)])


def run(quick: bool) -> list[Row]:
    calls, repeats, rounds = (10_000, 3, 2) if quick else (30_000, 5, 3)
    with tempfile.TemporaryDirectory() as place:
        source, caller = Path(place) / "caller.c", Path(place) / "caller"
        source.write_text(CALLER)
        subprocess.run(["gcc", "-O2", "-o", str(caller), str(source), "-ldl"], check=True)
        settings = ("kernel.guard=false",)
        variants = {
            "bare": nullcontext,
            "empty probe": lambda: bpftrace(EMPTY.format(lib=library())),
            "bpftrace": lambda: bpftrace(SAME.format(lib=library())),
            "singularityd": lambda: daemon(*settings),
        }
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, around in variants.items():
                with around() as running:
                    if name == "singularityd":
                        warm(caller, running)
                    taken[name].append(measure(caller, calls, repeats))
    cost = {name: median(values) - median(taken["bare"]) for name, values in taken.items()}
    for name in ("empty probe", "bpftrace", "singularityd"):
        print(f"  {name:14} {cost[name] / 1000:8.2f} us a call ({', '.join(f'{value / 1000:.2f}' for value in taken[name])})")
    ratio = cost["singularityd"] / cost["bpftrace"]
    distance = cost["singularityd"] - cost["empty probe"]
    share = step_share(cost["singularityd"])
    return [
        Row(
            "cost of one counted call against bpftrace",
            "<= 1.15x",
            f"{ratio:.2f}x ({cost['singularityd'] / 1000:.1f} us; {distance / 1000:.1f} us above an empty entry probe)",
            ratio <= 1.15,
        ),
        Row("share of the demo job's step", "<= 0.5 %", f"{share:.3f} %", share <= 0.5),
    ]


def warm(caller: Path, running: object) -> None:
    """The library is attached when a process has mapped it once."""
    subprocess.run(["sh", "-c", f"{caller} {library()} 1; sleep 0"], check=True, stdout=subprocess.DEVNULL)
    holding = subprocess.Popen(["python3", "-c", f"import ctypes,time; ctypes.CDLL('{library()}'); time.sleep(6)"])
    until(lambda: running.metric("singularity_probes_attached", backend="nccl") > 0, 30)  # type: ignore[attr-defined]
    holding.kill()
    holding.wait()


def step_share(cost_ns: float) -> float:
    """Percent: calls of one rank in one step of the demo job x cost / step time."""
    with daemon() as running, job(ROOT / "demo/train.py", "--json", "--seconds", "0") as (name, log):

        def steps() -> list[dict]:
            return [json.loads(line) for line in log.read_text().splitlines() if re.match(r'\{"step"', line)]

        until(lambda: len(steps()) > 5, 120)
        first, calls = len(steps()), running.metric("singularity_collective_calls_total", job_id=name, rank="0")
        until(lambda: len(steps()) > first + 20, 120)
        last, more = steps(), running.metric("singularity_collective_calls_total", job_id=name, rank="0")
    per_step = (more - calls) / (len(last) - first)
    seconds = median([step["seconds"] for step in last[first:]])
    return per_step * cost_ns / 1e9 / seconds * 100
