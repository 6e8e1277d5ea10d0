"""Snapshots for the tests of `observe`, and for its golden page."""

from singularityd.model import Calls, CallStats, Capability, Fault, FaultSpec, InFlight, Library, Rank, Skew
from singularityd.observe.snapshot import Snapshot


def stats(pid, *, op="allreduce", backend="gloo", comm="1", result="ok", calls=3, size=1024, seconds=0.5, last=1000.0, buckets=None):
    if buckets is None:
        buckets = {10: calls}
    counts = tuple(buckets.get(i, 0) for i in range(28)) if isinstance(buckets, dict) else tuple(buckets)
    return CallStats(
        pid=pid,
        backend=backend,
        op=op,
        comm=comm,
        result=result,
        calls=calls,
        bytes=size * calls,
        seconds=seconds,
        last_call=last,
        buckets=counts,
    )


def rank(pid, number, *, job="train", state="running", start=None, **more):
    return Rank(pid=pid, start_time=start if start is not None else pid, job=job, rank=number, state=state, **more)


def fixed():
    """One of everything; every value is written down here."""
    gloo = Library(backend="gloo", path="/usr/lib/libtorch_cpu.so", device=1, inode=2, version="2.13.0", sites=30)
    nccl = Library(backend="nccl", path="/usr/lib/libnccl.so.2", device=1, inode=3, version="2.32.3", sites=60)
    known = {"world": 4, "source": "environment", "confidence": "high", "scheme": "torchrun", "name": "python3"}
    return Snapshot(
        calls=Calls(
            stats=(
                stats(100, calls=7, size=4096, seconds=0.125, last=1700000010.5, buckets={0: 1, 1: 2, 2: 1, 26: 2, 27: 1}),
                stats(100, result="error", calls=1, seconds=2.0, last=1700000011.0, buckets={21: 1}),
                stats(100, op="send", result="posted", calls=5, seconds=0.0, last=1700000009.0, buckets={0: 5}),
                stats(103, backend="nccl", comm="1f2e3d4c", result="invalid_argument", calls=2, seconds=0.000004, buckets={1: 1, 2: 1}),
                stats(900, calls=1, seconds=0.001),
                stats(901, calls=2, seconds=0.002),
            ),
            in_flight=(
                InFlight(
                    pid=103, tid=1031, backend="nccl", op="allreduce", comm="1f2e3d4c", sequence=3, bytes=64, seconds=4.5, fault="f12"
                ),
                InFlight(pid=103, tid=1032, backend="nccl", op="allreduce", comm="1f2e3d4c", sequence=4, bytes=64, seconds=1.5),
            ),
        ),
        ranks=(
            rank(100, 0, local_rank=0, libraries=(gloo,), visibility="collectives", **known),
            rank(103, 3, local_rank=3, libraries=(nccl, gloo), visibility="enqueue", **known),
            rank(104, 12, state="exited"),
            rank(105, None, job="unknown"),
            rank(106, None, job="unknown", visibility="collectives"),
        ),
        skews=(Skew(job="train", backend="gloo", comm="1", op="allreduce", sequence=9, lateness={0: 0.0, 3: 0.25}),),
        faults=(
            Fault(id="f11", spec=FaultSpec(pattern="timeout", rank=3), state="refused", job="train"),
            Fault(
                id="f12",
                spec=FaultSpec(pattern="timeout", rank=3),
                state="armed",
                job="train",
                mechanism="ptrace",
                armed_at=1700000000.0,
                hits=2,
            ),
            Fault(
                id="f9",
                spec=FaultSpec(pattern="timeout", rank=0),
                state="ended",
                job="train",
                mechanism="ptrace",
                armed_at=1.0,
                ended_at=9.0,
                hits=4,
            ),
        ),
        dropped={"events": 2, "stats_full": 0},
        submitted={"events": 1000002},
        received={"events": 1000000},
        probes={"gloo": 30, "nccl": 60},
        attach_errors={"no such symbol": 1},
        exits={("train", "12", "signal SIGKILL"): 1},
        capabilities=(
            Capability(name="ring_buffer", state="yes", detail="made one"),
            Capability(name="register_write", state="no", detail="EACCES"),
            Capability(name="lockdown", state="unknown", detail="securityfs is not mounted"),
        ),
        executor_rss=16 << 20,
        executor_cpu=1.5,
        front_rss=60 << 20,
        front_cpu=2.25,
        loop_lag=0.0025,
        event_queue=3,
        event_subscribers=1,
        started_at=1700000000.0,
    )


def large(ranks=64, ops=12):
    """The page that issue 2 sets a time for."""
    names = [
        "allreduce",
        "reduce",
        "broadcast",
        "allgather",
        "reduce_scatter",
        "alltoall",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
        "group_end",
    ]
    return Snapshot(
        calls=Calls(
            stats=tuple(
                stats(1000 + r, op=op, backend="nccl", comm="1f2e3d4c", calls=28 * 12345, buckets=[12345 + r] * 28, seconds=1234.5678 + r)
                for r in range(ranks)
                for op in names[:ops]
            )
        ),
        ranks=tuple(rank(1000 + r, r, job="pretrain-70b-4711", world=512) for r in range(ranks)),
    )
