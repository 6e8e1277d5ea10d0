"""Fixed answers of a daemon: a gloo job of four, a stray NCCL process, a fault on rank 3."""

from __future__ import annotations

from singularityd.api.v1 import node_pb2 as pb

NOW = 1_780_000_100.0
JOB = "torchrun:7f3a"


def _gloo(sites: int = 24, problem: str = "") -> pb.Library:
    return pb.Library(backend="gloo", version="2.13.0", path="/venv/torch/lib/libtorch_cpu.so", sites=sites, problem=problem)


RANKS = pb.ListRanksReply(
    ranks=[
        pb.Rank(
            job=JOB,
            rank=rank,
            world=4,
            local_rank=rank,
            pid=4200 + rank,
            namespace_pids=[4200 + rank],
            uid=1000,
            name="python3",
            source="environment",
            confidence="medium",
            scheme="torchrun",
            state=pb.RANK_STATE_STOPPED if rank == 2 else pb.RANK_STATE_RUNNING,
            visibility="collectives",
            libraries=[_gloo()],
        )
        for rank in range(4)
    ]
    + [
        pb.Rank(
            job="unknown",
            pid=977,
            namespace_pids=[977, 12],
            uid=0,
            name="trainer",
            source="unknown",
            confidence="low",
            state=pb.RANK_STATE_RUNNING,
            visibility="enqueue",
            libraries=[
                pb.Library(backend="nccl", version="2.32.3", path="/opt/libnccl.so.2", sites=61),
                _gloo(0, "symbols are stripped; install the package that has them"),
            ],
        )
    ]
)

ARMED = pb.Fault(
    id="f12",
    pattern="timeout",
    state=pb.FAULT_STATE_ARMED,
    job=JOB,
    rank=3,
    pid=4203,
    point="any",
    probability_percent=100,
    duration_seconds=10,
    mechanism="ptrace, signal SIGURG",
    who="uid 0, pid 901",
    created_at=1_780_000_097.9,
    armed_at=1_780_000_098.0,
    doing="every collective call, held until the deadline",
)
ENDED = pb.Fault()
ENDED.CopyFrom(ARMED)
ENDED.MergeFrom(pb.Fault(state=pb.FAULT_STATE_ENDED, ended_at=1_780_000_108.0, hits=2, seen=2, ending="deadline"))
UNHIT = pb.Fault()
UNHIT.CopyFrom(ENDED)
UNHIT.hits = UNHIT.seen = 0
DRY = pb.Fault(
    pattern="timeout",
    state=pb.FAULT_STATE_DRY_RUN,
    job=JOB,
    rank=3,
    pid=4203,
    point="allreduce",
    backend="gloo",
    milliseconds=200,
    probability_percent=25,
    duration_seconds=5,
    count=3,
    mechanism="ptrace",
    doing="25% of gloo allreduce calls, held for 200ms each, at most 3",
)
REFUSED = pb.Fault(
    id="f11",
    pattern="timeout",
    state=pb.FAULT_STATE_REFUSED,
    job=JOB,
    rank=3,
    pid=4203,
    point="allreduce",
    backend="gloo",
    probability_percent=0.5,
    duration_seconds=5,
    created_at=1_779_999_000.0,
    ended_at=1_779_999_000.1,
    ending="gdb (pid 77) traces the process already; end it first",
)
FAULTS = pb.ListFaultsReply(faults=[ARMED, REFUSED])

PATTERNS = pb.ListPatternsReply(
    patterns=[
        pb.Pattern(
            name="timeout",
            summary="Holds the call: it neither progresses nor returns until the fault ends, or for ms; the peers of the rank wait for it "
            "and, where their own timeout is shorter, give up",
            options=[
                pb.PatternOption(name="point", summary="which calls: any, or an operation such as allreduce"),
                pb.PatternOption(name="probability", summary="percent of the calls, more than 0% and at most 100% (100%)"),
                pb.PatternOption(name="ms", summary="how long each call is held"),
            ],
            backends=["gloo", "nccl"],
            mechanisms=["ptrace"],
        )
    ]
)

STATUS = pb.StatusReply(
    version="0.1.0",
    started_at=NOW - 7384,
    executor_started_at=NOW - 62,
    executor_pid=310,
    front_pid=312,
    executor_restarts=1,
    probes={"gloo": 24, "nccl": 61},
    dropped={"calls": 0, "process": 3},
    attach_errors={"stripped": 1},
    ranks=5,
    jobs=[JOB],
    faults=[ARMED],
    metrics_address="127.0.0.1:10610",
    healthy=True,
)
SICK = pb.StatusReply(
    version="0.1.0",
    started_at=NOW - 30,
    front_pid=312,
    executor_restarts=2,
    shed=["ncclGroupStart in /opt/libnccl.so.2"],
    problems=["the executor is gone and is being started again"],
)

