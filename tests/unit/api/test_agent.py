"""The agent's service: whom it believes, what it tells, what it takes."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from singularityd.api.servicers.agent import REPORT_BURST, TOLD, TOTAL_BURST, TOTAL_RATE, WATCHES
from singularityd.api.v1 import node_pb2 as pb
from singularityd.observe.kinds import BY_NAME
from singularityd.ranks.registry import ProcessFacts

from .host import JOB, START, Host, Stubs, eventually, failure_of


def claim(pid: int = 4203, **more: object) -> pb.RegisterRequest:
    words: dict[str, object] = {"pid": pid, "start_time_ticks": START + pid, "rank": 3, "world": 4, "job": JOB, "agent_version": "0.1.0"}
    return pb.RegisterRequest(**{**words, **more})  # type: ignore[arg-type]


def report(pid: int = 4203, **more: object) -> pb.ReportRequest:
    words: dict[str, object] = {"pid": pid, "start_time_ticks": START + pid, "kind": "round", "text": "round 7 took 3 ms"}
    return pb.ReportRequest(**{**words, **more})  # type: ignore[arg-type]


def last(host: Host) -> object:
    return host.bus.recorder.since(host.bus.recorder.last - 1)[0]


def test_every_kind_that_is_told_exists() -> None:
    assert set(BY_NAME) >= TOLD
    assert {kind for kind in BY_NAME if kind.startswith("fault_")} <= TOLD


async def test_a_claim_that_agrees_is_accepted_and_told(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        reply = await stubs.agent.Register(claim())
    assert (reply.accepted, reply.why) == (True, "")
    assert (reply.rank.rank, reply.rank.source, reply.rank.confidence) == (3, "agent", "high")
    event = last(host)
    assert (event.kind, event.rank, event.pid, event.job) == ("agent_registered", 3, 4203, JOB)
    assert event.fields == {"agent": "0.1.0"}


@pytest.mark.parametrize("words", [{"rank": 2}, {"world": 8}, {"job": "slurm-9"}, {"local_rank": 0}])
async def test_a_claim_that_contradicts_is_answered_with_what_is_known(host: Host, words: dict[str, object]) -> None:
    async with Stubs(host.agent) as stubs:
        reply = await stubs.agent.Register(claim(**words))
    assert not reply.accepted
    assert "its claim is not taken" in reply.why
    assert (reply.rank.rank, reply.rank.job, reply.rank.world) == (3, JOB, 4)
    known = host.registry.by_pid(4203)
    assert known is not None
    assert (known.rank, known.job, known.source) == (3, JOB, "environment")
    assert "not believed" in last(host).text


async def test_a_process_that_only_the_executor_sees_may_register(host: Host) -> None:
    host.seen[900] = START + 900
    async with Stubs(host.agent) as stubs:
        reply = await stubs.agent.Register(claim(900, rank=0, job="own"))
    assert reply.rank.pid == 900


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (claim(901), "there is no process 901"),
        (claim(4203, start_time_ticks=7), "there is no process 4203"),
        (claim(902, start_time_ticks=8), "process 902 did not start at 8"),
    ],
)
async def test_a_process_that_is_not_there_cannot_register(host: Host, request_: pb.RegisterRequest, text: str) -> None:
    host.seen[902] = START + 902
    before = host.registry.all()
    async with Stubs(host.agent) as stubs:
        code, metadata, said = await failure_of(stubs.agent.Register(request_))
    assert (code, metadata["singularity-code"]) == (grpc.StatusCode.NOT_FOUND, "no_such_rank")
    assert said.startswith(text)
    assert host.registry.all() == before
    assert host.bus.recorder.last == 0


async def test_an_exited_process_cannot_register_report_or_watch(host: Host) -> None:
    host.registry.observe_exit(4203, START + 4203, "SIGKILL")
    async with Stubs(host.agent) as stubs:
        for call in (
            stubs.agent.Register(claim()),
            stubs.agent.Report(report()),
            stubs.agent.Watch(pb.WatchRequest(pid=4203, start_time_ticks=START + 4203)).read(),
        ):
            assert (await failure_of(call))[1]["singularity-code"] == "no_such_rank"


async def test_a_process_in_a_container_is_found_by_what_it_calls_itself(host: Host) -> None:
    host.add_rank(0, job="torchrun-box", pid=7000, inside=12)
    async with Stubs(host.agent) as stubs:
        reply = await stubs.agent.Register(claim(12, start_time_ticks=START + 7000, rank=0, job="torchrun-box"))
        assert (reply.accepted, reply.rank.pid) == (True, 7000)
        await stubs.agent.Report(report(12, start_time_ticks=START + 7000))
        assert last(host).pid == 7000


async def test_two_containers_that_started_in_one_tick_are_not_mixed_up(host: Host) -> None:
    """The same pid inside and the same start time: nothing tells which of the two is speaking, so neither is believed."""
    for pid in (7000, 7001):
        facts = ProcessFacts(pid=pid, start_time=12_000, parent=1, uid=0, name="python3", namespace_pids=(pid, 12), environ={"RANK": "0"})
        host.registry.observe_process(facts)
        host.registry.observe_calls([pid])
    async with Stubs(host.agent) as stubs:
        for call in (stubs.agent.Report(report(12, start_time_ticks=12_000)), stubs.agent.Register(claim(12, start_time_ticks=12_000))):
            assert (await failure_of(call))[1]["singularity-code"] == "no_such_rank"
        await stubs.agent.Report(report(7000, start_time_ticks=12_000))
    assert host.bus.recorder.last == 1


@pytest.mark.parametrize(
    "request_",
    [
        claim(0),
        claim(-5),
        claim(2**40),
        claim(start_time_ticks=0),
        claim(rank=-1),
        claim(rank=4),
        claim(world=0),
        claim(world=2**40, rank=2**39),
        claim(local_rank=-1),
        claim(local_rank=4),
        claim(job="j" * 1025),
        claim(job="a\nb"),
        claim(agent_version="\x1b[2J"),
    ],
)
async def test_claims_that_cannot_be_are_refused_before_anything_is_asked(host: Host, request_: pb.RegisterRequest) -> None:
    async with Stubs(host.agent) as stubs:
        assert (await failure_of(stubs.agent.Register(request_)))[1]["singularity-code"] == "bad_option"
    assert host.bus.recorder.last == 0


async def test_a_report_becomes_an_event_of_the_rank_that_the_daemon_knows(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        await stubs.agent.Report(report(fields={"round": "7", "bits": "4"}))
    event = last(host)
    assert (event.kind, event.text, event.job, event.rank, event.pid) == ("agent_report", "round 7 took 3 ms", JOB, 3, 4203)
    assert event.fields == {"round": "7", "bits": "4", "report": "round"}


async def test_a_report_of_the_largest_size_is_taken_whole(host: Host) -> None:
    fields = {f"k{n}": "v" * 256 for n in range(32)}
    async with Stubs(host.agent) as stubs:
        await stubs.agent.Report(report(text="x" * 1000, fields=fields))
    assert last(host).text == "x" * 1000
    assert last(host).fields == {**fields, "report": "round"}


@pytest.mark.parametrize(
    "request_",
    [
        report(kind=""),
        report(kind="gossip"),
        report(text="x" * 1001),
        report(text="a\nb"),
        report(fields={f"k{n}": "v" for n in range(33)}),
        report(fields={"Key": "v"}),
        report(fields={"": "v"}),
        report(fields={"report": "v"}),
        report(fields={"k": "v" * 257}),
        report(fields={"k": "\x1b"}),
        report(pid=0),
    ],
)
async def test_reports_are_bounded(host: Host, request_: pb.ReportRequest) -> None:
    async with Stubs(host.agent) as stubs:
        assert (await failure_of(stubs.agent.Report(request_)))[1]["singularity-code"] == "bad_option"
    assert host.bus.recorder.last == 0


async def in_turns(calls: list[Callable[[], Any]], at_once: int = 20) -> list[Any]:
    """The answers; never so many at once that grpc itself refuses them."""
    answers: list[Any] = []
    for place in range(0, len(calls), at_once):
        answers += await asyncio.gather(*(call() for call in calls[place : place + at_once]), return_exceptions=True)
    return answers


def refusals(answers: list[Any]) -> list[grpc.aio.AioRpcError]:
    found = [one for one in answers if isinstance(one, BaseException)]
    assert {dict(one.trailing_metadata() or ()).get("singularity-code") for one in found} <= {"busy"}, found
    return found


async def test_one_process_that_reports_too_often_is_refused_alone(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        answers = await in_turns([lambda: stubs.agent.Report(report())] * (4 * REPORT_BURST))
        assert refusals(answers)
        assert len(answers) - len(refusals(answers)) >= REPORT_BURST
        assert "process 4203 reports more than" in (refusals(answers)[0].details() or "")
        await stubs.agent.Report(report(4202))


async def test_a_registration_that_says_nothing_new_is_no_event(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        for _ in range(3):
            await stubs.agent.Register(claim())
        assert host.bus.recorder.last == 1
        await stubs.agent.Register(claim(agent_version="0.2.0"))
        assert host.bus.recorder.last == 2


async def test_all_processes_together_cannot_flood_the_recorder(host: Host) -> None:
    """Whoever speaks for every process of the host in turn is stopped all the same."""
    pids = [host.add_rank(0, job=f"torchrun-many{number}", pid=10_000 + number) for number in range(3 * TOTAL_BURST // REPORT_BURST)]
    async with Stubs(host.agent) as stubs:
        began = time.monotonic()
        calls = [functools.partial(stubs.agent.Report, report(pid)) for pid in pids for _ in range(REPORT_BURST)]
        refused = refusals(await in_turns(calls, 50))
        allowed = TOTAL_BURST + TOTAL_RATE * (time.monotonic() - began)
    assert any("together" in (one.details() or "") for one in refused)
    assert host.bus.recorder.last <= allowed + 1


async def test_one_process_that_registers_too_often_is_refused(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        answers = await in_turns([lambda: stubs.agent.Register(claim())] * (4 * REPORT_BURST))
        assert refusals(answers)
        assert (await stubs.agent.Register(claim(4202, rank=2))).accepted


async def watching(stubs: Stubs, pid: int, token: str = "") -> object:
    stream = stubs.agent.Watch(pb.WatchRequest(pid=pid, start_time_ticks=START + pid, token=token))
    await stream.initial_metadata()
    return stream


async def test_a_watch_tells_what_happens_to_the_job_and_nothing_else(host: Host) -> None:
    host.add_rank(0, job="torchrun-other", pid=5000)
    async with Stubs(host.agent) as stubs:
        stream = await watching(stubs, 4203)
        for kind, job, pid in (
            ("rank_dying", "torchrun-other", 5000),
            ("rank_found", JOB, 4200),
            ("agent_report", JOB, 4200),
            ("rank_dying", JOB, 4200),
            ("rank_exec", JOB, 4201),
            ("fault_hit", "torchrun-other", 5000),
            ("fault_hit", JOB, 4203),
        ):
            host.publish(kind, job=job, pid=pid, rank=0)
        told = [await asyncio.wait_for(stream.read(), 10) for _ in range(3)]
    assert [(event.kind, event.pid, event.job) for event in told] == [
        ("rank_dying", 4200, JOB),
        ("rank_exec", 4201, JOB),
        ("fault_hit", 4203, JOB),
    ]


async def test_ranks_of_unknown_jobs_are_not_told_of_each_other(host: Host) -> None:
    for pid in (6000, 6001):
        host.add_rank(0, pid=pid, job="torchrun-")
        host.seen[pid] = START + pid
    for pid in (6100, 6101):
        host.seen[pid] = START + pid
    for pid in (6100, 6101):
        host.registry.observe_process(
            ProcessFacts(pid=pid, start_time=START + pid, parent=1, uid=0, name="x", namespace_pids=(pid,), environ={})
        )
    async with Stubs(host.agent) as stubs:
        stream = await watching(stubs, 6100)
        host.publish("rank_dying", job="unknown", pid=6101)
        host.publish("rank_dying", job="unknown", pid=6100)
        event = await asyncio.wait_for(stream.read(), 10)
    assert event.pid == 6100


async def test_a_watch_goes_on_after_a_broken_stream(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        first = await watching(stubs, 4203)
        host.publish("rank_stopped", job=JOB, pid=4201, rank=1)
        event = await asyncio.wait_for(first.read(), 10)
        first.cancel()
        host.publish("rank_dying", job=JOB, pid=4201, rank=1)
        second = await watching(stubs, 4203, event.token)
        assert (await asyncio.wait_for(second.read(), 10)).kind == "rank_dying"


async def test_one_process_has_a_few_watches_and_gets_the_place_back(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        streams = [await watching(stubs, 4203) for _ in range(WATCHES)]
        refused = stubs.agent.Watch(pb.WatchRequest(pid=4203, start_time_ticks=START + 4203))
        assert (await failure_of(refused.read()))[1]["singularity-code"] == "busy"
        await watching(stubs, 4202)
        for stream in streams:
            stream.cancel()
        await eventually(lambda: host.bus.subscribers == 1)
        await watching(stubs, 4203)


async def test_from_publish_to_the_watchers_hands_in_a_few_milliseconds(host: Host) -> None:
    delays = []
    async with Stubs(host.agent) as stubs:
        stream = await watching(stubs, 4203)
        for _ in range(200):
            at = time.perf_counter()
            host.publish("rank_dying", job=JOB, pid=4200, rank=0)
            await asyncio.wait_for(stream.read(), 10)
            delays.append(time.perf_counter() - at)
            await asyncio.sleep(0.001)
    assert sorted(delays)[100] < 0.010
