"""singularityctl as its own process against a served API, and the real fault service behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from singularityd.api.server import ApiServer
from singularityd.faults.journal import Journal
from singularityd.faults.orders import Armed, ArmOrder
from singularityd.faults.service import FaultService
from singularityd.model import Calls, CallStats
from singularityd.observe.snapshot import Snapshot

from .host import JOB, START, Host, eventually, make

CTL = (sys.executable, "-c", "from singularityd.ctl.main import main; main()")


class Done:
    def __init__(self, code: int | None, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out.decode(), err.decode()
        assert "Traceback" not in self.err


async def start(host: Host, *words: str) -> asyncio.subprocess.Process:
    env = {**os.environ, "SINGULARITYD_RUNTIME_DIR": str(host.directory)}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*CTL, *words, stdout=pipe, stderr=pipe, env=env)


async def run(host: Host, *words: str) -> Done:
    process = await start(host, *words)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return Done(process.returncode, out, err)


async def test_every_command_that_reads(host: Host) -> None:
    host.publish("rank_found", text="process 4200 has gloo mapped")
    host.snapshot = Snapshot(
        calls=Calls(
            stats=(
                CallStats(
                    pid=4200,
                    backend="gloo",
                    op="allreduce",
                    comm="0",
                    result="ok",
                    calls=5,
                    bytes=10,
                    seconds=1,
                    last_call=2,
                    buckets=(0, 5),
                ),
            )
        )
    )
    for words, expected in (
        (("status",), "healthy"),
        (("ranks",), JOB),
        (("top", "--once", "--interval", "0.05"), "allreduce"),
        (("events",), "process 4200 has gloo mapped"),
        (("faults", "--patterns"), "probability="),
        (("doctor",), "uprobe"),
        (("version",), "singularity.node.v1"),
    ):
        done = await run(host, *words)
        assert (done.code, expected in done.out) == (0, True), (words, done.out, done.err)
    ranks = json.loads((await run(host, "ranks", "-o", "json")).out)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    host.health["metrics"] = (False, "port taken")
    ill = await run(host, "status")
    assert (ill.code, "metrics: port taken" in ill.out) == (1, True)


async def test_inject_waits_and_tells_its_hits(host: Host) -> None:
    waiting = await start(host, "inject", "--rank", "3", "timeout", "point=allreduce", "--for", "5s", "--wait")
    await eventually(lambda: host.faults.waiting == 1, 30)
    host.faults.end("f1", hits=2)
    out, err = await asyncio.wait_for(waiting.communicate(), 30)
    assert waiting.returncode == 0, err
    assert "armed f1: timeout on rank 3" in out.decode()
    assert "f1 ended, 2 hits: deadline" in out.decode()


async def test_inject_without_a_hit_is_exit_5(host: Host) -> None:
    waiting = await start(host, "inject", "timeout", "--rank", "3", "--wait")
    await eventually(lambda: host.faults.waiting == 1, 30)
    host.faults.end("f1", hits=0)
    _, err = await asyncio.wait_for(waiting.communicate(), 30)
    assert waiting.returncode == 5
    assert "armed, 0 hits" in err.decode()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("inject", "--rank", "7", "timeout"), 3, "ranks 0-3"),
        (("inject", "--rank", "3", "tiemout"), 2, "did you mean timeout?"),
        (("inject", "--rank", "3", "timeout", "probability=101%"), 2, "probability"),
        (("inject", "--rank", "3", "timeout", "--job", "slurm-1"), 3, JOB),
        (("clear", "f9"), 3, "f9"),
        (("ranks", "--job", "no"), 3, JOB),
        (("events", "--since", "abc:1"), 1, "earlier start of the daemon"),
        (("events", "--kind", "rank_dieing"), 2, "did you mean rank_dying?"),
    ],
)
async def test_refusals_keep_their_words_and_exit_codes(host: Host, words: tuple[str, ...], code: int, said: str) -> None:
    done = await run(host, *words)
    assert (done.code, said in done.err) == (code, True), done.err
    assert done.out == ""
    assert done.err.startswith("singularityctl: ")


async def test_a_defect_of_the_daemon_is_one_line_and_a_hint(host: Host) -> None:
    host.faults.failure = RuntimeError("secret")
    done = await run(host, "inject", "--rank", "3", "timeout")
    assert done.code == 1
    assert len(done.err.splitlines()) == 2
    assert "secret" not in done.err


async def test_following_is_interrupted_quietly_and_goes_on_from_its_token(host: Host) -> None:
    following = await start(host, "events", "--follow")
    await eventually(lambda: host.bus.subscribers == 1, 30)
    host.publish("rank_stopped", text="first")
    assert following.stdout is not None
    assert b"first" in await asyncio.wait_for(following.stdout.readline(), 30)
    await asyncio.sleep(0.2)
    following.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(following.communicate(), 30)
    assert following.returncode == 130
    (line,) = err.decode().splitlines()
    token = line.rpartition(" ")[2]
    host.publish("rank_continued", text="second")
    done = await run(host, "events", "--since", token)
    assert "second" in done.out
    assert "first" not in done.out


async def test_waiting_is_interrupted_quietly_and_leaves_the_fault(host: Host) -> None:
    waiting = await start(host, "inject", "--rank", "3", "timeout", "--wait")
    await eventually(lambda: host.faults.waiting == 1, 30)
    waiting.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(waiting.communicate(), 30)
    assert (waiting.returncode, b"Traceback" in err) == (130, False)
    assert [fault.id for fault in host.faults.active()] == ["f1"]


class Arms:
    """An executor that arms everything and answers a clear by ending it."""

    def __init__(self) -> None:
        self.orders: list[ArmOrder] = []
        self.service: FaultService | None = None

    async def arm(self, order: ArmOrder) -> Armed:
        self.orders.append(order)
        return Armed(mechanism="ptrace", signal=23, threads=5, delay=0.004)

    async def clear(self, number: int) -> None:
        assert self.service is not None
        self.service.on_ended(number, reason="cleared", hits=0, seen=0)


async def test_the_real_fault_service_from_the_command_to_the_journal(tmp_path: Path) -> None:
    host, arms = make(tmp_path), Arms()
    for rank in range(4):
        host.add_rank(rank)
    service = FaultService(registry=host.registry, executor=arms, journal=Journal(tmp_path / "journal.db"), bus=host.bus)
    arms.service = service
    host.faults = service  # type: ignore[assignment]
    await service.start()
    api = ApiServer(tmp_path, host.ports())
    await api.start()
    try:
        waiting = await start(host, "inject", "--rank", "3", "timeout", "probability=25%", "--for", "5s", "--reason", "drill", "--wait")
        await eventually(lambda: bool(service.active()) and service.active()[0].state == "armed", 30)
        (order,) = arms.orders
        assert (order.pid, order.start_time, order.rank, order.probability, order.duration) == (4203, START + 4203, 3, 25, 5)
        again = await run(host, "inject", "--rank", "3", "timeout")
        assert (again.code, "has fault f1 already" in again.err) == (1, True)
        assert "f1: timeout on rank 3" in (await run(host, "status")).out
        service.on_hit(1, tid=4210, op="allreduce", comm="0", index=1, at=1.0)
        service.on_ended(1, reason="deadline", hits=1, seen=4)
        out, _ = await asyncio.wait_for(waiting.communicate(), 30)
        assert waiting.returncode == 0
        assert "f1 ended, 1 hit: deadline" in out.decode()
        assert (await run(host, "inject", "--rank", "2", "timeout")).code == 0
        assert (await run(host, "clear", "all")).out == f"cleared f2: timeout on rank 2 of job {JOB} (pid 4202), 0 hits\n"
        (first, second) = json.loads((await run(host, "faults", "--history", "-o", "json")).out)["faults"]
        assert (first["id"], first["ending"], second["id"], second["reason"], second["who"]) == (
            "f2",
            "cleared",
            "f1",
            "drill",
            "control socket",
        )
        kinds = [event.kind for event in host.bus.recorder.since(0) if event.fault == "f1"]
        assert kinds == ["fault_armed", "fault_hit", "fault_ended"]
    finally:
        await service.stop()
        await api.stop(0.1)
