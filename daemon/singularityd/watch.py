"""What the front knows of this host: fed by the executor's messages and the kernel's rings, read as one Snapshot.

Loop thread only, but for the reading of the kernel's tables, which runs in a worker thread, one at a time.
"""

from __future__ import annotations

import asyncio
import ctypes as c
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from singularityd.kernel import abi, bpf, exits, messages
from singularityd.kernel.procfs import ProcFs
from singularityd.model import Calls, Capability, Event, Library, Rank, Skew, State
from singularityd.observe import skew, vitals
from singularityd.observe.bus import Bus
from singularityd.observe.snapshot import Snapshot
from singularityd.probes import collectives, process
from singularityd.probes.collectives import CollectiveReader, unix_time
from singularityd.probes.ring import Rings
from singularityd.ranks.registry import ProcessFacts, RankRegistry

if TYPE_CHECKING:
    from singularityd.faults.service import FaultService

_STATES: dict[int, str] = {0: "no", 1: "yes", 2: "unknown"}
_CHECKS = 24
_TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """The front's picture of the host."""

    def __init__(self, *, registry: RankRegistry, bus: Bus, expire_after: float) -> None:
        self._registry = registry
        self._bus = bus
        self._expire_after = expire_after
        self._log = structlog.get_logger("watch")
        self._procfs = ProcFs()
        self._rings: Rings | None = None
        self._reader: CollectiveReader | None = None
        self._counter_maps: tuple[int, int] | None = None
        self._reading = asyncio.Lock()
        self._held: dict[int, tuple[int, str]] = {}
        self._dying: set[int] = set()
        self._oom: set[int] = set()
        self._exits: dict[tuple[str, str, str], tuple[int, float]] = {}
        self._capabilities: dict[str, Capability] = {}
        self._inits: set[tuple[int, str]] = set()
        self.faults: FaultService | None = None
        self.lag: vitals.LoopLag | None = None
        self.probes: dict[str, int] = {}
        self.attach_errors: dict[str, int] = {}
        self.shed: list[str] = []
        self.started_at = time.time()
        self.executor_started_at = 0.0
        self.restarts = 0
        registry.subscribe(self._on_rank)

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """The doctor's lines so far."""
        return tuple(self._capabilities.values())

    @property
    def checked(self) -> bool:
        """Whether every check has answered."""
        return len(self._capabilities) >= _CHECKS

    def collective_timeout(self, rank: Rank) -> float | None:
        """Seconds after which a rank gives up a collective; None where its library does not tell."""
        return self._reader.timeout(rank.pid) if self._reader is not None else None

    # --- from the executor -----------------------------------------------------------------------------------------------------

    def begin(self, maps: dict[str, int], message: messages.Started) -> None:
        """The executor watches: read its rings and tables from now on."""
        self.executor_started_at = time.time()
        self.restarts = int(message.restarts)
        if self.restarts:
            self._publish("executor_back", f"the front was started again by the executor (restart {self.restarts})")
        self._reader = CollectiveReader(maps, held=lambda: {tid: fault for tid, (_, fault) in list(self._held.items())})
        self._counter_maps = (maps["counters"], maps["process_counters"])
        self._rings = Rings({name: maps[name] for name in ("process_events", "events")}, self._on_record)
        asyncio.get_running_loop().add_reader(self._rings.fileno(), self._rings.consume)
        self._rings.consume()
        self._log.info("watching", executor=int(message.pid), boot=message.text("boot_id"))

    def on_message(self, message: messages.Message) -> None:
        """Everything the executor tells without being asked."""
        handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
        if handler is not None:
            handler(message)

    def _on_capabilityfound(self, message: messages.CapabilityFound) -> None:
        name = message.text("name")
        state = _STATES.get(int(message.state), "unknown")
        self._capabilities[name] = Capability(name=name, state=state, detail=message.text("detail"), remedy=message.text("remedy"))  # type: ignore[arg-type]

    def _on_processseen(self, message: messages.ProcessSeen) -> None:
        pairs = (line.partition("=") for line in message.text("environ").split("\n") if line)
        facts = ProcessFacts(
            pid=int(message.pid),
            start_time=int(message.start_time),
            parent=int(message.parent),
            uid=int(message.uid),
            name=message.text("name"),
            namespace_pids=tuple(number for number in message.namespace_pids if number),
            environ={name: value for name, _, value in pairs},
        )
        self._dying.discard(facts.pid)
        self._registry.observe_process(facts)

    def _on_librarymapped(self, message: messages.LibraryMapped) -> None:
        library = Library(
            backend=message.text("backend"),
            path=message.text("path"),
            device=int(message.device),
            inode=int(message.inode),
            version=message.text("version"),
            sites=int(message.sites),
            problem=message.text("problem"),
        )
        rank = self._registry.observe_library(int(message.pid), int(message.start_time), library)
        who = collectives.describe(rank, int(message.pid))
        if library.problem:
            text = f"{who} maps {library.backend} {library.version} ({library.path}), which cannot be watched: {library.problem}"
            self._publish("attach_failed", text, rank, pid=int(message.pid), backend=library.backend)
        else:
            text = f"{who} maps {library.backend} {library.version} ({library.path}): {library.sites} sites"
            self._publish("library_attached", text, rank, pid=int(message.pid), backend=library.backend)

    def _on_processended(self, message: messages.ProcessEnded) -> None:
        pid = int(message.pid)
        reason = exits.reason(exits.Exit(int(message.code), int(message.signal), bool(message.known)))
        if pid in self._oom:
            self._oom.discard(pid)
            reason = "oom"
        self._dying.discard(pid)
        shown = any(rank.pid == pid for rank in self._registry.all())
        rank = self._registry.observe_exit(pid, int(message.start_time), reason)
        if rank is None or not shown:
            return
        key = (rank.job, "unknown" if rank.rank is None else str(rank.rank), reason)
        self._exits[key] = (self._exits.get(key, (0, 0.0))[0] + 1, time.time())
        self._bus.publish(process.exit_event(rank, reason, time.time()))

    def _on_attached(self, message: messages.Attached) -> None:
        self.probes[message.text("backend")] = int(message.sites)

    def _on_attachfailed(self, message: messages.AttachFailed) -> None:
        reason = message.text("reason")
        self.attach_errors[reason] = self.attach_errors.get(reason, 0) + 1
        self._publish("attach_failed", f"{message.text('path')}: {message.text('words')}", pid=int(message.pid) or None)

    def _on_shed(self, message: messages.Shed) -> None:
        symbol, path = message.text("symbol"), message.text("path")
        self.shed.append(f"{symbol} in {path}")
        text = f"the guard detached {symbol} in {path}: {message.rate} hits a second, more than {message.limit}; its calls are not counted"
        self._publish("probe_shed", text, backend=message.text("backend"))

    def _on_holding(self, message: messages.Holding) -> None:
        number, tid, at = int(message.fault), int(message.tid), unix_time(int(message.at_ns))
        if message.held:
            self._held[tid] = (number, f"f{number}")
        else:
            self._held.pop(tid, None)
        if self.faults is None:
            return
        if message.held:
            self.faults.on_held(number, tid, at)
        else:
            self.faults.on_released(number, tid, at, int(message.held_ns) / 1e9)

    def _on_ended(self, message: messages.Ended) -> None:
        number = int(message.fault)
        for tid in [tid for tid, (fault, _) in self._held.items() if fault == number]:
            del self._held[tid]
        if self.faults is not None:
            self.faults.on_ended(number, reason=message.text("reason"), hits=int(message.hits), seen=int(message.seen))

    def _on_notice(self, message: messages.Notice) -> None:
        level = {10: "debug", 20: "info", 30: "warning"}.get(int(message.level), "error")
        getattr(self._log, level)(message.text("words"), half="executor")

    # --- from the kernel -------------------------------------------------------------------------------------------------------

    def _on_record(self, buffer: str, record: abi.KernelEvent) -> None:
        try:
            if buffer == "process_events":
                self._on_process_record(record)
            else:
                self._on_call_record(record)
        except Exception:  # noqa: BLE001 - a record must not end the consuming of those after it
            self._log.exception("a kernel record could not be handled", kind=record.kind)

    def _on_process_record(self, record: abi.KernelEvent) -> None:
        pid = int(record.tgid)
        rank = self._registry.by_pid(pid)
        if record.kind == abi.EVENT_DYING:
            if pid in self._dying:
                return  # the signal, its delivery and the exit each tell it; the first counts
            self._dying.add(pid)
        if record.kind == abi.EVENT_OOM:
            self._oom.add(pid)
        state: State | None = process.STATES.get(record.kind)
        told = state in ("stopped", "running") and rank is not None and rank.state == state
        event = process.to_event(record, rank)
        if event is not None and not told:
            self._bus.publish(event)
        if state is not None:
            self._registry.observe_state(pid, state)

    def _on_call_record(self, record: abi.KernelEvent) -> None:
        pid = int(record.tgid)
        backend = abi.BACKENDS.get(record.backend, "unknown")
        comm = collectives.comm_label(backend, record.comm)
        if record.kind == abi.EVENT_HIT:
            if self.faults is not None:
                op, at = abi.OPS.get(record.op, "other"), unix_time(record.at_ns)
                self.faults.on_hit(int(record.fault), tid=int(record.tid), op=op, comm=comm, index=int(record.other), at=at)
            return
        if record.kind == abi.EVENT_INIT and record.value in (0, 7):
            rank, size = (int(record.rank) if record.rank >= 0 else None), (int(record.size) if record.size > 0 else None)
            self._registry.observe_init(pid, comm=comm, comm_rank=rank, comm_size=size, backend="nccl" if backend == "nccl" else "gloo")
        elif record.kind == abi.EVENT_COMM_SEEN:
            self._registry.observe_init(pid, comm=comm, comm_rank=int(record.rank), comm_size=int(record.size), backend="nccl")
        elif record.kind == abi.EVENT_FIRST_CALL:
            self._registry.observe_calls({pid})
        event = collectives.to_event(record, self._registry.by_pid(pid))
        if event is not None:
            self._bus.publish(event)

    # --- periodic --------------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Once a second: gloo's groups teach ranks; what has expired is dropped."""
        reader = self._reader
        if reader is not None and self._registry.all():
            async with self._reading:
                arrivals = await asyncio.to_thread(reader.arrivals)
            for arrival in arrivals:
                key = (arrival.pid, arrival.comm)
                if arrival.backend == "gloo" and key not in self._inits:
                    self._inits.add(key)
                    self._registry.observe_init(
                        arrival.pid, comm=arrival.comm, comm_rank=arrival.comm_rank, comm_size=arrival.comm_size, backend="gloo"
                    )
        self._look_at_stopped()
        gone = {rank.pid for rank in self._registry.expire()}
        if gone:
            self._inits = {key for key in self._inits if key[0] not in gone}
        horizon = time.time() - max(self._expire_after, 3600.0)
        self._exits = {key: value for key, value in self._exits.items() if value[1] > horizon}

    def _look_at_stopped(self) -> None:
        """A debugger that dies, or a kernel without BTF, lets a stopped rank go on without a word."""
        for rank in self._registry.all():
            if rank.state == "stopped" and self._procfs.state(rank.pid) not in ("T", "t", None):
                self._registry.observe_state(rank.pid, "running")
                self._publish("rank_continued", f"{collectives.describe(rank, rank.pid)} goes on", rank, pid=rank.pid)

    async def snapshot(self) -> Snapshot:
        """One consistent reading of everything."""
        calls = await self._read()
        ranks = self._registry.all()
        skews: tuple[Skew, ...] = skew.skews(calls.arrivals, self._registry.by_pid)
        own, executor = vitals.usage(), _usage_of(os.getppid())
        return Snapshot(
            calls=calls,
            ranks=ranks,
            skews=skews,
            faults=self.faults.recent(self._expire_after) if self.faults is not None else (),
            dropped=self.dropped(),
            submitted=self._counted("submitted"),
            received=dict(self._rings.received) if self._rings is not None else {},
            probes=dict(self.probes),
            attach_errors=dict(self.attach_errors),
            exits={key: count for key, (count, _) in self._exits.items()},
            capabilities=self.capabilities,
            executor_rss=executor.rss,
            executor_cpu=executor.cpu,
            front_rss=own.rss,
            front_cpu=own.cpu,
            loop_lag=self.lag.worst if self.lag is not None else 0.0,
            event_queue=self._bus.waiting,
            event_subscribers=self._bus.subscribers,
            started_at=self.started_at,
        )

    async def _read(self) -> Calls:
        reader = self._reader
        if reader is None:
            return Calls()
        async with self._reading:
            calls = await asyncio.to_thread(reader.read)
        known = {stats.pid for stats in calls.stats}
        self._registry.observe_calls(known)
        return calls

    def dropped(self) -> dict[str, int]:
        """Buffer -> records lost."""
        return self._counted("dropped") | {"subscribers": self._bus.dropped}

    def _counted(self, what: str) -> dict[str, int]:
        if self._counter_maps is None:
            return {}
        calls, processes = self._counter_maps
        return {"events": _counter(calls, f"events_{what}"), "process_events": _counter(processes, f"process_{what}")}

    def close(self) -> None:
        """Stop reading the rings."""
        if self._rings is not None:
            asyncio.get_running_loop().remove_reader(self._rings.fileno())
            self._rings.close()
            self._rings = None

    # --- telling ---------------------------------------------------------------------------------------------------------------

    def _on_rank(self, new: Rank, old: Rank | None) -> None:
        if old is None:
            self._publish("rank_found", f"{collectives.describe(new, new.pid)} takes part in collectives", new, pid=new.pid)
        elif old.rank is None and new.rank is not None:
            text = f"process {new.pid} is rank {new.rank} of job {new.job} ({new.source}, confidence {new.confidence})"
            self._publish("rank_identified", text, new, pid=new.pid)

    def _publish(self, kind: str, text: str, rank: Rank | None = None, *, pid: int | None = None, backend: str = "") -> None:
        job, number = (rank.job, rank.rank) if rank is not None else ("", None)
        self._bus.publish(Event(kind=kind, at=time.time(), text=text, job=job, rank=number, pid=pid, backend=backend))


def _counter(descriptor: int, name: str) -> int:
    value = c.c_uint64()
    bpf.lookup(descriptor, c.c_uint32(abi.COUNTERS.index(name)), value)
    return value.value


def _usage_of(pid: int) -> vitals.Usage:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields: Sequence[bytes] = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return vitals.Usage(0, 0.0)
    return vitals.Usage(int(fields[21]) * os.sysconf("SC_PAGE_SIZE"), (int(fields[11]) + int(fields[12])) / _TICKS)
