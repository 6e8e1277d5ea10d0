"""The latest events, bounded in number and in memory, each with a number; and the tokens by which a client goes on where it stopped."""

from __future__ import annotations

import re
import secrets
from collections import deque
from itertools import islice

import msgspec

from singularityd.errors import BadOption, ResumeLost
from singularityd.model import Event

_EVENT_BYTES = 600
"""What an event costs beside its texts."""
_TOKEN = re.compile(r"([0-9a-f]{1,32}):([0-9]{1,18})")


class Recorder:
    """Keeps the newest `limit` events, fewer where they take more than about `memory` bytes, numbered from 1 without gaps.

    Loop thread only. Any process of the host may report events of many kilobytes; their number alone would bound nothing.

    Numbers begin anew with each start of the daemon, so a token names the incarnation too: "INCARNATION:SEQUENCE". It is the boundary
    after which a client continues, whatever filter it used.
    """

    def __init__(self, limit: int = 10_000, *, memory: int = 16 << 20, incarnation: str = "") -> None:
        if limit < 1:
            raise ValueError("a recorder keeps at least one event")
        self.incarnation = incarnation or secrets.token_hex(6)
        self._limit = limit
        self._memory = memory
        self._used = 0
        self._events: deque[Event] = deque()
        self._last = 0

    @property
    def last(self) -> int:
        """The newest event's number; 0 before there is one."""
        return self._last

    @property
    def before_first(self) -> int:
        """The number after which everything is kept: `since(before_first)` never raises."""
        return self._last - len(self._events)

    def append(self, event: Event) -> Event:
        """Number an event and keep it; returns it with its number."""
        self._last += 1
        numbered = msgspec.structs.replace(event, sequence=self._last)
        self._events.append(numbered)
        self._used += _size(numbered)
        while len(self._events) > self._limit or (self._used > self._memory and len(self._events) > 1):
            self._used -= _size(self._events.popleft())
        return numbered

    def since(self, sequence: int) -> list[Event]:
        """All events after a number, oldest first.

        Raises ResumeLost when some of them are no longer kept, or when the number has not been given out yet.
        """
        behind = self._last - sequence
        if behind < 0 or behind > len(self._events):
            raise ResumeLost(
                f"the events after {sequence} are not kept: this daemon has {self._kept()}",
                hint="follow without a resume token, and count what lies between as missed",
            )
        return list(islice(self._events, len(self._events) - behind, None))

    def _kept(self) -> str:
        return f"{self._events[0].sequence} to {self._last}" if self._events else "none yet"

    def token(self, sequence: int) -> str:
        """The token to resume after an event."""
        return f"{self.incarnation}:{sequence}"

    def resume(self, token: str) -> int:
        """The number in a token. Raises BadOption for what is no token and ResumeLost for one of another incarnation."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise BadOption(f"{token[:80]!r} is no resume token", hint="a token looks like 3f2a9c01d4e8:1234 and comes with each event")
        if match[1] != self.incarnation:
            raise ResumeLost(
                "the resume token is of an earlier start of the daemon, whose events are not kept",
                hint="follow without a resume token, and count what lies between as missed",
            )
        return int(match[2])


def _size(event: Event) -> int:
    """About as many bytes as it takes."""
    return _EVENT_BYTES + len(event.text) + len(event.job) + sum(len(key) + len(value) + 120 for key, value in event.fields.items())
