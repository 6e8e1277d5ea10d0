"""What people reported of other tools on this job (docs/reports.md), each against the real daemon and kernel.

The library and its callers are those of workshop.py.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from conftest import Daemon, until
from workshop import Workshop


def test_reports_1_and_2_the_functions_are_inside_another_library(workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library("libtorch_cuda_with_everything.so")
    job, *_ = workshop.call(library, 31)
    workshop.done()
    assert counted(job) == 31


def test_report_3_two_copies_of_two_versions_are_told_apart(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    older, newer = workshop.library("a.so", "2.18.3"), workshop.library("b.so", "2.99.1")
    first, second = workshop.call(older, 13), workshop.call(newer, 17)
    workshop.done()
    assert (counted(first.job), counted(second.job)) == (13, 17)
    rows = {row["job"]: row["libraries"][0]["version"] for row in daemon.json("ranks")["ranks"]}
    assert (rows[first.job], rows[second.job]) == ("2.18.3", "2.99.1")


def test_report_4_the_path_exists_only_in_the_ranks_mount_namespace(workshop: Workshop, counted: Callable[..., float]) -> None:
    inside = workshop.place / "inside"
    inside.mkdir()
    library = workshop.library()
    script = f'mount -t tmpfs none {inside} && cp {library} {inside}/only-here.so && exec "$@"'
    job, *_ = workshop.call(inside / "only-here.so", 19, "unshare", "--mount", "sh", "-c", script, "sh")
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
        jobs.append(workshop.call(merged / library.name, 23, "unshare", "--mount", "sh", "-c", mount + 'exec "$@"', "sh").job)
    bound = workshop.place / "bound.so"
    bound.touch()
    bind = f'mount --bind {library} {bound} && exec "$@"'
    jobs.append(workshop.call(bound, 29, "unshare", "--mount", "sh", "-c", bind, "sh").job)
    jobs.append(workshop.call(library, 37).job)
    workshop.done()
    assert [counted(job) for job in jobs] == [23, 23, 29, 37]


def test_report_8_a_library_loaded_later_is_found(workshop: Workshop, counted: Callable[..., float]) -> None:
    job, *_ = workshop.call(workshop.library(), 11, load=5.0)
    workshop.done()
    assert counted(job) == 11


def test_report_12_lost_records_are_counted(workshop: Workshop) -> None:
    own = Daemon("kernel.event_pages=1", "kernel.guard=false", "kernel.slow_call=0.000000001").start()
    workshop.daemon = own
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
    job, *_ = workshop.call(library, 41)
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
    caller = workshop.call(workshop.library(), 1_000_000_000)
    workshop.begin(caller)
    job = caller.job
    assert daemon.ctl("inject", "--job", job, "--rank", "0", "timeout", "--for", "20s").returncode == 0
    until(lambda: daemon.metric("singularity_collective_oldest_in_flight_seconds", job_id=job) > 1.5, 20)
    assert daemon.metric("singularity_collective_in_flight", job_id=job) == 1
    assert daemon.ctl("clear", "all").returncode == 0


def test_report_20_one_rank_that_cannot_be_read_hides_no_other(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    (workshop.place / "broken.so").write_bytes(b"\x7fELF" + os.urandom(5000))
    job, *_ = workshop.call(workshop.library(), 43)
    workshop.done()
    assert counted(job) == 43
    assert "singularity_build_info" in daemon.page()


def test_replaced_and_deleted_libraries_are_still_watched(workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library()
    before = workshop.call(library, 3)
    until(lambda: str(library) in Path(f"/proc/{before.pid}/maps").read_text(), 20)
    library.unlink()
    after = workshop.call(workshop.library(), 5)
    workshop.done()
    assert (counted(before.job), counted(after.job)) == (3, 5)
