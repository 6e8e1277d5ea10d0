"""The family of collective calls: the kernel's tables become Calls, its rare records become Events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from singularityd.kernel import abi, bpf
from singularityd.kernel.libraries import result_name
from singularityd.model import Arrival, Calls, CallStats, Event, InFlight, Rank

_STATS, _IN_FLIGHT, _COMMS = 16384, 16384, 4096
_RECENT = 16
"""Arrivals read of each communicator: the ranks of one host are at most a few collectives apart."""


def comm_label(backend: str, comm: int) -> str:
    """The label of a communicator: never a pointer, `unknown` where its beginning was not seen."""
    if comm == 0:
        return "unknown"
    return str(comm - 1) if backend == "gloo" else f"{comm:016x}"[:8]


class CollectiveReader:
    """Reads the tables through read-only descriptors. Called from one worker thread at a time."""

    def __init__(self, maps: Mapping[str, int], *, held: Callable[[], Mapping[int, str]] = dict) -> None:
        """`held` gives the threads that a fault holds now: tid -> fault."""
        self._stats, self._in_flight, self._comms = maps["stats"], maps["inflight"], maps["comms"]
        self._held = held

    def read(self) -> Calls:
        """One reading of everything."""
        offset = time.time() - time.monotonic()
        stats = [_stats(key, value, offset) for key, value in bpf.read_all(self._stats, abi.StatKey, abi.Stat, _STATS)]
        return Calls(stats=tuple(stats), in_flight=tuple(self.in_flight()), arrivals=tuple(self.arrivals()))

    def timeout(self, pid: int) -> float | None:
        """Seconds after which a process gives up a collective, by the shortest of its communicators; None where none tells."""
        found = [
            value.timeout_ms / 1000
            for key, value in bpf.read_all(self._comms, abi.CommKey, abi.Comm, _COMMS)
            if key.tgid == pid and value.timeout_ms and not value.ended
        ]
        return min(found, default=None)

    def in_flight(self) -> list[InFlight]:
        """Calls that have begun and not ended."""
        held = self._held()
        now = time.monotonic_ns()
        found = []
        for key, value in bpf.read_all(self._in_flight, abi.InflightKey, abi.Inflight, _IN_FLIGHT):
            backend = abi.BACKENDS.get(value.backend, "unknown")
            call = InFlight(
                pid=value.tgid,
                tid=key.tid,
                backend=backend,
                op=abi.OPS.get(value.op, "other"),
                comm=comm_label(backend, value.comm),
                sequence=value.seq,
                bytes=value.bytes,
                seconds=max(0.0, (now - value.started_ns) / 1e9),
                fault=held.get(key.tid, ""),
            )
            found.append(call)
        return found

    def arrivals(self) -> list[Arrival]:
        """The newest entries into collectives, of communicators whose sequence numbers agree between ranks."""
        found: list[Arrival] = []
        for key, value in bpf.read_all(self._comms, abi.CommKey, abi.Comm, _COMMS):
            if value.aligned and value.known and not value.ended:
                found.extend(_arrivals(key, value))
        return found


def _stats(key: abi.StatKey, value: abi.Stat, offset: float) -> CallStats:
    backend = abi.BACKENDS.get(key.backend, "unknown")
    return CallStats(
        pid=key.tgid,
        backend=backend,
        op=abi.OPS.get(key.op, "other"),
        comm=comm_label(backend, key.comm),
        result=result_name(backend, key.result),
        calls=value.calls,
        bytes=value.bytes,
        seconds=value.total_ns / 1e9,
        last_call=value.last_ns / 1e9 + offset,
        buckets=tuple(value.buckets),
    )


def _arrivals(key: abi.CommKey, value: abi.Comm) -> list[Arrival]:
    backend = abi.BACKENDS.get(key.backend, "unknown")
    slots = sorted((slot for slot in value.arrivals if slot.at_ns), key=lambda slot: slot.at_ns)[-_RECENT:]
    return [
        Arrival(
            pid=key.tgid,
            backend=backend,
            comm=comm_label(backend, value.id),
            comm_rank=value.rank if value.rank >= 0 else None,
            comm_size=value.size if value.size > 0 else None,
            sequence=slot.seq,
            op=abi.OPS.get(slot.op, "other"),
            at=slot.at_ns / 1e9,
        )
        for slot in slots
    ]


_KINDS = {
    abi.EVENT_FIRST_CALL: "first_call",
    abi.EVENT_INIT: "comm_init",
    abi.EVENT_ERROR: "call_failed",
    abi.EVENT_SLOW: "slow_call",
    abi.EVENT_HIT: "fault_hit",
    abi.EVENT_COMM_END: "comm_end",
}


def to_event(record: abi.KernelEvent, rank: Rank | None, *, fault: str = "") -> Event | None:
    """The Event of a record of buffer `events`, None for kinds that are not told (`fault_hit` is told by the fault service)."""
    kind = _KINDS.get(record.kind)
    if kind is None or record.kind == abi.EVENT_HIT:
        return None
    backend = abi.BACKENDS.get(record.backend, "unknown")
    op = abi.OPS.get(record.op, "other")
    comm = comm_label(backend, record.comm)
    result = result_name(backend, record.result)
    who = describe(rank, record.tgid)
    took = f"{record.duration_ns / 1e6:.1f} ms"
    text = {
        abi.EVENT_FIRST_CALL: f"{who} made its first {backend} {op} with result {result}",
        abi.EVENT_INIT: f"{who} opened communicator {comm} by {op}: {result}",
        abi.EVENT_ERROR: f"{who}: {backend} {op} ended with {result} after {took}",
        abi.EVENT_SLOW: f"{who}: {backend} {op} took {took}",
        abi.EVENT_COMM_END: f"{who} closed communicator {comm} by {op}: {result}",
    }[record.kind]
    fields = {"comm": comm, "result": result, "bytes": str(record.bytes), "seconds": f"{record.duration_ns / 1e9:.6f}"}
    if record.kind == abi.EVENT_INIT:
        fields |= {"comm_rank": str(record.rank), "comm_size": str(record.size)}
    return Event(
        kind=kind,
        at=unix_time(record.at_ns),
        text=text,
        job=rank.job if rank else "",
        rank=rank.rank if rank else None,
        pid=record.tgid,
        backend=backend,
        op=op,
        fault=fault,
        fields=fields,
    )


def describe(rank: Rank | None, pid: int) -> str:
    """`rank 3 of job X (pid 812)`, or the process where the rank is not known."""
    if rank is None or rank.rank is None:
        return f"process {pid}"
    return f"rank {rank.rank} of job {rank.job} (pid {pid})"


def unix_time(monotonic_ns: int) -> float:
    """Unix seconds of a kernel time stamp."""
    return time.time() - (time.monotonic_ns() - monotonic_ns) / 1e9