VERSION = pb.VersionReply(version="0.1.0", api="singularity.node.v1", python="3.11.2")

CHECK = pb.CheckReply(
    complete=True,
    capabilities=[
        pb.Capability(name="privileges", state=pb.CAPABILITY_STATE_YES, detail="uid 0 with CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE"),
        pb.Capability(name="ring_buffer", state=pb.CAPABILITY_STATE_YES, detail="a ring buffer map was created"),
        pb.Capability(
            name="lockdown",
            state=pb.CAPABILITY_STATE_UNKNOWN,
            detail="securityfs is not mounted, so what the kernel's lockdown forbids could not be read from /sys/kernel/security/lockdown",
            remedy="mount -t securityfs securityfs /sys/kernel/security",
        ),
        pb.Capability(
            name="kprobe", state=pb.CAPABILITY_STATE_NO, detail="perf_event_open: ENOENT", remedy="none is needed: kprobes are not used"
        ),
    ],
)
BARE = pb.CheckReply(
    complete=False,
    capabilities=[
        pb.Capability(
            name="kernel_headers",
            state=pb.CAPABILITY_STATE_NO,
            detail="no headers were found",
            remedy="apt-get install linux-headers-amd64",
        )
    ],
)

EVENTS = [
    pb.Event(
        sequence=41,
        token="b7:41",
        kind="rank_found",
        at=1_780_000_000.1234,
        text="process 4203 has gloo mapped",
        severity="info",
        pid=4203,
    ),
    pb.Event(
        sequence=42,
        token="b7:42",
        kind="fault_hit",
        at=1_780_000_099.5,
        text="f12 holds allreduce of rank 3",
        severity="warning",
        job=JOB,
        rank=3,
        pid=4203,
        backend="gloo",
        op="allreduce",
        fault="f12",
        fields={"tid": "4210"},
    ),
]


def _row(rank: int, calls: int, buckets: dict[int, int], **more: object) -> pb.TopRow:
    filled = [buckets.get(index, 0) for index in range(32)]
    row = pb.TopRow(job=JOB, rank=rank, pid=4200 + rank, backend="gloo", op="allreduce", comm="0", calls=calls, bytes=calls * 4_000_000)
    row.MergeFrom(pb.TopRow(seconds=1.0, buckets=filled, **more))  # type: ignore[arg-type]
    return row


TOP_BEFORE = pb.TopReply(at=NOW, rows=[_row(0, 100, {10: 100}), _row(3, 90, {10: 90})])
TOP_AFTER = pb.TopReply(
    at=NOW + 2,
    rows=[
        _row(3, 90, {10: 90}, in_flight=1, oldest_in_flight_seconds=1.98, skew_seconds=1.98, fault="f12"),
        _row(0, 150, {10: 130, 14: 20}, skew_seconds=0.0),
        pb.TopRow(
            job=JOB, pid=977, backend="nccl", op="reduce_scatter", comm="1f0a9c3e", calls=2048, bytes=2048 << 20, buckets=[0, 0, 2048]
        ),
    ],
)


def _campaign(**values):
    steps = [
        pb.PlannedFault(at_seconds=1.5, rank=1, pattern="timeout", options={"point": "allreduce", "seed": "77"}, duration_seconds=2.0),
        pb.PlannedFault(at_seconds=20.0, rank=3, pattern="timeout", options={"seed": "9"}, duration_seconds=5.0),
    ]
    for step, more in zip(steps, values.pop("became", ({}, {})), strict=True):
        for name, value in more.items():
            setattr(step, name, value)
    return pb.Campaign(name="nightly", job="torchrun-7f3a", seed=7, who="control socket", reason="rehearsal", planned=steps, **values)


CAMPAIGN_DRY = _campaign(state=pb.CAMPAIGN_STATE_DRY_RUN)
CAMPAIGN = _campaign(id="c3", state=pb.CAMPAIGN_STATE_RUNNING, started_at=NOW - 2)
CAMPAIGN_ENDED = _campaign(
    id="c3",
    state=pb.CAMPAIGN_STATE_ENDED,
    started_at=NOW - 40,
    ended_at=NOW - 5,
    ending="done",
    became=({"fault": "f14"}, {"refused": "rank 3 is gone"}),
    report_markdown="# Drill c3\n",
    report_json="{}\n",
)
