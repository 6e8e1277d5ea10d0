"""Nothing is lost: counts at the highest rate this machine sustains, and ring records that are received or counted as dropped."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from cost import CALLER, library, warm
from harness import Row, daemon


def run(quick: bool) -> list[Row]:
    return [rate(quick), overflow(quick)]


def rate(quick: bool) -> Row:
    calls = 100_000 if quick else 500_000
    with tempfile.TemporaryDirectory() as place, daemon("kernel.guard=false") as running:
        source, caller = Path(place) / "caller.c", Path(place) / "caller"
        source.write_text(CALLER)
        subprocess.run(["gcc", "-O2", "-o", str(caller), str(source), "-ldl"], check=True)
        warm(caller, running)
        before = running.metric("singularity_collective_calls_total", op="allreduce", backend="nccl")
        began = time.monotonic()
        callers = [subprocess.Popen([str(caller), str(library()), str(calls)], stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
        for one in callers:
            one.wait()
        taken = time.monotonic() - began
        time.sleep(1)
        counted = running.metric("singularity_collective_calls_total", op="allreduce", backend="nccl") - before
    made = len(callers) * (calls + 1)
    return Row("counts at the highest rate, guard off", "equal", f"{counted:.0f} of {made}, {made / taken:,.0f} calls/s", counted == made)


def overflow(quick: bool) -> Row:
    """Each failing call gives one ring record; a burst of them overflows a ring of one page while the front is stopped."""
    calls = 20_000 if quick else 100_000
    with tempfile.TemporaryDirectory() as place, daemon("kernel.guard=false", "kernel.event_pages=1") as running:
        source, caller = Path(place) / "caller.c", Path(place) / "caller"
        source.write_text(CALLER)
        subprocess.run(["gcc", "-O2", "-o", str(caller), str(source), "-ldl"], check=True)
        warm(caller, running)
        subprocess.run([str(caller), str(library()), str(calls)], check=True, stdout=subprocess.DEVNULL)
        time.sleep(3)
        names = ("singularity_events_submitted_total", "singularity_events_received_total", "singularity_events_dropped_total")
        submitted, received, dropped = (running.metric(name, buffer="events") for name in names)
    measured = f"{received:.0f} + {dropped:.0f} = {received + dropped:.0f} of {submitted:.0f}"
    ok = submitted > calls and dropped > 0 and received + dropped == submitted
    return Row("ring records: received + dropped = submitted", "equal, some dropped", measured, ok)
