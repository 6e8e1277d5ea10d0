"""Probes stay on a library as long as it is of use, and no longer: they hold its mount, and belong to the very bytes of the file."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Daemon, until
from workshop import Workshop


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    running = Daemon("kernel.linger=1s")
    try:
        yield running.start()
    finally:
        running.stop()


@pytest.fixture
def mount(workshop: Workshop) -> Iterator[Path]:
    place = workshop.place / "mounted"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    yield place
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", "-l", str(place)], check=True, stderr=subprocess.DEVNULL)


def attached(daemon: Daemon) -> float:
    return daemon.metric("singularity_probes_attached", backend="nccl")


def test_a_mount_is_free_once_its_jobs_have_ended(daemon: Daemon, workshop: Workshop, mount: Path) -> None:
    library = workshop.library(folder=mount)
    workshop.call(library, 3)
    workshop.done()
    assert attached(daemon) == 2

    workshop.end()

    until(lambda: attached(daemon) == 0, 20)
    subprocess.run(["umount", str(mount)], check=True)


def test_a_later_job_of_the_same_file_is_probed_anew(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library()
    for calls in (3, 5):
        caller = workshop.call(library, calls)
        workshop.done()
        assert counted(caller.job) == calls
        workshop.end()
        until(lambda: attached(daemon) == 0, 20)


def test_a_file_that_somebody_maps_keeps_its_probes(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    library = workshop.library()
    long, short = workshop.call(library, 7), workshop.call(library, 3)
    workshop.done(short)
    short.process.kill()
    time.sleep(4)

    workshop.done(long)

    assert counted(long.job) == 7


def test_a_file_that_is_written_in_place_loses_its_probes_before_anybody_maps_it(
    daemon: Daemon, workshop: Workshop, counted: Callable[..., float]
) -> None:
    library = workshop.library()
    first = workshop.call(library, 3)
    workshop.done()
    assert counted(first.job) == 3
    # The same inode, other code at every offset: a breakpoint of before would tear an instruction.
    other = workshop.library("other.so", version="2.99.2", padding=40)
    with library.open("r+b") as file:
        file.write(other.read_bytes())
        file.truncate()
    until(lambda: attached(daemon) == 0, 5)
    assert first.process.poll() is None, "it maps the file still: this was no detaching for want of users"
    assert any("written to in place" in event["text"] for event in daemon.events("attach_failed"))

    second = workshop.call(library, 5)
    workshop.done(second)

    assert counted(second.job) == 5
    versions = {row["job"]: row["libraries"][0]["version"] for row in daemon.json("ranks")["ranks"] if row["libraries"]}
    assert versions[second.job] == "2.99.2"


def test_images_of_many_jobs(daemon: Daemon, workshop: Workshop, counted: Callable[..., float]) -> None:
    """Each job in an image of its own, as a queue of containers has it: the numbers of the first are another's later."""
    for turn in range(2):
        callers = [workshop.call(workshop.library(f"image{turn}{number}.so"), number + 2) for number in range(5)]
        workshop.done()
        assert [counted(caller.job) for caller in callers] == [2, 3, 4, 5, 6]
        workshop.end()
        until(lambda: attached(daemon) == 0, 20)
