"""Memory and CPU at rest, and how long a start takes."""

from __future__ import annotations

import time

from harness import Row, cpu_seconds, daemon, median, pss


def run(quick: bool) -> list[Row]:
    starts = []
    for _ in range(2 if quick else 5):
        with daemon() as running:
            starts.append(running.start_seconds)
    with daemon() as running:
        time.sleep(5)
        pids = (running.process.pid, running.front)
        before, began = sum(cpu_seconds(pid) for pid in pids), time.monotonic()
        time.sleep(10 if quick else 40)
        share = (sum(cpu_seconds(pid) for pid in pids) - before) / (time.monotonic() - began) * 100
        executor, front = (pss(pid) for pid in pids)
    return [
        Row("PSS of executor + front", "<= 80 MiB", f"{executor + front:.1f} MiB", executor + front <= 80),
        Row("PSS of the executor", "<= 16 MiB", f"{executor:.1f} MiB", executor <= 16),
        Row("CPU at rest", "<= 0.5 % of a core", f"{share:.2f} %", share <= 0.5),
        Row(f"start to ready (median of {len(starts)})", "<= 3 s", f"{median(starts):.2f} s", median(starts) <= 3),
    ]
