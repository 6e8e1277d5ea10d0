"""Events.Follow: filters, resume tokens, slow readers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from singularityd.api.limits import Limits
from singularityd.api.v1 import node_pb2 as pb
from singularityd.observe.bus import Bus
from singularityd.observe.recorder import Recorder

from .host import Host, Stubs, eventually, failure_of, make, serving


async def read(stream: Any, count: int) -> list[pb.Event]:
    return [await asyncio.wait_for(stream.read(), 20) for _ in range(count)]


async def collect(stream: Any, kinds: list[str]) -> None:
    async for event in stream:
        kinds.append(event.kind)  # noqa: PERF401 - what came before the failure counts


async def test_follow_tells_what_comes_after_its_headers(host: Host) -> None:
    host.publish("rank_found", text="before")
    async with Stubs(host.control) as stubs:
        stream = stubs.events.Follow(pb.FollowRequest())
        await stream.initial_metadata()
        host.publish("rank_dying", text="now", job="j", rank=0, pid=5, fields={"a": "b"})
        (event,) = await read(stream, 1)
    assert (event.kind, event.text, event.severity, event.rank, event.pid) == ("rank_dying", "now", "error", 0, 5)
    assert event.HasField("rank")
    assert dict(event.fields) == {"a": "b"}
    assert event.token == host.bus.recorder.token(2)


async def test_a_rank_that_is_not_known_is_absent(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        host.publish("rank_found")
        stream = stubs.events.Follow(pb.FollowRequest(from_start=True))
        (event,) = await read(stream, 1)
    assert not event.HasField("rank")
    assert not event.HasField("pid")


async def test_two_streams_that_pass_the_token_on_miss_nothing(host: Host) -> None:
    for number in range(5):
        host.publish("rank_found", text=str(number))
    async with Stubs(host.control) as stubs:
        first = await read(stubs.events.Follow(pb.FollowRequest(from_start=True)), 3)
        host.publish("rank_found", text="5")
        second = await read(stubs.events.Follow(pb.FollowRequest(token=first[-1].token)), 3)
    assert [event.text for event in first + second] == list("012345")


async def test_the_recorded_end_the_stream_where_it_is_not_followed(host: Host) -> None:
    host.publish("rank_found")
    host.publish("fault_hit")
    async with Stubs(host.control) as stubs:
        events = [event async for event in stubs.events.Follow(pb.FollowRequest(from_start=True, no_follow=True, kinds=["fault_hit"]))]
        assert [event.kind for event in events] == ["fault_hit"]
        assert [event async for event in stubs.events.Follow(pb.FollowRequest(token=events[0].token, no_follow=True))] == []
    assert host.bus.subscribers == 0


@pytest.mark.parametrize(
    ("request_", "code", "exit_code"),
    [
        (pb.FollowRequest(token="no token"), "bad_option", "2"),
        (pb.FollowRequest(token="abc123:5"), "resume_lost", "1"),
        (pb.FollowRequest(kinds=["rank_dieing"]), "bad_option", "2"),
        (pb.FollowRequest(token="abc:1", from_start=True), "usage", "2"),
    ],
)
async def test_bad_tokens_and_kinds_are_refused(host: Host, request_: pb.FollowRequest, code: str, exit_code: str) -> None:
    async with Stubs(host.control) as stubs:
        _, metadata, _ = await failure_of(stubs.events.Follow(request_).read())
    assert (metadata["singularity-code"], metadata["singularity-exit"]) == (code, exit_code)
    assert metadata["singularity-hint-bin"]


async def test_a_token_whose_events_are_overwritten_is_refused(tmp_path: Path) -> None:
    host = make(tmp_path)
    host.bus = Bus(Recorder(limit=3))
    host.api = type_api(host)
    await host.api.start()
    try:
        host.publish("rank_found")
        lost = host.bus.recorder.token(1)
        for _ in range(5):
            host.publish("rank_found")
        kept = host.bus.recorder.token(3)
        async with Stubs(host.control) as stubs:
            code, metadata, _ = await failure_of(stubs.events.Follow(pb.FollowRequest(token=lost)).read())
            assert (code, metadata["singularity-code"]) == (grpc.StatusCode.OUT_OF_RANGE, "resume_lost")
            assert len([event async for event in stubs.events.Follow(pb.FollowRequest(token=kept, no_follow=True))]) == 3
            everything = [event.sequence async for event in stubs.events.Follow(pb.FollowRequest(from_start=True, no_follow=True))]
            assert everything == [4, 5, 6]
    finally:
        await host.api.stop(0.1)


def type_api(host: Host) -> Any:
    from singularityd.api.server import ApiServer

    return ApiServer(host.directory, host.ports())


async def test_a_reader_that_goes_away_is_forgotten(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        stream = stubs.events.Follow(pb.FollowRequest())
        await stream.initial_metadata()
        assert host.bus.subscribers == 1
        stream.cancel()
        await eventually(lambda: host.bus.subscribers == 0)
        other = stubs.events.Follow(pb.FollowRequest())
        await other.initial_metadata()
    await eventually(lambda: host.bus.subscribers == 0)


async def test_a_reader_that_stops_reading_loses_its_own_events_and_then_its_stream(tmp_path: Path) -> None:
    window = (("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0))
    async with (
        serving(tmp_path, control=Limits(backlog=50, blocked=1.0)) as host,
        Stubs(host.control, window) as slow,
        Stubs(host.control) as quick,
    ):
        asleep = slow.events.Follow(pb.FollowRequest())
        awake = quick.events.Follow(pb.FollowRequest())
        await asyncio.gather(asleep.initial_metadata(), awake.initial_metadata())
        told = 0
        while host.bus.dropped < 10:  # until the window and the backlog are full
            host.publish("rank_found", text="x" * 2000)
            (event,) = await read(awake, 1)
            told += 1
            assert event.sequence == told < 20_000
        await eventually(lambda: host.bus.subscribers == 1)  # given up
        host.publish("rank_dying", text="still told")
        assert (await read(awake, 1))[0].text == "still told"
        seen: list[str] = []
        code, metadata, _ = await failure_of(collect(asleep, seen))
        assert (code, metadata["singularity-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        assert 0 < seen.count("rank_found") < told


async def test_a_slow_reader_that_wakes_in_time_is_told_exactly_what_it_lost(tmp_path: Path) -> None:
    window = (("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0))
    async with serving(tmp_path, control=Limits(backlog=50)) as host, Stubs(host.control, window) as stubs:
        stream = stubs.events.Follow(pb.FollowRequest())
        await stream.initial_metadata()
        published = 0
        while host.bus.dropped < 10:
            host.publish("rank_found", text="x" * 2000)
            published += 1
            await asyncio.sleep(0)
            assert published < 20_000
        host.publish("rank_dying")
        seen, lost = 0, 0
        async for event in stream:
            if event.kind == "events_dropped":
                lost += int(event.fields["count"])
            elif event.kind == "rank_dying":
                break
            else:
                seen += 1
        assert lost > 0
        assert seen + lost == published


async def test_streams_are_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(streams=2)) as host, Stubs(host.control) as stubs:
        kept = [stubs.events.Follow(pb.FollowRequest()) for _ in range(2)]
        await asyncio.gather(*(stream.initial_metadata() for stream in kept))
        code, metadata, _ = await failure_of(stubs.events.Follow(pb.FollowRequest()).read())
        assert (code, metadata["singularity-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        kept[0].cancel()
        await eventually(lambda: host.bus.subscribers == 1)
        again = stubs.events.Follow(pb.FollowRequest())
        await again.initial_metadata()
        host.publish("rank_found")
        assert (await read(again, 1))[0].kind == "rank_found"
