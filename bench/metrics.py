"""The metrics page with 64 ranks x 12 operations: how long it takes, and what it does to API calls meanwhile.

    python bench/metrics.py [--quick] [--ranks 64] [--ops 12]

Serves the page and a gRPC unix socket from one event loop, as the front does. One process calls the socket all the time, another scrapes
in every other second, so that calls with and without a scrape alternate on the same machine. prometheus_client's own encoder of the same
values is timed beside it. Exits 1 when a target of the project is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.request

import grpc
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from singularityd.kernel.abi import OPS
from singularityd.model import Calls, CallStats, Rank
from singularityd.observe.exposition import OPENMETRICS, encode
from singularityd.observe.http import MetricsServer
from singularityd.observe.metrics import MetricsPage, ReadingCollector
from singularityd.observe.reading import Memory, read
from singularityd.observe.settings import MetricsSettings
from singularityd.observe.snapshot import Snapshot

PAGE_TARGET, DELAY_TARGET = 0.250, 0.020


def snapshot(ranks: int, ops: int) -> Snapshot:
    """Every rank has called every operation, in every bucket."""
    stats = tuple(
        CallStats(
            pid=1000 + rank, backend="nccl", op=op, comm="1f2e3d4c", result="ok", calls=28 * 12345, bytes=2**40 + rank,
            seconds=1234.5 + rank, last_call=1.7e9 + rank, buckets=(12345,) * 28,
        )
        for rank in range(ranks)
        for op in list(OPS.values())[:ops]
    )  # fmt: skip
    known = tuple(Rank(pid=1000 + rank, start_time=1, job="pretrain-70b", rank=rank, world=ranks) for rank in range(ranks))
    return Snapshot(calls=Calls(stats=stats), ranks=known, started_at=1.7e9)


async def serve(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Serve until the other process is done; returns what it measured."""
    data = snapshot(arguments.ranks, arguments.ops)

    async def take() -> Snapshot:
        return data

    async def echo(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return request

    pages = MetricsPage(take)
    http = MetricsServer("127.0.0.1", 0, pages.page, lambda: (True, ""))
    await http.start()
    gc.collect()
    gc.freeze()  # as the daemon does once it has started: a full collection would stop all threads for 20 ms
    with tempfile.TemporaryDirectory() as where:
        api = grpc.aio.server()
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
        api.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bench", handlers),))
        api.add_insecure_port(f"unix:{where}/api.sock")
        await api.start()
        measured = await asyncio.gather(
            other_process("--caller", f"unix:{where}/api.sock", arguments.seconds),
            other_process("--scraper", f"http://127.0.0.1:{http.port}/metrics", arguments.seconds),
        )
        await api.stop(None)
    await http.stop()
    await pages.close()
    return measured[0] | measured[1]


async def other_process(role: str, where: str, seconds: float) -> dict[str, list[float]]:
    """Run one of the two below; each has an interpreter of its own, so that they delay neither the server nor one another."""
    command = (sys.executable, __file__, role, where, "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    measured: dict[str, list[float]] = json.loads(output)
    return measured


def scraping() -> bool:
    """Whether this second, by the clock that all processes share, is one of scrapes."""
    return int(time.monotonic()) % 2 == 1


def scraper(url: str, seconds: float) -> dict[str, list[float]]:
    """Scrapes in every other second, with and without gzip."""
    taken: dict[str, list[float]] = {"page": [], "page_gzip": []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not scraping():
            time.sleep(0.01)
            continue
        compress = len(taken["page"]) > len(taken["page_gzip"])
        headers = {"Accept": "application/openmetrics-text;version=1.0.0", **({"Accept-Encoding": "gzip"} if compress else {})}
        began = time.perf_counter()
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            answer.read()
        taken["page_gzip" if compress else "page"].append(time.perf_counter() - began)
        time.sleep(0.05)
    return taken


def caller(socket: str, seconds: float) -> dict[str, list[float]]:
    """Calls all the time."""
    taken: dict[str, list[float]] = {"idle": [], "scraping": []}
    call = grpc.insecure_channel(socket).unary_unary("/Bench/Echo")
    call(b"x", wait_for_ready=True, timeout=10)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        busy = scraping()
        began = time.perf_counter()
        call(b"x", timeout=10)
        taken["scraping" if busy else "idle"].append(time.perf_counter() - began)
        time.sleep(0.002)
    return taken


def median_of(function, times: int) -> float:
    """Median seconds of a function."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def row(name: str, values: list[float]) -> None:
    """One line of the table, milliseconds; the last column counts what took longer than the target for a delay."""
    ordered = sorted(values)
    times = statistics.median(values), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], ordered[-1]
    late = sum(value > DELAY_TARGET for value in values)
    print(f"{name:<40}" + "".join(f"{value * 1e3:>9.2f}" for value in times) + f"{len(values):>8}{late:>8}")


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 seconds instead of 20")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--ops", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--caller", help=argparse.SUPPRESS)
    parser.add_argument("--scraper", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.caller or arguments.scraper:
        taken = caller(arguments.caller, arguments.seconds) if arguments.caller else scraper(arguments.scraper, arguments.seconds)
        print(json.dumps(taken))
        return 0
    arguments.seconds = arguments.seconds or (6 if arguments.quick else 20)

    measured = asyncio.run(serve(arguments))
    reading = read(snapshot(arguments.ranks, arguments.ops), MetricsSettings(), Memory())
    registry = ReadingCollector(reading).registry()
    page = encode(reading, OPENMETRICS)
    same = page == generate_openmetrics(registry) and encode(reading) == generate_latest(registry)
    ours, theirs = median_of(lambda: encode(reading, OPENMETRICS), 5), median_of(lambda: generate_openmetrics(registry), 3)

    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print(f"{arguments.ranks} ranks x {arguments.ops} operations: {page.count(b'pretrain')} series, {len(page) / 1e6:.1f} MB\n")
    print(f"{'milliseconds':<40}{'median':>9}{'p99':>9}{'max':>9}{'n':>8}{'> 20 ms':>8}")
    row("page over HTTP", measured["page"])
    row("page over HTTP, gzip", measured["page_gzip"])
    row("API call, nothing else", measured["idle"])
    row("API call while a page is rendered", measured["scraping"])
    print(f"\nencoding alone: {ours * 1e3:.1f} ms, prometheus_client {theirs * 1e3:.1f} ms, ratio {ours / theirs:.2f}; same bytes: {same}")

    slowest = statistics.median(measured["page"] + measured["page_gzip"])
    ordered = sorted(measured["scraping"])
    delay = ordered[int(len(ordered) * 0.99)] - statistics.median(measured["idle"])
    worst = ordered[-1] - statistics.median(measured["idle"])
    good = same and slowest <= PAGE_TARGET and delay <= DELAY_TARGET
    print(f"page {slowest * 1e3:.0f} ms (target {PAGE_TARGET * 1e3:.0f})")
    print(f"API calls delayed by {delay * 1e3:.1f} ms (p99), {worst * 1e3:.1f} ms (max) (target {DELAY_TARGET * 1e3:.0f})")
    print("reached" if good else "MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
