"""What a client may ask for, how often and for how long."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import msgspec

from singularityd.errors import Busy


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one socket. grpc does not tell the connections of a unix socket apart (`peer()` is `unix:` for all of them), so what is
    counted is the socket's whole traffic, and on the agent's socket each process too."""

    largest_request: int = 64 << 10
    """Bytes."""
    largest_answer: int = 4 << 20
    """Bytes."""
    streams_per_connection: int = 64
    """Concurrent calls of one connection. A client does not wait for a place: grpc fails what is beyond with UNAVAILABLE (measured with
    grpcio 1.85.3), which looks like a daemon that is gone, so this is far above what any client of ours needs."""
    calls: int = 256
    """Concurrent calls of the socket."""
    streams: int = 64
    """Concurrent event streams of the socket."""
    health_streams: int = 16
    """Concurrent health watches of the socket: apart from the event streams, for they need no known process to be opened."""
    rate: float = 50.0
    """Calls each second, sustained."""
    rate_of_user: bool = True
    """Whether `rate` and `burst` are of each proven user, and of all others together; else of the whole socket."""
    burst: int = 100
    """Calls at once."""
    patience: float = 30.0
    """Seconds until a unary call is ended by the server."""
    longest_wait: float = 3600.0
    """Seconds until a call that waits for something is ended, whatever deadline its client sets."""
    blocked: float = 60.0
    """Seconds that a stream's reader may take nothing."""
    backlog: int = 1024
    """Events that wait for a slow reader; the oldest are dropped then."""
    keepalive: float = 20.0
    """Seconds of silence after which a connection is asked whether it lives; it has twice as long to answer."""
    handshake: float = 5.0
    """Seconds that a new connection has to speak HTTP/2."""


AGENT = Limits(largest_answer=1 << 20, calls=2048, streams=256, rate=2000.0, burst=4000, rate_of_user=False)
"""Of the agent's socket: every rank of the host at once, each with little to say."""


class Bucket:
    """A token bucket. Loop thread only."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    def take(self) -> bool:
        """Whether one more is allowed now."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Buckets:
    """A bucket for each of many; those not used for longest are forgotten first. Loop thread only."""

    def __init__(self, rate: float, burst: int, most: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self._new: Callable[[], Bucket] = lambda: Bucket(rate, burst, clock)
        self._most = most
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def take(self, key: Hashable) -> bool:
        """Whether one more is allowed to this one now."""
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._new()
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket.take()


class Places:
    """A number of places, each taken for the length of a `with`. Loop thread only."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self.taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Raises Busy when all are taken."""
        if self.taken >= self._most:
            raise Busy(f"{self._most} {self._what} are open already", hint="end one of them")
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
