"""Readings as OTLP metrics, faults and exits as spans. Pure functions."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from singularityd import __version__
from singularityd.model import Event, Fault, Rank
from singularityd.observe.families import BOUNDS, Family
from singularityd.observe.labels import UNKNOWN
from singularityd.observe.reading import Distribution, Reading, Series

SCOPE = InstrumentationScope("singularityd", __version__)

POINTS = 2000
"""Data points in one request: collectors refuse messages above 4 MiB by default."""


def resource(more: dict[str, str]) -> Resource:
    """Who speaks: this daemon on this host."""
    host = socket.gethostname()
    fixed = {"service.name": "singularityd", "service.version": __version__, "service.instance.id": host, "host.name": host}
    return Resource.create({**fixed, **more})


# --- metrics ----------------------------------------------------------------------------------------------------------------


def batches(reading: Reading, who: Resource, at: float) -> Iterator[MetricsData]:
    """The whole reading in requests of at most POINTS points; names, units and values as on the Prometheus page. `at` is Unix time."""
    start, now = _nanoseconds(reading.snapshot.started_at), _nanoseconds(at)
    batch: list[Metric] = []
    room = POINTS
    for family, series in reading.families:
        rest = series
        while rest:
            part, rest = rest[:room], rest[room:]
            batch.append(_metric(family, part, start, now))
            room -= len(part)
            if not room:
                yield _request(batch, who)
                batch, room = [], POINTS
    if batch:
        yield _request(batch, who)


def _request(metrics: list[Metric], who: Resource) -> MetricsData:
    return MetricsData([ResourceMetrics(who, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _metric(family: Family, series: tuple[Series, ...], start: int, now: int) -> Metric:
    data: Histogram | Sum | Gauge
    if family.kind == "histogram":
        data = Histogram([_distribution(family, one, start, now) for one in series], AggregationTemporality.CUMULATIVE)
    elif family.kind == "counter":
        points = [_number(family, one, start, now) for one in series]
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge([_number(family, one, 0, now) for one in series])
    return Metric(family.name, family.help, family.unit, data)


def _number(family: Family, series: Series, start: int, now: int) -> NumberDataPoint:
    assert not isinstance(series.value, Distribution)
    return NumberDataPoint(_attributes(family, series), start, now, series.value)


def _distribution(family: Family, series: Series, start: int, now: int) -> HistogramDataPoint:
    value = series.value
    assert isinstance(value, Distribution)
    counts = [after - before for before, after in zip((0, *value.cumulative), value.cumulative, strict=False)]
    unknown: Any = None  # the kernel does not keep the extremes; OTLP leaves them out
    return HistogramDataPoint(
        _attributes(family, series), start, now, value.cumulative[-1], value.total, counts, BOUNDS, min=unknown, max=unknown
    )


def _attributes(family: Family, series: Series) -> dict[str, str]:
    return dict(zip(family.labels, series.labels, strict=True))


# --- spans ------------------------------------------------------------------------------------------------------------------


def fault_span(fault: Fault, who: Resource) -> ReadableSpan:
    """From when a fault was armed (asked for, if it never was) to its end."""
    start = fault.armed_at or fault.created_at
    attributes: dict[str, str | int | float] = {
        "singularity.fault": fault.id,
        "singularity.job_id": fault.job or fault.spec.job or UNKNOWN,
        "singularity.rank": fault.spec.rank,
        "singularity.pattern": fault.spec.pattern,
        "singularity.point": fault.spec.point,
        "singularity.milliseconds": fault.spec.milliseconds,
        "singularity.probability": fault.spec.probability,
        "singularity.mechanism": fault.mechanism,
        "singularity.hits": fault.hits,
        "singularity.ending": fault.ending,
        "singularity.state": fault.state,
        "singularity.who": fault.who,
    }
    return _span(
        "singularity.fault",
        str(attributes["singularity.job_id"]),
        f"fault {fault.id} {fault.created_at}",
        times=(start, max(start, fault.ended_at)),
        attributes=attributes,
        status=Status(StatusCode.ERROR, fault.ending) if fault.state == "refused" else Status(StatusCode.OK),
        who=who,
    )


def exit_span(event: Event, rank: Rank | None, who: Resource) -> ReadableSpan:
    """The life of a rank's process, from its start by the kernel's clock to its exit; without length where the rank is forgotten."""
    start = _started(rank, event.at) if rank else event.at
    attributes: dict[str, str | int | float] = {
        "singularity.job_id": event.job or UNKNOWN,
        "singularity.rank": UNKNOWN if event.rank is None else event.rank,
        "process.pid": event.pid or 0,
        "singularity.text": event.text,
        **{f"singularity.{name}": value for name, value in event.fields.items()},
    }
    well = event.fields.get("reason", "") in ("code 0", "exit 0", "0")
    status = Status(StatusCode.OK) if well else Status(StatusCode.ERROR, event.text)
    identity = f"exit {event.pid} {event.at}"
    job = str(attributes["singularity.job_id"])
    return _span("singularity.rank", job, identity, times=(start, event.at), attributes=attributes, status=status, who=who)


def _span(
    name: str,
    job: str,
    identity: str,
    *,
    times: tuple[float, float],
    attributes: dict[str, str | int | float],
    status: Status,
    who: Resource,
) -> ReadableSpan:
    """All spans of a job share a trace, whatever host they come from; sending one again after a restart gives it the same id."""
    host = str(who.attributes["host.name"])
    trace = _digest(f"job {job}" if job != UNKNOWN else f"host {host}", 16)
    context = SpanContext(trace, _digest(f"{host} {identity}", 8), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return ReadableSpan(
        name,
        context,
        resource=who,
        attributes=attributes,
        kind=SpanKind.INTERNAL,
        status=status,
        start_time=_nanoseconds(times[0]),
        end_time=_nanoseconds(times[1]),
        instrumentation_scope=SCOPE,
    )


def _started(rank: Rank, exited: float) -> float:
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return min(exited, boot + rank.start_time / os.sysconf("SC_CLK_TCK"))


def _digest(text: str, size: int) -> int:
    """Never 0, which means no id."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big") or 1


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
