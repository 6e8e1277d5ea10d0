"""The Prometheus page: a fresh collector for each scrape, rendered off the event loop."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from singularityd.observe.exposition import OPENMETRICS, TEXT, Format, encode
from singularityd.observe.families import BOUNDS, Family
from singularityd.observe.pace import Pace
from singularityd.observe.reading import Distribution, Memory, Reading, Series, read
from singularityd.observe.settings import MetricsSettings
from singularityd.observe.snapshot import Snapshot

DEFAULTS = MetricsSettings()


def render(snapshot: Snapshot, *, limits: MetricsSettings = DEFAULTS, form: Format = TEXT) -> bytes:
    """The page of one snapshot by itself; for a series of them, whose counters must not fall, use MetricsPage. Any thread."""
    return encode(read(snapshot, limits, Memory()), form)


class ReadingCollector(Collector):
    """A reading for prometheus_client: for embedding it in another registry, and the reference for our own encoder.

    Made afresh for each reading, so that a series that vanished is gone from the next page.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, in its thread."""
        for family, series in self._reading.families:
            yield _metric(family, series)

    def registry(self) -> CollectorRegistry:
        """A registry of its own that holds only this."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


def _metric(family: Family, series: tuple[Series, ...]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in series:
            assert isinstance(value, Distribution)
            bounds = map(floatToGoString, (*BOUNDS, float("inf")))
            histogram.add_metric(labels, list(zip(bounds, value.cumulative, strict=True)), value.total)
        return histogram
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, family.help, labels=family.labels)
    for labels, value in series:
        assert not isinstance(value, Distribution)
        metric.add_metric(labels, value)
    return metric


class Page(NamedTuple):
    """A rendered page as it goes over the wire."""

    body: bytes
    content_type: str
    encoding: str
    """`gzip`, or empty."""


class MetricsPage:
    """Takes snapshots and renders them, one at a time, in a thread of its own.

    The only holder of the counters' memory: the OTLP export reads through `reading` too, so that snapshots are always folded in the
    order in which they were taken. Loop thread only.
    """

    def __init__(self, snapshot: Callable[[], Awaitable[Snapshot]], settings: MetricsSettings = DEFAULTS) -> None:
        self._snapshot = snapshot
        self._settings = settings
        self._memory = Memory()
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._rendering: dict[tuple[bool, bool], asyncio.Task[Page]] = {}

    async def reading(self) -> Reading:
        """A reading of now."""
        async with self._turn:
            snapshot = await self._snapshot()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, read, snapshot, self._settings, self._memory, Pace())

    async def page(self, *, openmetrics: bool = False, compress: bool = False) -> Page:
        """The page of now; those who ask while one is being rendered get that one. A caller's cancellation does not end it."""
        key = (openmetrics, compress)
        task = self._rendering.get(key)
        if task is None:
            task = self._rendering[key] = asyncio.create_task(self._render(*key), name="metrics page")
            task.add_done_callback(lambda _: self._rendering.pop(key, None))
        return await asyncio.shield(task)

    async def _render(self, openmetrics: bool, compress: bool) -> Page:
        began = time.perf_counter()
        reading = await self.reading()
        form = OPENMETRICS if openmetrics else TEXT
        body = await asyncio.get_running_loop().run_in_executor(self._thread, _write, reading, form, compress)
        self._memory.duration = time.perf_counter() - began
        return Page(body, form.content_type, "gzip" if compress else "")

    async def close(self) -> None:
        """Wait for what is being rendered, then end the thread."""
        await asyncio.gather(*self._rendering.values(), return_exceptions=True)
        self._thread.shutdown(wait=False)


def _write(reading: Reading, form: Format, compress: bool) -> bytes:
    body = encode(reading, form, Pace())
    # zlib lets go of the interpreter while it works; level 1 is a third of the default's time for a tenth more bytes
    return gzip.compress(body, compresslevel=1, mtime=0) if compress else body
