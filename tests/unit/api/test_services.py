"""What each service answers, over a real socket."""

from __future__ import annotations

import asyncio
import time

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from singularityd import __version__
from singularityd.api import top
from singularityd.api.servicers import faults as fault_servicer
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import AlreadyArmed
from singularityd.model import Calls, CallStats, Fault, FaultSpec, InFlight, Library, Skew
from singularityd.observe.snapshot import Snapshot

from .host import JOB, START, Host, Stubs, failure_of

INJECT = pb.InjectRequest(rank=3, pattern="timeout", options={"point": "allreduce", "probability": "25%"}, duration="5s", reason="drill")


async def test_status_says_what_is_well_and_what_is_not(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        well = await stubs.node.Status(pb.StatusRequest())
        assert (well.healthy, well.ranks, list(well.jobs), well.version) == (True, 4, [JOB], __version__)
        host.health["executor"] = (False, "gone for 3 s")
        await stubs.faults.Inject(INJECT)
        host.registry.observe_exit(4200, START + 4200, "exit code 1")
        ill = await stubs.node.Status(pb.StatusRequest())
        assert (ill.healthy, list(ill.problems), ill.ranks) == (False, ["executor: gone for 3 s"], 3)
        assert [fault.id for fault in ill.faults] == ["f1"]


async def test_ranks_by_job_or_by_the_start_of_its_name(host: Host) -> None:
    host.add_rank(0, job="torchrun-8000", pid=5000)
    async with Stubs(host.control) as stubs:
        assert len((await stubs.ranks.List(pb.ListRanksRequest())).ranks) == 5
        for name in (JOB, "torchrun-7"):
            assert [rank.rank for rank in (await stubs.ranks.List(pb.ListRanksRequest(job=name))).ranks] == [0, 1, 2, 3]
        code, metadata, text = await failure_of(stubs.ranks.List(pb.ListRanksRequest(job="slurm")))
        assert (code, metadata["singularity-code"], metadata["singularity-exit"]) == (grpc.StatusCode.NOT_FOUND, "no_such_job", "3")
        assert JOB in text
        _, metadata, text = await failure_of(stubs.ranks.Top(pb.TopRequest(job="torchrun")))
        assert metadata["singularity-code"] == "ambiguous_job"
        assert JOB in text
        assert "torchrun-8000" in text


async def test_unknown_is_absent_and_odd_bytes_are_shown(host: Host) -> None:
    host.registry.observe_library(
        977, 5, Library(backend="nccl", path="/opt/\udcff\udcfe/libnccl.so.2", device=1, inode=2, version="2.32.3", sites=61)
    )
    host.registry.observe_calls([977])
    async with Stubs(host.control) as stubs:
        found = {rank.pid: rank for rank in (await stubs.ranks.List(pb.ListRanksRequest())).ranks}
    assert not found[977].HasField("rank")
    assert found[977].libraries[0].path == "/opt/\\udcff\\udcfe/libnccl.so.2"
    assert found[4200].HasField("rank")
    assert found[4200].rank == 0


def stats(pid: int, result: str, calls: int, buckets: tuple[int, ...] = (), op: str = "allreduce") -> CallStats:
    return CallStats(
        pid=pid,
        backend="gloo",
        op=op,
        comm="0",
        result=result,
        calls=calls,
        bytes=calls * 100,
        seconds=1.5,
        last_call=3.0,
        buckets=buckets or (0, calls),
    )


async def test_top_sums_results_and_shows_calls_that_hang(host: Host) -> None:
    spec = FaultSpec(pattern="timeout", rank=3)
    host.snapshot = Snapshot(
        calls=Calls(
            stats=(stats(4203, "ok", 10), stats(4203, "error", 2, (1, 1, 0)), stats(1, "ok", 5), stats(4202, "in_progress", 3)),
            in_flight=tuple(
                InFlight(pid=4203, tid=tid, backend="gloo", op="barrier", comm="0", sequence=9, bytes=0, seconds=age)
                for tid, age in ((1, 2.5), (2, 0.5))
            ),
        ),
        skews=(Skew(job=JOB, backend="gloo", comm="0", op="allreduce", sequence=8, lateness={2: 0.0, 3: 1.25}),),
        faults=(
            Fault(id="f8", spec=spec, state="ended", pid=4202),
            Fault(id="f9", spec=spec, state="armed", pid=4203),
        ),
    )
    before = time.time()
    async with Stubs(host.control) as stubs:
        reply = await stubs.ranks.Top(pb.TopRequest())
    assert before <= reply.at <= time.time()
    rows = {(row.rank, row.op): row for row in reply.rows}
    assert set(rows) == {(2, "allreduce"), (3, "allreduce"), (3, "barrier")}  # pid 1 is no rank
    reduced, hanging, other = rows[3, "allreduce"], rows[3, "barrier"], rows[2, "allreduce"]
    assert (reduced.calls, reduced.bytes, reduced.errors, reduced.seconds) == (12, 1200, 2, 3.0)
    assert list(reduced.buckets) == [1, 11, 0]
    assert (reduced.skew_seconds, reduced.fault) == (1.25, "f9")
    assert (hanging.calls, hanging.in_flight, hanging.oldest_in_flight_seconds) == (0, 2, 2.5)
    assert not hanging.HasField("skew_seconds")
    assert (other.errors, other.fault) == (0, "")
    assert other.HasField("skew_seconds")
    assert other.skew_seconds == 0


def test_top_leaves_out_processes_that_exited(host: Host) -> None:
    host.registry.observe_exit(4203, START + 4203, "SIGKILL")
    reading = Snapshot(calls=Calls(stats=(stats(4203, "ok", 10), stats(4202, "ok", 1))), ranks=host.registry.all())
    assert [row.pid for row in top.rows(reading, reading.ranks)] == [4202]


async def test_inject_passes_the_words_on_and_answers_the_fault(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        fault = await stubs.faults.Inject(INJECT)
        assert (fault.id, fault.state, fault.job, fault.rank, fault.pid) == ("f1", pb.FAULT_STATE_ARMED, JOB, 3, 4203)
        assert (fault.point, fault.probability_percent, fault.duration_seconds, fault.reason) == ("allreduce", 25, 5, "drill")
        assert fault.who == "control socket"
        assert (await stubs.faults.Get(pb.GetFaultRequest(id="f1"))) == fault
        assert [one.id for one in (await stubs.faults.List(pb.ListFaultsRequest())).faults] == ["f1"]


async def test_a_dry_run_arms_nothing(host: Host) -> None:
    request = pb.InjectRequest(rank=3, pattern="timeout", dry_run=True)
    async with Stubs(host.control) as stubs:
        fault = await stubs.faults.Inject(request)
        assert (fault.id, fault.state, fault.pid) == ("", pb.FAULT_STATE_DRY_RUN, 4203)
    assert not host.faults.faults
    assert not host.faults.asked


@pytest.mark.parametrize(
    ("request_", "code", "exit_code"),
    [
        (pb.InjectRequest(pattern="timeout"), "usage", "2"),
        (pb.InjectRequest(rank=-1, pattern="timeout"), "bad_option", "2"),
        (pb.InjectRequest(rank=2**62, pattern="timeout"), "bad_option", "2"),
        (pb.InjectRequest(rank=7, pattern="timeout"), "no_such_rank", "3"),
        (pb.InjectRequest(rank=3, job="other", pattern="timeout"), "no_such_job", "3"),
        (pb.InjectRequest(rank=3, pattern="tiemout"), "unknown_pattern", "2"),
        (pb.InjectRequest(rank=3, pattern="timeout", options={"probability": "0%"}), "bad_option", "2"),
        (pb.InjectRequest(rank=3, pattern="timeout", options={"probability": "101%"}), "bad_option", "2"),
        (pb.InjectRequest(rank=3, pattern="timeout", options={"colour": "red"}), "bad_option", "2"),
        (pb.InjectRequest(rank=3, pattern="timeout", duration="-1s"), "bad_option", "2"),
        (pb.InjectRequest(rank=3, pattern="timeout", duration="5 parsecs"), "bad_option", "2"),
    ],
)
async def test_what_cannot_be_is_refused_with_a_code_and_a_hint(host: Host, request_: pb.InjectRequest, code: str, exit_code: str) -> None:
    async with Stubs(host.control) as stubs:
        _, metadata, text = await failure_of(stubs.faults.Inject(request_))
    assert (metadata["singularity-code"], metadata["singularity-exit"]) == (code, exit_code)
    assert text
    assert not host.faults.faults


async def test_a_refusal_arrives_with_its_hint(host: Host) -> None:
    host.faults.failure = AlreadyArmed("rank 3 has fault f1 already", hint="`singularityctl clear f1` ends it")
    async with Stubs(host.control) as stubs:
        code, metadata, text = await failure_of(stubs.faults.Inject(INJECT))
    assert (code, text) == (grpc.StatusCode.ALREADY_EXISTS, "rank 3 has fault f1 already")
    assert metadata["singularity-hint-bin"].decode() == "`singularityctl clear f1` ends it"


async def test_wait_returns_when_the_fault_has_ended_or_at_the_clients_deadline(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        await stubs.faults.Inject(INJECT)
        assert (await failure_of(stubs.faults.Wait(pb.GetFaultRequest(id="f1"), timeout=0.2)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = asyncio.ensure_future(stubs.faults.Wait(pb.GetFaultRequest(id="f1"), timeout=30))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        host.faults.end("f1", hits=2)
        ended = await waiting
        assert (ended.state, ended.hits, ended.seen, ended.ending) == (pb.FAULT_STATE_ENDED, 2, 3, "deadline")


async def test_clear_one_all_none_and_nothing(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        await stubs.faults.Inject(INJECT)
        await stubs.faults.Inject(INJECT)
        assert [one.id for one in (await stubs.faults.Clear(pb.ClearRequest(id="f1"))).faults] == ["f1"]
        assert [one.id for one in (await stubs.faults.Clear(pb.ClearRequest(id="all"))).faults] == ["f2"]
        assert (await failure_of(stubs.faults.Clear(pb.ClearRequest(id="f77"))))[1]["singularity-code"] == "no_such_fault"
        assert (await failure_of(stubs.faults.Clear(pb.ClearRequest())))[1]["singularity-code"] == "usage"
        history = await stubs.faults.List(pb.ListFaultsRequest(history=True, limit=1))
        assert [one.id for one in history.faults] == ["f2"]
        for limit in (-1, 10_001):
            assert (await failure_of(stubs.faults.List(pb.ListFaultsRequest(limit=limit))))[1]["singularity-exit"] == "2"


async def test_a_history_that_is_too_long_is_cut_to_the_newest(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_servicer, "ROOM", 2000)
    async with Stubs(host.control) as stubs:
        for _ in range(40):
            await stubs.faults.Inject(INJECT)
        listed = (await stubs.faults.List(pb.ListFaultsRequest(history=True))).faults
    assert 0 < len(listed) < 40
    assert listed[0].id == "f40"


async def test_patterns_and_doctor_and_version(host: Host) -> None:
    async with Stubs(host.control) as stubs:
        patterns = {pattern.name: pattern for pattern in (await stubs.faults.ListPatterns(pb.ListPatternsRequest())).patterns}
        assert list(patterns) == ["timeout", "delay", "error", "hang", "slow", "kill", "flap"]
        pattern = patterns["timeout"]
        assert {"point", "probability", "ms"} <= {option.name for option in pattern.options}
        check = await stubs.doctor.Check(pb.CheckRequest())
        assert check.complete
        assert check.capabilities[0].state == pb.CAPABILITY_STATE_YES
        assert (await stubs.node.Version(pb.VersionRequest())).api == "singularity.node.v1"


async def test_health_is_never_older_than_the_question(host: Host) -> None:
    for path in (host.control, host.agent):
        async with Stubs(path) as stubs:
            health = health_pb2_grpc.HealthStub(stubs.channel)
            for name in ("", "executor", "metrics"):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == 1
            host.health["executor"] = (False, "")
            states = {
                name: (await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in ("", "executor", "metrics")
            }
            assert states == {"": 2, "executor": 2, "metrics": 1}
            assert (await failure_of(health.Check(health_pb2.HealthCheckRequest(service="no"))))[0] is grpc.StatusCode.NOT_FOUND
            watch = health.Watch(health_pb2.HealthCheckRequest(service="executor"))
            assert (await watch.read()).status == 2
            host.health["executor"] = (True, "")
            assert (await asyncio.wait_for(watch.read(), 10)).status == 1
            watch.cancel()
            listed = await health.List(health_pb2.HealthListRequest())
            assert set(listed.statuses) == {"", "executor", "metrics"}


async def test_reflection_names_the_services_on_the_control_socket_only(host: Host) -> None:
    async def services(path: str) -> set[str]:
        async with Stubs(path) as stubs:
            call = reflection_pb2_grpc.ServerReflectionStub(stubs.channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            )
            return {service.name async for reply in call for service in reply.list_services_response.service}

    names = {"Node", "Ranks", "Faults", "Events", "Agent", "Doctor"}
    assert {f"singularity.node.v1.{name}" for name in names} | {"grpc.health.v1.Health"} <= await services(host.control)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await services(host.agent)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_agents_socket_serves_nothing_of_the_administrator(host: Host) -> None:
    async with Stubs(host.agent) as stubs:
        calls = [
            stubs.node.Status(pb.StatusRequest()),
            stubs.ranks.List(pb.ListRanksRequest()),
            stubs.faults.Inject(INJECT),
            stubs.faults.Clear(pb.ClearRequest(id="all")),
            stubs.doctor.Check(pb.CheckRequest()),
            stubs.events.Follow(pb.FollowRequest()).read(),
        ]
        for call in calls:
            assert (await failure_of(call))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert not host.faults.asked


def test_fault_states_of_the_model_all_have_a_value() -> None:
    from singularityd.api import convert

    spec = FaultSpec(pattern="timeout", rank=0)
    for state in ("arming", "armed", "ended", "refused"):
        message = convert.fault(msgspec.structs.replace(Fault(id="f1", spec=spec, state="armed"), state=state))
        assert message.state != pb.FAULT_STATE_UNSPECIFIED
