"""Malformed, oversized, too often, too slow, and defects of our own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from singularityd.api.limits import Bucket, Buckets, Limits, Places
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import Busy

from .host import JOB, Host, Stubs, eventually, failure_of, serving

INJECT = pb.InjectRequest(rank=3, pattern="timeout")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def still_serves(host: Host) -> None:
    for path in (host.control, host.agent):
        async with Stubs(path) as stubs:
            request = pb.ReportRequest(pid=4203, start_time_ticks=9203, kind="round")
            await stubs.agent.Report(request)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100_000,
        b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 200,
        PREFACE,
        PREFACE + b"\0\0\0\x04\0\0\0\0\0" + b"\xff\xff\xff\x00\xff\xff\xff\xff\xff" * 50,
        random.Random(1).randbytes(200_000),
        PREFACE + b"\0\0\0\x04\0\0\0\0\0" + random.Random(2).randbytes(200_000),
    ],
    ids=["nothing", "zeros", "http1", "tls", "preface", "frames", "noise", "noise-after-preface"],
)
async def test_garbage_on_the_sockets_disturbs_nobody(host: Host, data: bytes) -> None:
    def send(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
            client.settimeout(2)
            client.connect(path)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass

    await asyncio.gather(*(asyncio.to_thread(send, path) for path in (host.control, host.agent) for _ in range(5)))
    await still_serves(host)


async def test_a_connection_that_says_nothing_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, agent=Limits(handshake=0.3)) as host:
        reader, writer = await asyncio.open_unix_connection(host.agent)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.wait_for(reader.read(65536), 10):
                pass
        writer.close()


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\xff\xfe", b"\x22\x04\x0a\x02\xc3\x28"])
async def test_a_message_that_is_no_protobuf_is_a_usage_error_without_our_words(host: Host, data: bytes) -> None:
    async with Stubs(host.control) as stubs:
        for method in ("/singularity.node.v1.Faults/Inject", "/singularity.node.v1.Faults/Get"):
            if method.endswith("Get") and data[0] in (0x12, 0x22):
                continue  # a field that Get does not have
            code, metadata, text = await failure_of(stubs.channel.unary_unary(method)(data))
            assert (code, metadata["singularity-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "usage")
            assert text.startswith("the request is malformed")
            assert "google" not in text
            assert "DecodeError" not in text
        stream = stubs.channel.unary_stream("/singularity.node.v1.Events/Follow")(b"\xff\xff\xff")
        assert (await failure_of(stream.read()))[1]["singularity-code"] == "usage"
    await still_serves(host)
    assert not host.faults.asked


@pytest.mark.parametrize("size", [65_536 + 1, 10 << 20])
async def test_a_message_that_is_too_large_is_refused_before_it_is_read(host: Host, size: int) -> None:
    for path in (host.control, host.agent):
        async with Stubs(path) as stubs:
            request = pb.ReportRequest(pid=4203, start_time_ticks=9203, kind="round", text="x" * size)
            code, _, text = await failure_of(stubs.agent.Report(request))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in text
    await still_serves(host)


async def test_headers_that_are_too_large_are_refused(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stubs.node.Version(pb.VersionRequest(), metadata=(("x", "y" * 100_000),))
        assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    await still_serves(host)


async def test_a_method_that_does_not_exist_is_unimplemented(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        code, _, _ = await failure_of(stubs.channel.unary_unary("/singularity.node.v1.Faults/Explode")(b""))
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_calls_too_often_are_refused_with_a_hint_and_served_again_a_moment_later(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(rate=20, burst=5)) as host, Stubs(host.control) as stubs:
        results = await asyncio.gather(*(stubs.node.Version(pb.VersionRequest()) for _ in range(30)), return_exceptions=True)
        refused = [one for one in results if isinstance(one, grpc.aio.AioRpcError)]
        assert 20 <= len(refused) <= 25
        for one in refused:
            assert one.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(one.trailing_metadata() or ())["singularity-hint-bin"]
        host.add_rank(3)
        async with Stubs(host.agent) as other:  # the agents' socket has a bucket of its own
            await other.agent.Report(pb.ReportRequest(pid=4203, start_time_ticks=9203, kind="round"))
        await asyncio.sleep(0.3)
        await stubs.node.Version(pb.VersionRequest())


async def test_a_call_that_hangs_is_ended_by_the_server_and_arms_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(patience=0.2)) as host, Stubs(host.control) as stubs:
        host.add_rank(3)
        host.faults.hold = asyncio.Event()
        code, metadata, text = await failure_of(stubs.faults.Inject(INJECT))
        assert (code, metadata["singularity-code"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "took_too_long")
        assert "0.2 s" in text
        assert host.faults.cancelled == 1
        assert not host.faults.faults


async def test_wait_is_ended_by_the_server_only_where_the_client_sets_no_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(patience=0.2)) as host, Stubs(host.control) as stubs:
        host.add_rank(3)
        await stubs.faults.Inject(INJECT)
        wait = pb.GetFaultRequest(id="f1")
        assert (await failure_of(stubs.faults.Wait(wait)))[1]["singularity-code"] == "took_too_long"
        waiting = asyncio.ensure_future(stubs.faults.Wait(wait, timeout=20))
        await asyncio.sleep(0.5)
        host.faults.end("f1")
        assert (await waiting).id == "f1"


async def test_wait_is_ended_by_the_server_after_an_hour_whatever_the_client_asks(tmp_path: Path) -> None:
    assert Limits().longest_wait == 3600
    async with serving(tmp_path, control=Limits(longest_wait=0.3)) as host, Stubs(host.control) as stubs:
        host.add_rank(3)
        await stubs.faults.Inject(INJECT)
        code, metadata, text = await failure_of(stubs.faults.Wait(pb.GetFaultRequest(id="f1"), timeout=20))
        assert (code, metadata["singularity-code"]) == (grpc.StatusCode.DEADLINE_EXCEEDED, "took_too_long")
        assert "0.3 s" in text
        assert host.faults.waiting == 0


async def test_health_watches_take_no_place_of_the_event_streams(tmp_path: Path) -> None:
    """Anybody may open them, known process or not."""
    asked = health_pb2.HealthCheckRequest()
    async with serving(tmp_path, agent=Limits(streams=1, health_streams=2)) as host, Stubs(host.agent) as stubs:
        host.add_rank(3)
        health = health_pb2_grpc.HealthStub(stubs.channel)
        kept = [health.Watch(asked) for _ in range(2)]
        for watch in kept:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await failure_of(health.Watch(asked).read()))[1]["singularity-code"] == "busy"
        stream = stubs.agent.Watch(pb.WatchRequest(pid=4203, start_time_ticks=9203))
        await asyncio.wait_for(stream.initial_metadata(), 10)
        host.publish("rank_dying", job=JOB, pid=4203)
        assert (await asyncio.wait_for(stream.read(), 10)).kind == "rank_dying"


async def test_a_client_that_gives_up_cancels_what_it_asked_for(host: Host) -> None:
    host.faults.hold = asyncio.Event()
    async with Stubs(host.control) as stubs:
        assert (await failure_of(stubs.faults.Inject(INJECT, timeout=0.2)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: host.faults.cancelled == 1)
        call = stubs.faults.Inject(INJECT)
        await eventually(lambda: len(host.faults.asked) == 2)
        call.cancel()
        await eventually(lambda: host.faults.cancelled == 2)
    assert not host.faults.faults


async def test_a_defect_is_told_by_a_number_that_the_log_knows(host: Host) -> None:
    host.faults.failure = RuntimeError("secret /etc/shadow in f_locals")
    with structlog.testing.capture_logs() as logged:
        async with Stubs(host.control) as stubs:
            code, metadata, text = await failure_of(stubs.faults.Inject(INJECT))
    assert (code, metadata["singularity-code"], metadata["singularity-exit"]) == (grpc.StatusCode.INTERNAL, "failed", "1")
    match = re.fullmatch(r"internal error ([0-9a-f]{8})", text)
    assert match
    assert match[1] in metadata["singularity-hint-bin"].decode()
    (record,) = [one for one in logged if one["event"] == "request_failed"]
    assert (record["id"], record["method"]) == (match[1], "/singularity.node.v1.Faults/Inject")
    assert record["error"] is host.faults.failure  # observe.log writes its traceback


async def test_a_defect_in_a_stream_is_told_likewise(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(host.bus, "subscribe", broken)
    async with Stubs(host.control) as stubs:
        code, _, text = await failure_of(stubs.events.Follow(pb.FollowRequest()).read())
    assert code is grpc.StatusCode.INTERNAL
    assert text.startswith("internal error ")
    assert "secret" not in text


async def test_one_connection_cannot_have_any_number_of_calls_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(streams_per_connection=4)) as host, Stubs(host.control) as stubs:
        host.add_rank(3)
        await stubs.faults.Inject(INJECT)
        waits = [asyncio.ensure_future(stubs.faults.Wait(pb.GetFaultRequest(id="f1"), timeout=20)) for _ in range(12)]
        await eventually(lambda: host.faults.waiting == 4)
        await asyncio.sleep(0.2)
        async with Stubs(host.control) as other:  # another connection does not notice
            await asyncio.wait_for(other.node.Version(pb.VersionRequest()), 10)
        host.faults.end("f1")
        answers = await asyncio.gather(*waits, return_exceptions=True)
        assert host.faults.most_waiting == 4
        assert sum(isinstance(one, pb.Fault) for one in answers) >= 4


async def test_the_socket_has_a_most_of_calls_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(calls=3)) as host, Stubs(host.control) as stubs:
        host.add_rank(3)
        await stubs.faults.Inject(INJECT)
        waits = [asyncio.ensure_future(stubs.faults.Wait(pb.GetFaultRequest(id="f1"), timeout=20)) for _ in range(3)]
        await asyncio.sleep(0.3)
        code, _, _ = await failure_of(stubs.node.Version(pb.VersionRequest()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        host.faults.end("f1")
        await asyncio.gather(*waits)


async def test_a_client_that_is_stopped_is_disconnected(tmp_path: Path) -> None:
    """Nobody answers the keepalive of a process that is stopped; its connection and its subscription are given up."""
    import signal
    import subprocess
    import sys

    code = (
        "import sys, grpc; from singularityd.api.v1 import node_pb2 as pb, node_pb2_grpc as rpc\n"
        "stream = rpc.EventsStub(grpc.insecure_channel('unix:' + sys.argv[1])).Follow(pb.FollowRequest())\n"
        "stream.initial_metadata(); print('on', flush=True)\n"
        "for event in stream: pass\n"
    )
    async with serving(tmp_path, control=Limits(keepalive=1.0)) as host:  # it has 2 s to answer
        process = subprocess.Popen([sys.executable, "-c", code, host.control], stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            assert await asyncio.to_thread(process.stdout.readline) == b"on\n"
            assert host.bus.subscribers == 1
            process.send_signal(signal.SIGSTOP)
            await eventually(lambda: host.bus.subscribers == 0, 30)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@given(st.lists(st.floats(0, 10), max_size=200), st.floats(0.1, 100), st.integers(1, 50))
def test_a_bucket_gives_no_more_than_its_burst_and_its_rate(gaps: list[float], rate: float, burst: int) -> None:
    now = [100.0]
    bucket = Bucket(rate, burst, lambda: now[0])
    given_ = 0
    for gap in gaps:
        now[0] += gap
        given_ += bucket.take()
    assert given_ <= burst + rate * (now[0] - 100.0) + 1e-6
    now[0] += 2 / rate
    assert bucket.take()


def test_buckets_forget_those_not_used_for_longest() -> None:
    buckets = Buckets(1.0, 1, most=2, clock=lambda: 0.0)
    assert buckets.take("a")
    assert not buckets.take("a")
    assert buckets.take("b")
    assert not buckets.take("a")
    assert buckets.take("c")  # b goes
    assert not buckets.take("a")
    assert buckets.take("b")


def test_places_come_back_also_after_a_failure() -> None:
    places = Places(1, "streams")

    def fail() -> None:
        with places.place():
            with pytest.raises(Busy, match="1 streams"), places.place():
                pass
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    with places.place():
        assert places.taken == 1


async def test_stopping_ends_streams_and_waits_within_the_grace(tmp_path: Path) -> None:
    async with serving(tmp_path) as host, Stubs(host.control) as stubs:
        host.add_rank(3)
        await stubs.faults.Inject(INJECT)
        stream = stubs.events.Follow(pb.FollowRequest())
        await stream.initial_metadata()
        waiting = asyncio.ensure_future(stubs.faults.Wait(pb.GetFaultRequest(id="f1"), timeout=60))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(host.api.stop(0.2), 10)
        assert not os.listdir(tmp_path)
        for call in (stream.read(), waiting):
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                await call
        await host.api.stop(0.2)
    assert JOB
