"""What people reported of other tools on this job (docs/reports.md), each against the real daemon and kernel.

The library is compiled here: NCCL's names and version string over functions that only return a code. The programs are real processes
that dlopen it; counts are compared exactly.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Daemon, free_port, until

LIBRARY = r"""
#include <stddef.h>
const char version[] = "NCCL version VERSION+cuda12.9";
__attribute__((noinline)) int ncclAllReduce(const void *a, void *b, size_t n, int t, int o, void *c, void *s) { __asm__(""); return 0; }
__attribute__((noinline)) int ncclGroupStart(void) { __asm__(""); return 0; }
"""
CALLER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/wait.h>
/* caller LIBRARY CALLS WAIT_BEFORE_DLOPEN WAIT_BEFORE_CALLS FORKS: says "loaded", calls, in forked children too, says "done" */
int main(int argc, char **argv) {
    usleep(atof(argv[3]) * 1e6);
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) { puts(dlerror()); return 1; }
    int (*call)(const void *, void *, size_t, int, int, void *, void *) = dlsym(library, "ncclAllReduce");
    puts("loaded"); fflush(stdout);
    usleep(atof(argv[4]) * 1e6);
    for (int i = 0; i < atoi(argv[5]); i++) if (fork() == 0) {
        for (int j = 0; j < atoi(argv[2]); j++) call(0, 0, 8, 7, 0, 0, 0);
        _exit(0);
    }
    for (int j = 0; j < atoi(argv[2]); j++) call(0, 0, 8, 7, 0, 0, 0);
    while (wait(0) > 0);
    puts("done"); fflush(stdout);
    sleep(60);
    return 0;
}
"""


