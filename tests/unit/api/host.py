"""A daemon's API in this process: real servers on unix sockets, the real bus and registry, a fault service that does as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
from singularityd.api.limits import Limits
from singularityd.api.ports import CheckUp, NodeStatus, Ports
from singularityd.api.server import ApiServer
from singularityd.api.v1 import node_pb2_grpc as rpc
from singularityd.errors import NoSuchFault, SingularityError
from singularityd.faults.patterns import PATTERNS
from singularityd.faults.spec import parse
from singularityd.model import Capability, Event, Fault, FaultSpec
from singularityd.observe.bus import Bus
from singularityd.observe.kinds import KINDS
from singularityd.observe.snapshot import Snapshot
from singularityd.ranks.registry import ProcessFacts, RankRegistry

JOB = "torchrun-7f3a"
START = 5000
"""Start time of pid p is START + p."""


class Dry(NamedTuple):
    fault: Fault


class FakeFaults:
    """Arms at once, keeps everything; `failure` is raised by the next inject, `hold` makes it wait."""

    def __init__(self, registry: RankRegistry) -> None:
        self.registry = registry
        self.faults: dict[str, Fault] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.failure: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.asked: list[tuple[FaultSpec, str]] = []
        self.cancelled = 0
        self.waiting = 0
        self.most_waiting = 0

    async def inject(self, spec: FaultSpec, who: str, caller: object = None) -> Fault:
        self.asked.append((spec, who))
        if self.failure:
            raise self.failure
        if self.hold:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        rank = self.registry.resolve(spec.rank, spec.job)
        number = f"f{len(self.faults) + 1}"
        fault = Fault(
            id=number,
            spec=spec,
            state="armed",
            job=rank.job,
            pid=rank.pid,
            mechanism="ptrace",
            who=who,
            created_at=1.0,
            armed_at=2.0,
        )
        self.faults[number] = fault
        self.ended[number] = asyncio.Event()
        return fault

    def dry_run(self, spec: FaultSpec, who: str = "", caller: object = None) -> Dry:
        rank = self.registry.resolve(spec.rank, spec.job)
        return Dry(Fault(id="", spec=spec, state="arming", job=rank.job, pid=rank.pid, mechanism="ptrace", who=who))

    def end(self, number: str, hits: int = 0) -> None:
        self.faults[number] = msgspec.structs.replace(
            self.faults[number], state="ended", ending="deadline", ended_at=9.0, hits=hits, seen=hits + 1
        )
        self.ended[number].set()

    async def clear(self, fault_id: str, who: str) -> list[Fault]:
        chosen = [fault.id for fault in self.active()] if fault_id == "all" else [(await self.get(fault_id)).id]
        for number in chosen:
            self.end(number)
        return [self.faults[number] for number in chosen]

    async def wait(self, fault_id: str) -> Fault:
        await self.get(fault_id)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self.ended[fault_id].wait()
        finally:
            self.waiting -= 1
        return self.faults[fault_id]

    async def get(self, fault_id: str) -> Fault:
        if fault_id not in self.faults:
            raise NoSuchFault(f"no fault {fault_id!r} is journaled", hint="ids look like f12")
        return self.faults[fault_id]

    def active(self) -> list[Fault]:
        return [fault for fault in self.faults.values() if fault.state == "armed"]

    async def history(self, limit: int) -> list[Fault]:
        return list(reversed(self.faults.values()))[:limit]


@dataclass
class Host:
    """The API and what is behind it."""

    directory: Path
    registry: RankRegistry
    bus: Bus
    faults: FakeFaults
    health: dict[str, tuple[bool, str]] = field(default_factory=lambda: {"executor": (True, ""), "metrics": (True, "")})
    status: NodeStatus = field(default_factory=lambda: NodeStatus(started_at=1.0, executor_pid=7, executor_started_at=2.0))
    snapshot: Snapshot = field(default_factory=Snapshot)
    seen: dict[int, int] = field(default_factory=dict)
    """Live processes that only the executor sees: pid -> start time."""
    api: ApiServer = field(init=False)

    def ports(self) -> Ports:
        async def reading() -> Snapshot:
            return msgspec.structs.replace(self.snapshot, ranks=self.registry.all())

        async def start_time(pid: int) -> int | None:
            return self.seen.get(pid)

        yes = Capability(name="uprobe", state="yes", detail="attached one")
        return Ports(
            ranks=self.registry,
            faults=self.faults,
            bus=self.bus,
            parse=parse,
            patterns=PATTERNS,
            kinds={kind.name: kind.severity for kind in KINDS},
            reading=reading,
            status=lambda: self.status,
            check_up=lambda: CheckUp((yes,), True),
            health=lambda: self.health,
            start_time=start_time,
        )

    @property
    def control(self) -> str:
        return str(self.directory / "control.sock")

    @property
    def agent(self) -> str:
        return str(self.directory / "agent.sock")

    def publish(self, kind: str, **more: Any) -> Event:
        return self.bus.publish(Event(kind=kind, at=time.time(), text=more.pop("text", kind), **more))

    def add_rank(self, rank: int, *, job: str = JOB, pid: int = 0, world: int = 4, inside: int = 0) -> int:
        """A torchrun process; returns its pid."""
        pid = pid or 4200 + rank
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "TORCHELASTIC_RUN_ID": job.removeprefix("torchrun-"),
        }
        pids = (pid, inside) if inside else (pid,)
        self.registry.observe_process(
            ProcessFacts(pid=pid, start_time=START + pid, parent=1, uid=1000, name="python3", namespace_pids=pids, environ=environ)
        )
        self.registry.observe_calls([pid])
        return pid


def make(directory: Path) -> Host:
    registry = RankRegistry()
    return Host(directory, registry, Bus(), FakeFaults(registry))


@asynccontextmanager
async def serving(directory: Path, *, control: Limits | None = None, agent: Limits | None = None) -> AsyncIterator[Host]:
    host = make(directory)
    host.api = ApiServer(directory, host.ports(), control=control, agent=agent)
    await host.api.start()
    try:
        yield host
    finally:
        await host.api.stop(0.1)


class Stubs:
    """Every service over one channel; unary calls that take as long as a test may."""

    def __init__(self, path: str, options: tuple[tuple[str, Any], ...] = ()) -> None:
        self.channel = grpc.aio.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1), *options])
        self.node = rpc.NodeStub(self.channel)
        self.ranks = rpc.RanksStub(self.channel)
        self.faults = rpc.FaultsStub(self.channel)
        self.events = rpc.EventsStub(self.channel)
        self.agent = rpc.AgentStub(self.channel)
        self.doctor = rpc.DoctorStub(self.channel)

    async def __aenter__(self) -> Stubs:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()


async def failure_of(call: Any) -> tuple[grpc.StatusCode, dict[str, Any], str]:
    """(status, trailing metadata, details) of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()), error.details() or ""
    raise AssertionError("the call did not fail")


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


__all__ = ["JOB", "START", "FakeFaults", "Host", "SingularityError", "Stubs", "eventually", "failure_of", "make", "serving"]
