"""Each collective of gloo is counted with its exact bytes, in its own group; what a collective sends inside is not counted."""

from __future__ import annotations

from collections.abc import Callable

from conftest import Daemon, Job, until

Start = Callable[..., Job]

EXPECTED = {
    # op, group: calls, bytes of one rank
    ("allreduce", "0"): (1, 1000 * 4),
    ("broadcast", "0"): (1, 500 * 8),
    ("allgather", "0"): (1, 300 * 4),
    ("reduce", "0"): (1, 700 * 4),
    ("gather", "0"): (1, 250 * 4),
    ("scatter", "0"): (1, 260 * 4),
    ("alltoall", "0"): (2, 8 * 3 * 4 + (16 + 32 + 48) * 4),
    ("allreduce", "1"): (3, 3 * 10 * 4),
}


def test_calls_and_bytes_of_every_collective(daemon: Daemon, jobs: Start) -> None:
    job = jobs("collectives.py", ranks=3)
    job.go(daemon, 3)
    until(lambda: sum("done" in line for line in job.lines()) == 3, 120)

    for rank in range(3):
        for (op, comm), (calls, size) in EXPECTED.items():
            if comm == "1" and rank == 2:
                continue
            labels = {"job_id": job.job, "rank": str(rank), "op": op, "comm": comm, "result": "ok"}
            assert daemon.metric("singularity_collective_calls_total", **labels) == calls, (rank, op, comm)
            assert daemon.metric("singularity_collective_bytes_total", **labels) == size, (rank, op, comm)
    for rank, op in ((0, "send"), (1, "recv")):
        labels = {"job_id": job.job, "op": op, "result": "posted"}
        assert daemon.metric("singularity_collective_calls_total", rank=str(rank), **labels) == 1
        assert daemon.metric("singularity_collective_bytes_total", rank=str(rank), **labels) == 123 * 4
    assert daemon.metric("singularity_collective_calls_total", job_id=job.job, rank="2", op="send") == 0
    assert daemon.metric("singularity_collective_calls_total", job_id=job.job, rank="2", comm="1") == 0