class Workshop:
    """Compiles, starts and ends."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.processes: list[subprocess.Popen[str]] = []
        (place / "caller.c").write_text(CALLER)
        subprocess.run(["gcc", "-O1", "-o", str(place / "caller"), str(place / "caller.c"), "-ldl"], check=True)

    def library(self, name: str = "libnccl.so.2", version: str = "2.99.1", folder: Path | None = None) -> Path:
        source, result = self.place / "library.c", (folder or self.place) / name
        source.write_text(LIBRARY.replace("VERSION", version))
        subprocess.run(["gcc", "-O1", "-g", "-shared", "-fPIC", "-o", str(result), str(source)], check=True)
        return result

    def call(self, library: Path, calls: int, *prefix: str, load: float = 0.0, wait: float = 2.0, forks: int = 0) -> tuple[str, int]:
        """Start a caller that is rank 0 of a job of its own; (job, pid)."""
        port = str(free_port())
        environment = dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        words = [*prefix, str(self.place / "caller"), str(library), str(calls), str(load), str(wait), str(forks)]
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return f"tcp-127.0.0.1:{port}", process.pid

    def done(self) -> None:
        """Wait until every caller has made its calls."""
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
            assert process.stdout.readline() == "done\n"

    def close(self) -> None:
        for process in self.processes:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
            process.kill()
            process.wait()


@pytest.fixture
def workshop() -> Iterator[Workshop]:
    place = Path(tempfile.mkdtemp(prefix="singularity-reports-"))
    place.chmod(0o755)
    shop = Workshop(place)
    yield shop
    shop.close()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def counted(daemon: Daemon) -> Callable[..., float]:
    def count(job: str, **labels: str) -> float:
        return daemon.metric("singularity_collective_calls_total", job_id=job, op="allreduce", **labels)

    return count


def test_reports_1_and_2_the_functions_are_inside_another_library(workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library("libtorch_cuda_with_everything.so")
    job, _ = workshop.call(library, 31)
    workshop.done()
    assert counted(job) == 31


def test_report_3_two_copies_of_two_versions_are_told_apart(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    older, newer = workshop.library("a.so", "2.18.3"), workshop.library("b.so", "2.99.1")
    first, second = workshop.call(older, 13), workshop.call(newer, 17)
    workshop.done()
    assert (counted(first[0]), counted(second[0])) == (13, 17)
    rows = {row["job"]: row["libraries"][0]["version"] for row in daemon.json("ranks")["ranks"]}
    assert (rows[first[0]], rows[second[0]]) == ("2.18.3", "2.99.1")


def test_report_4_the_path_exists_only_in_the_ranks_mount_namespace(workshop: Workshop, counted: Callable[..., float]) -> None:
    inside = workshop.place / "inside"
    inside.mkdir()
    library = workshop.library()
    script = f'mount -t tmpfs none {inside} && cp {library} {inside}/only-here.so && exec "$@"'
    job, _ = workshop.call(inside / "only-here.so", 19, "unshare", "--mount", "sh", "-c", script, "sh")
    workshop.done()
    assert not (inside / "only-here.so").exists()
    assert counted(job) == 19


def test_reports_5_and_6_one_file_below_two_overlays_and_a_bind_mount_is_counted_once(
    workshop: Workshop, counted: Callable[..., float]
) -> None:
    lower = workshop.place / "lower"
    lower.mkdir()
    library = workshop.library(folder=lower)
    # overlayfs needs an upper directory on a file system that it can write to; the test's own may be an overlay itself
    jobs = []
    for name in ("one", "two"):
        merged, scratch = workshop.place / name, workshop.place / f"{name}-scratch"
        merged.mkdir()
        scratch.mkdir()
        mount = f"mount -t tmpfs none {scratch} && mkdir {scratch}/u {scratch}/w && "
        mount += f"mount -t overlay overlay -o lowerdir={lower},upperdir={scratch}/u,workdir={scratch}/w {merged} && "
        jobs.append(workshop.call(merged / library.name, 23, "unshare", "--mount", "sh", "-c", mount + 'exec "$@"', "sh")[0])
    bound = workshop.place / "bound.so"
    bound.touch()
    bind = f'mount --bind {library} {bound} && exec "$@"'
    jobs.append(workshop.call(bound, 29, "unshare", "--mount", "sh", "-c", bind, "sh")[0])
    jobs.append(workshop.call(library, 37)[0])
    workshop.done()
    assert [counted(job) for job in jobs] == [23, 23, 29, 37]


def test_report_8_a_library_loaded_later_is_found(workshop: Workshop, counted: Callable[..., float]) -> None:
    job, _ = workshop.call(workshop.library(), 11, load=5.0, wait=4.0)
    workshop.done()
    assert counted(job) == 11


def test_report_12_lost_records_are_counted(workshop: Workshop) -> None:
    own = Daemon("kernel.event_pages=1", "kernel.guard=false", "kernel.slow_call=0.000000001").start()
    try:
        workshop.call(workshop.library(), 30_000)
        workshop.done()
        time.sleep(2)
        names = ("submitted", "received", "dropped")
        submitted, received, dropped = (own.metric(f"singularity_events_{name}_total", buffer="events") for name in names)
        assert submitted > 30_000
        assert received + dropped == submitted
    finally:
        own.stop()


def test_report_13_a_stripped_library_is_watched(workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library()
    subprocess.run(["strip", "--strip-all", str(library)], check=True)
    job, _ = workshop.call(library, 41)
    workshop.done()
    assert counted(job) == 41


def test_report_14_children_are_counted_too(daemon: Daemon, workshop: Workshop) -> None:
    def all_calls() -> float:
        return daemon.metric("singularity_collective_calls_total", op="allreduce", backend="nccl")

    before = all_calls()
    workshop.call(workshop.library(), 7, forks=3)
    workshop.done()
    assert all_calls() - before == 4 * 7


def test_report_15_a_hang_shows_while_it_lasts(daemon: Daemon, workshop: Workshop) -> None:
    job, pid = workshop.call(workshop.library(), 1_000_000_000, wait=3.0)
    until(lambda: any(row["job"] == job for row in daemon.json("ranks")["ranks"]), 30)
    assert daemon.ctl("inject", "--job", job, "--rank", "0", "timeout", "--for", "20s").returncode == 0
    until(lambda: daemon.metric("singularity_collective_oldest_in_flight_seconds", job_id=job) > 1.5, 20)
    assert daemon.metric("singularity_collective_in_flight", job_id=job) == 1
    assert daemon.ctl("clear", "all").returncode == 0
    del pid


def test_report_20_one_rank_that_cannot_be_read_hides_no_other(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    (workshop.place / "broken.so").write_bytes(b"\x7fELF" + os.urandom(5000))
    job, _ = workshop.call(workshop.library(), 43)
    workshop.done()
    assert counted(job) == 43
    assert "singularity_build_info" in daemon.page()


def test_replaced_and_deleted_libraries_are_still_watched(workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library()
    before, _ = workshop.call(library, 3, wait=6.0)
    time.sleep(1)
    library.unlink()
    after, _ = workshop.call(workshop.library(), 5, wait=4.0)
    workshop.done()
    assert (counted(before), counted(after)) == (3, 5)
