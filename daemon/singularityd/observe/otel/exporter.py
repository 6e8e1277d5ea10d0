"""Sends readings every `interval`, and a span for each fault that ended and each rank that exited."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from singularityd.model import Event
from singularityd.observe.bus import Bus, Subscription
from singularityd.observe.log import ChangeLogger
from singularityd.observe.otel.convert import batches, exit_span, fault_span, resource
from singularityd.observe.otel.transport import Transport, connect
from singularityd.observe.reading import Reading
from singularityd.observe.settings import OtelSettings

_SPANS = 1000
"""Spans that wait for a receiver; the oldest give way."""

_GATHER = 0.5
"""Seconds from a fault's end or an exit to its span, so that a job's end is one request."""


class OtelExporter:
    """Loop thread only; what blocks runs in a thread named otel. A receiver that does not answer costs one log line, never an exception."""

    def __init__(self, settings: OtelSettings, *, reading: Callable[[], Awaitable[Reading]], bus: Bus) -> None:
        self._settings = settings
        self._reading, self._bus = reading, bus
        self._transport: Transport = connect(settings)
        self._resource = resource(settings.resource)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="otel")
        self._spans: deque[ReadableSpan] = deque(maxlen=_SPANS)
        self._exits: deque[Event] = deque(maxlen=_SPANS)
        self._told: OrderedDict[str, float] = OrderedDict()
        self._wake = asyncio.Event()
        self._changes = ChangeLogger(structlog.get_logger("otel"))
        self._words = _Words()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Begin to export."""
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._words)
        logger.propagate = False
        self._subscription = self._bus.subscribe(kinds=frozenset({"fault_ended", "fault_refused", "rank_exited"}))
        self._tasks = [
            asyncio.create_task(self._listen(self._subscription), name="otel events"),
            asyncio.create_task(self._run(), name="otel export"),
        ]

    async def stop(self) -> None:
        """Send what there is, for at most the time-out of one export, then close. More calls do nothing."""
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, []
        assert self._subscription is not None
        await asyncio.sleep(0)  # let what was published in this turn reach the listener
        self._subscription.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timeout):
                await self._export(metrics=True)
        self._transport.shutdown()
        self._thread.shutdown(wait=False, cancel_futures=True)
        logger = logging.getLogger("opentelemetry")
        logger.removeHandler(self._words)
        logger.propagate = True

    async def _listen(self, subscription: Subscription) -> None:
        async for event in subscription:
            if event.kind == "rank_exited":
                self._exits.append(event)
            self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            metrics = loop.time() >= due
            if metrics:
                due = loop.time() + self._settings.interval
            await self._export(metrics=metrics)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._wake.wait()
                    await asyncio.sleep(_GATHER)
            self._wake.clear()

    async def _export(self, *, metrics: bool) -> None:
        try:
            reading = await self._reading()
            self._collect(reading)
            problem = await asyncio.get_running_loop().run_in_executor(self._thread, self._send, reading if metrics else None)
        except Exception as error:  # noqa: BLE001 - exporting is a courtesy: whatever goes wrong with it, the daemon goes on
            problem = f"{type(error).__name__}: {error}"
        endpoint = self._settings.endpoint
        if problem:
            self._changes.say("receiver", False, "otel_not_delivered", level="warning", endpoint=endpoint, reason=problem)
        else:
            self._changes.say("receiver", True, "otel_delivered", endpoint=endpoint)

    def _collect(self, reading: Reading) -> None:
        """Turn what ended since the last time into spans. On the loop, so that each is made once."""
        for fault in reading.snapshot.faults:
            if fault.state in ("ended", "refused") and fault.id not in self._told:
                self._told[fault.id] = fault.created_at
                self._spans.append(fault_span(fault, self._resource))
        while len(self._told) > 10 * _SPANS:
            self._told.popitem(last=False)
        ranks = {rank.pid: rank for rank in reading.snapshot.ranks}
        while self._exits:
            event = self._exits.popleft()
            self._spans.append(exit_span(event, ranks.get(event.pid or 0), self._resource))

    def _send(self, reading: Reading | None) -> str:
        """Blocking, in the thread otel. Returns what went wrong, or an empty text. Stops at the first failure."""
        self._words.clear()
        if spans := list(self._spans):
            if self._transport.spans.export(spans) is not SpanExportResult.SUCCESS:
                return self._words.said or "the spans were not taken"
            sent = set(map(id, spans))
            while self._spans and id(self._spans[0]) in sent:  # the oldest may have given way meanwhile
                self._spans.popleft()
        for batch in batches(reading, self._resource, time.time()) if reading else ():
            if self._transport.metrics.export(batch) is not MetricExportResult.SUCCESS:
                return self._words.said or "the metrics were not taken"
        return ""


class _Words(logging.Handler):
    """Keeps what the SDK says while it exports, which alone tells why an export failed, and spares the log its repetitions."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: deque[str] = deque(maxlen=4)

    def clear(self) -> None:
        """Before an export."""
        self._said.clear()

    @property
    def said(self) -> str:
        """At most 500 characters, the first message first: it names the cause, the later ones that it was given up."""
        return "; ".join(self._said)[:500]

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())
