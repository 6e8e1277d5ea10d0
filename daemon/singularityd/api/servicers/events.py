"""Events: what happened and what happens."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

from singularityd.api import convert
from singularityd.api.ports import Bus
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc
from singularityd.errors import BadOption, UsageError
from singularityd.model import Event


class Events(node_pb2_grpc.EventsServicer):
    """The recorder and the bus, by wire."""

    def __init__(self, *, bus: Bus, kinds: Mapping[str, str], backlog: int) -> None:
        self._bus = bus
        self._kinds = kinds
        self._backlog = backlog

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.Event]:
        """Everything after the token, then what comes. Headers are sent when nothing that happens from then on is missed.

        Raises BadOption for a token or a kind that is none, ResumeLost for a token whose events are not kept any more.
        """
        kinds = _checked(request.kinds, self._kinds)
        after = self._after(request)
        if request.no_follow:
            await context.send_initial_metadata(())
            for event in self._bus.recorder.since(after):
                if not kinds or event.kind in kinds:
                    yield self._message(event)
            return
        subscription = self._bus.subscribe(after=after, kinds=kinds, limit=self._backlog)
        try:
            await context.send_initial_metadata(())
            async for event in subscription:
                yield self._message(event)
        finally:
            subscription.close()

    def _after(self, request: pb.FollowRequest) -> int:
        if request.token and request.from_start:
            raise UsageError("a token and from_start exclude each other", hint="leave one of them out")
        if request.token:
            return self._bus.recorder.resume(request.token)
        return self._bus.recorder.before_first if request.from_start else self._bus.recorder.last

    def _message(self, event: Event) -> pb.Event:
        return convert.event(event, token=self._bus.recorder.token(event.sequence), severity=self._kinds.get(event.kind, "info"))


def _checked(asked: Collection[str], known: Mapping[str, str]) -> frozenset[str]:
    for kind in asked:
        if kind not in known:
            near = difflib.get_close_matches(kind[:80], known, n=1)
            hint = f"{f'did you mean {near[0]}? ' if near else ''}there are: {', '.join(sorted(known))}"
            raise BadOption(f"{kind[:80]!r} is no kind of event", hint=hint)
    return frozenset(asked)
