"""`singularityctl ranks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from singularityd.ctl import words
from singularityd.ctl.messages import state
from singularityd.ctl.output import Column, print_json, print_table, remark
from singularityd.ctl.session import Session, common

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2

COLUMNS = (
    Column("JOB", least=8),
    Column("RANK", right=True),
    Column("PID", right=True),
    Column("STATE"),
    Column("SOURCE"),
    Column("SURE"),
    Column("SEES"),
    Column("LIBRARIES", least=10),
)


@click.command()
@click.option("--job", metavar="JOB", default="", help="Only this job.")
@common
@click.pass_obj
def ranks(session: Session, job: str) -> None:
    """List the ranks of this host, and how each is known.

    RANK is the global rank and, behind the slash, the size of the job's world; `?` is a rank that is not known yet. PID has in
    brackets what the process calls itself in its own namespace, where that differs. SOURCE and SURE are how the rank is known and
    how well. SEES is what can be seen of its calls: collectives (the call is the collective), enqueue (the call only queues work
    on a GPU), graph (the GPU replays calls that nobody makes again) or none. Local rank, user, name and paths are in the JSON.
    """
    with session.connect() as client:
        found = list(client.ranks(job).ranks)
    if session.json:
        print_json({"ranks": [rank_value(rank) for rank in found]})
    elif found:
        show(found)
    else:
        remark("no rank is on this host: no process has a collective library mapped")


def show(found: list[node_pb2.Rank]) -> None:
    """Print the table, and below it each library that could not be probed."""
    print_table(COLUMNS, [_row(rank) for rank in found])
    for rank in found:
        for library in rank.libraries:
            if library.problem:
                remark(f"pid {rank.pid}: {library.backend} in {library.path}: {library.problem}")


def _row(rank: node_pb2.Rank) -> list[str]:
    number = str(rank.rank) if rank.HasField("rank") else words.UNKNOWN
    world = f"/{rank.world}" if rank.HasField("world") else ""
    pid = str(rank.pid) if inside(rank) == rank.pid else f"{rank.pid} ({inside(rank)})"
    libraries = ", ".join(_library(library) for library in rank.libraries)
    known = [rank_state(rank), rank.source, rank.confidence, rank.visibility, libraries]
    return [rank.job, number + world, pid, *(text or words.ABSENT for text in known)]


def _library(library: node_pb2.Library) -> str:
    name = f"{library.backend} {library.version}".rstrip()
    return name if library.sites else f"{name} (no probes)"


def inside(rank: node_pb2.Rank) -> int:
    """What the process calls itself in its own pid namespace."""
    return rank.namespace_pids[-1] if rank.namespace_pids else rank.pid


def rank_state(rank: node_pb2.Rank) -> str:
    """`running`, `stopped`, `dying` or `exited`."""
    from singularityd.api.v1 import node_pb2

    return state(node_pb2.RankState, rank.state)


def rank_value(rank: node_pb2.Rank) -> dict[str, Any]:
    """A rank for JSON; what is not known is null, never 0."""
    return {
        "job": rank.job,
        "rank": rank.rank if rank.HasField("rank") else None,
        "world": rank.world if rank.HasField("world") else None,
        "local_rank": rank.local_rank if rank.HasField("local_rank") else None,
        "pid": rank.pid,
        "pid_inside": inside(rank),
        "uid": rank.uid if rank.uid >= 0 else None,
        "name": rank.name,
        "state": rank_state(rank),
        "source": rank.source,
        "confidence": rank.confidence,
        "scheme": rank.scheme or None,
        "visibility": rank.visibility,
        "libraries": [
            {
                "backend": library.backend,
                "version": library.version or None,
                "path": library.path,
                "sites": library.sites,
                "problem": library.problem or None,
            }
            for library in rank.libraries
        ],
    }
