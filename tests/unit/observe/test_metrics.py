import asyncio
import gzip
import math
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from singularityd.model import Calls
from singularityd.observe import reference
from singularityd.observe.exposition import OPENMETRICS, TEXT, encode
from singularityd.observe.families import FAMILIES
from singularityd.observe.metrics import MetricsPage, ReadingCollector, render
from singularityd.observe.reading import Memory, distribution, read
from singularityd.observe.settings import MetricsSettings
from singularityd.observe.snapshot import Snapshot

from .samples import fixed, large, rank, stats

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "data" / "metrics.golden"


def samples(page):
    """{(name, labels): value} of a page."""
    return {
        (s.name, frozenset(s.labels.items())): s.value for family in text_string_to_metric_families(page.decode()) for s in family.samples
    }


def value(page, name, /, **labels):
    """The one sample of that name that has these labels."""
    found = [v for (n, have), v in samples(page).items() if n == name and labels.items() <= dict(have).items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def names(page):
    return {(name, dict(labels).get("rank")) for name, labels in samples(page)}


def without_build(page):
    return "\n".join(line for line in page.decode().splitlines() if not line.startswith("singularity_build_info{")) + "\n"


def test_golden_page():
    assert without_build(render(fixed())) == GOLDEN.read_text(), (
        "if the change is meant: PYTHONPATH=daemon:tests/unit python -m observe.test_metrics"
    )


@pytest.mark.parametrize("snapshot", [fixed(), large(3, 4), Snapshot()], ids=["fixed", "large", "empty"])
def test_promtool_finds_nothing(snapshot):
    done = subprocess.run(["promtool", "check", "metrics"], input=render(snapshot), capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


hostile = st.text(st.characters(codec=None), max_size=40)


@given(st.lists(st.tuples(st.integers(1, 4), hostile, hostile, hostile, st.floats(0, 1e12), st.integers(0, 2**60)), max_size=6), hostile)
@settings(max_examples=60)
def test_both_formats_equal_prometheus_clients_byte_for_byte(rows, job):
    calls = tuple(
        stats(pid, comm=comm, op=op, backend=backend, seconds=seconds, calls=n, size=1) for pid, comm, op, backend, seconds, n in rows
    )
    reading = read(Snapshot(calls=Calls(stats=calls), ranks=(rank(1, 0, job=job), rank(2, None, job=job))), MetricsSettings(), Memory())
    registry = ReadingCollector(reading).registry()
    assert encode(reading, TEXT) == generate_latest(registry)
    assert encode(reading, OPENMETRICS) == generate_openmetrics(registry)
    text_string_to_metric_families(encode(reading).decode())
    list(parse_openmetrics(encode(reading, OPENMETRICS).decode()))


@given(st.lists(st.integers(0, 2**40), min_size=28, max_size=28))
def test_histograms_are_exact(buckets):
    result = distribution(buckets, 1.5)
    assert len(result.cumulative) == 15
    for place, count in enumerate(result.cumulative[:14]):
        assert count == sum(buckets[: 2 * place + 1])
    assert result.cumulative[-1] == sum(buckets)


def test_histogram_on_the_page():
    page = render(fixed())
    name = "singularity_collective_seconds"
    labels = {"rank": "0", "op": "allreduce"}
    # 7 ok calls with buckets 0:1 1:2 2:1 26:2 27:1 and one failed call in bucket 21
    expected = {"1e-06": 1, "4e-06": 4, "1.6e-05": 4, "1.048576": 4, "4.194304": 5, "16.777216": 5, "67.108864": 7, "+Inf": 8}
    for bound, count in expected.items():
        assert value(page, f"{name}_bucket", le=bound, **labels) == count
    assert value(page, f"{name}_count", **labels) == 8
    assert value(page, f"{name}_sum", **labels) == 2.125
    # a send of which only the beginning is seen has no duration; an enqueue time is not the collective's
    assert not any(("op", "send") in have for (n, have) in samples(page) if n.startswith(name))
    assert value(page, "singularity_collective_enqueue_seconds_count", rank="3") == 2
    assert not any(("rank", "3") in have for (n, have) in samples(page) if n.startswith(name))


def test_unknown_processes_are_summed_and_never_rank_0():
    page = render(fixed())
    assert value(page, "singularity_collective_calls_total", rank="unknown", op="allreduce") == 3
    assert value(page, "singularity_rank_up", rank="unknown") == 2
    assert value(page, "singularity_collective_calls_total", rank="0", op="allreduce", result="ok") == 7
    assert value(page, "singularity_rank_up", rank="12") == 0


def test_nothing_carries_a_pid():
    numbers = {str(number) for number in (100, 103, 104, 105, 106, 900, 901, 1031, 1032)}
    assert not any(v in numbers for _, labels in samples(render(fixed())) for _, v in labels)


def test_faults_skews_and_flights():
    page = render(fixed())
    assert value(page, "singularity_fault_active", fault="f12", mechanism="ptrace", pattern="timeout", rank="3") == 1
    assert value(page, "singularity_fault_active", fault="f9") == 0
    assert value(page, "singularity_fault_hits_total", fault="f9") == 4
    assert ("singularity_fault_active", "f11") not in {(n, dict(have).get("fault")) for n, have in samples(page)}
    assert value(page, "singularity_collective_in_flight", rank="3") == 2
    assert value(page, "singularity_collective_oldest_in_flight_seconds", rank="3") == 4.5
    assert value(page, "singularity_collective_in_flight", rank="0", op="allreduce") == 0
    assert value(page, "singularity_collective_arrival_skew_seconds", rank="3") == 0.25
    assert value(page, "singularity_capability", name="register_write") == 0
    assert math.isnan(value(page, "singularity_capability", name="lockdown"))
    assert value(page, "singularity_visibility", rank="3", level="enqueue") == 1


class Pages:
    """A run of pages with one memory."""

    def __init__(self, **limits):
        self.memory = Memory()
        self.settings = MetricsSettings(**limits)

    def __call__(self, *calls, ranks=()):
        return encode(read(Snapshot(calls=Calls(stats=calls), ranks=ranks), self.settings, self.memory))


CALLS = "singularity_collective_calls_total"


def test_counter_stays_when_the_process_is_gone_and_ends_with_the_rank():
    pages = Pages()
    assert value(pages(stats(1, calls=5), ranks=(rank(1, 0),)), CALLS) == 5
    gone = rank(1, 0, state="exited")
    assert value(pages(ranks=(gone,)), CALLS) == 5
    assert value(pages(stats(2, calls=2), ranks=(gone, rank(2, 0))), CALLS) == 7
    assert value(pages(stats(2, calls=3), ranks=(rank(2, 0),)), CALLS) == 8
    page = pages()
    assert (CALLS, "0") not in names(page)
    assert value(pages(stats(2, calls=4), ranks=(rank(2, 0),)), CALLS) == 4, "a series that vanished begins anew"


def test_what_an_expired_rank_left_in_the_kernel_is_not_an_unknown_process():
    pages = Pages()
    pages(stats(1, calls=5), ranks=(rank(1, 0),))
    for _ in range(3):
        assert not any(name == CALLS for name, _ in names(pages(stats(1, calls=5))))
    assert value(pages(stats(1, calls=6)), CALLS, rank="unknown") == 6


def test_pid_used_again():
    pages = Pages()
    pages(stats(1, calls=5), ranks=(rank(1, 0),))
    assert value(pages(stats(1, calls=2), ranks=(rank(1, 0, state="exited"), rank(1, 0, start=50))), CALLS) == 7


def test_identified_later():
    pages = Pages()
    assert value(pages(stats(1, calls=5), stats(2, calls=1)), CALLS, rank="unknown") == 6
    page = pages(stats(1, calls=7), stats(2, calls=1), ranks=(rank(1, 3),))
    assert value(page, CALLS, rank="3") == 7
    assert value(page, CALLS, rank="unknown") == 6


life = st.lists(
    st.tuples(st.sampled_from(["call", "exit", "start", "identify", "forget"]), st.integers(0, 3), st.integers(0, 2)), max_size=40
)


@given(life)
def test_counters_never_fall_while_they_are_shown(steps):
    """Processes 0..3 that call, exit, start again under a used pid, and are taken for rank 0..2 or for unknown."""
    pages = Pages()
    counts, known, before = {}, {}, {}
    exited = {}
    for start, (step, pid, number) in enumerate(steps):
        if step == "call":
            counts[pid] = counts.get(pid, 0) + 1
        elif step == "exit" and counts.pop(pid, None) and pid in known:
            exited[start] = rank(pid, known.pop(pid), state="exited", start=start)
        elif step == "start":
            known.pop(pid, None)
            counts[pid] = 1
        elif step == "identify":
            known[pid] = number
        elif step == "forget":
            exited.clear()
        ranks = (*exited.values(), *(rank(pid, number, start=1000) for pid, number in known.items()))
        page = pages(*(stats(pid, calls=n) for pid, n in counts.items()), ranks=ranks)
        now = {key: v for key, v in samples(page).items() if key[0] == CALLS}
        for key in now.keys() & before.keys():
            assert now[key] >= before[key], (step, pid, key)
        before = now


def test_series_cap_cuts_the_same_series_and_counts_them():
    pages = Pages(series=500)
    snapshot = large(16, 12)
    first = pages(*snapshot.calls.stats, ranks=snapshot.ranks)
    second = pages(*snapshot.calls.stats, ranks=snapshot.ranks)
    of_ranks = [key for key in samples(second) if "job_id" in dict(key[1])]
    assert 400 < len(of_ranks) <= 500
    own = ("singularity_series_dropped_total", frozenset())
    assert {**samples(first), own: 0} == {**samples(second), own: 0}
    offered = value(second, "singularity_series")
    shown = len(samples(second)) - 2
    assert value(first, own[0]) == offered - shown
    assert value(second, own[0]) == 2 * (offered - shown)
    assert value(second, "singularity_rank_up", rank="15") == 1, "what is small and tells most is never cut"


def test_hostile_job_ids():
    bad = 'evil"\n} 1\x00\x1b[31m' + "x" * 10_000
    page = render(Snapshot(ranks=(rank(1, 0, job=bad), rank(2, 1, job="\udcff\udcfe"))))
    assert len(page) < 20_000
    assert {r for name, r in names(page) if name == "singularity_rank_up"} == {"0", "1"}
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_page_renders_off_the_loop_and_is_shared():
    taken = []
    release = asyncio.Event()

    async def snapshot():
        taken.append(threading.current_thread() is threading.main_thread())
        await release.wait()
        return fixed()

    pages = MetricsPage(snapshot)
    waiting = [asyncio.create_task(pages.page()) for _ in range(5)]
    impatient = asyncio.create_task(pages.page())
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    release.set()
    results = await asyncio.gather(*waiting)
    assert taken == [True]
    assert {result.body for result in results} == {render(fixed())}
    zipped = await pages.page(openmetrics=True, compress=True)
    assert gzip.decompress(zipped.body).endswith(b"# EOF\n")
    again = await pages.page()
    assert value(again.body, "singularity_scrape_duration_seconds") > 0
    await pages.close()


async def test_loop_stays_quick_while_a_large_page_is_rendered():
    async def snapshot():
        return big

    big = large()
    pages = MetricsPage(snapshot)
    task = asyncio.create_task(pages.page())
    loop = asyncio.get_running_loop()
    lags = []
    while not task.done():
        due = loop.time() + 0.001
        await asyncio.sleep(0.001)
        lags.append(loop.time() - due)
    assert len(lags) > 20, "the loop must run meanwhile, not after"
    assert sorted(lags)[len(lags) // 2] < 0.02
    await pages.close()


@pytest.mark.parametrize("name", reference.PAGES)
def test_reference_pages_are_up_to_date(name):
    assert (ROOT / "docs" / name).read_text() == reference.PAGES[name](), "run: python -m singularityd.observe.reference"


def test_families_are_unique_and_named_by_convention():
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith("singularity_")
        assert family.name.endswith("_total") == (family.kind == "counter")


def test_settings_refuse_nonsense():
    for wrong in ({"port": 70000}, {"series": 0}, {"label_length": 3}, {"prot": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, MetricsSettings)


if __name__ == "__main__":
    GOLDEN.write_text(without_build(render(fixed())))
