"""Hands each event to everybody who listens, without ever waiting for one of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator

from singularityd.model import Event
from singularityd.observe.kinds import BY_NAME
from singularityd.observe.recorder import Recorder


class Bus:
    """Publishes events to the recorder and to the subscriptions. Loop thread only, but for `publish_threadsafe`."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self._subscriptions: list[Subscription] = []
        self._thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dropped_by_closed = 0

    def publish(self, event: Event) -> Event:
        """Number the event, keep it, offer it to all subscriptions. Returns it with its number; never blocks."""
        self._assert_loop_thread()
        assert event.kind in BY_NAME, f"event kind {event.kind!r} is not listed in observe.kinds"
        numbered = self.recorder.append(event)
        for subscription in self._subscriptions:
            subscription.offer(numbered)
        return numbered

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say which loop `publish_threadsafe` hands over to; done by itself where the bus is used inside a running loop."""
        self._loop = loop

    def publish_threadsafe(self, event: Event) -> None:
        """Publish from any thread, a moment later; dropped without a word when the loop has ended. Raises RuntimeError before `bind`."""
        if self._loop is None:
            raise RuntimeError(
                "publish_threadsafe was called before the bus knew its loop: call bind() or subscribe() on the loop thread first"
            )
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.publish, event)

    def subscribe(self, *, after: int | None = None, kinds: frozenset[str] = frozenset(), limit: int = 1024) -> Subscription:
        """Listen from now on, or from after an event's number; all kinds, or those named.

        Raises ResumeLost when events after `after` are no longer kept. Nothing is lost or told twice between the kept events and the
        live ones.
        """
        self._assert_loop_thread()
        kept = [] if after is None else self.recorder.since(after)
        subscription = Subscription(self, kept, kinds, limit)
        self._subscriptions.append(subscription)
        return subscription

    @property
    def subscribers(self) -> int:
        """How many listen."""
        return len(self._subscriptions)

    @property
    def waiting(self) -> int:
        """Events that wait for the slowest subscriber."""
        return max((subscription.waiting for subscription in self._subscriptions), default=0)

    @property
    def dropped(self) -> int:
        """Events that slow subscribers have lost since the start."""
        return self._dropped_by_closed + sum(subscription.dropped for subscription in self._subscriptions)

    def forget(self, subscription: Subscription) -> None:
        """Called by Subscription.close."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._dropped_by_closed += subscription.dropped

    def _assert_loop_thread(self) -> None:
        if __debug__:
            here = threading.get_ident()
            assert here == self._thread, "the bus belongs to the loop thread; from another thread use publish_threadsafe"
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                return


class Subscription(AsyncIterator[Event]):
    """One listener's events in order. Loop thread only; one task iterates at a time.

    Holds at most `limit` events that arrived while the listener was busy. When one more arrives the oldest is dropped, and the listener
    is told in its place, once for the whole gap, by an event of kind `events_dropped` whose field `count` is exact. That notice carries
    the number of the last event lost, so that resuming after it is right.
    """

    def __init__(self, bus: Bus, kept: list[Event], kinds: frozenset[str], limit: int) -> None:
        if limit < 1:
            raise ValueError("a subscription holds at least one event")
        self._bus = bus
        self._kinds = kinds
        self._limit = limit
        self._kept = deque(event for event in kept if not kinds or event.kind in kinds)
        self._queue: deque[Event] = deque()
        self._gap = 0
        self._lost: Event | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self.dropped = 0
        """Events this listener has lost."""

    @property
    def waiting(self) -> int:
        """Events that arrived and were not taken yet."""
        return len(self._queue)

    def offer(self, event: Event) -> None:
        """Called by the bus for each event; never blocks."""
        if self._kinds and event.kind not in self._kinds:
            return
        if len(self._queue) >= self._limit:
            self._lost = self._queue.popleft()
            self._gap += 1
            self.dropped += 1
        self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        """Stop listening; iteration ends at once. More calls do nothing."""
        self._closed = True
        self._bus.forget(self)
        self._wake.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            event = self._take()
            if event is not None:
                return event
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    def _take(self) -> Event | None:
        if self._kept:
            return self._kept.popleft()
        if self._lost is not None:
            notice, self._lost, self._gap = _notice(self._lost, self._gap), None, 0
            return notice
        return self._queue.popleft() if self._queue else None


def _notice(last: Event, count: int) -> Event:
    noun = "event is" if count == 1 else "events are"
    return Event(
        kind="events_dropped",
        at=time.time(),
        sequence=last.sequence,
        text=f"{count} {noun} missing here: this reader was too slow",
        fields={"count": str(count), "buffer": "subscriber"},
    )
