"""The family of process life: dying, stopped, continued, killed for memory, exec, exit."""

from __future__ import annotations

from singularityd.kernel import abi
from singularityd.model import Event, Rank, State
from singularityd.probes.collectives import describe, unix_time

STATES: dict[int, State] = {abi.EVENT_DYING: "dying", abi.EVENT_STOP: "stopped", abi.EVENT_CONTINUE: "running"}
"""What a record says of its process; kinds that are absent leave the state alone."""

_KINDS = {
    abi.EVENT_DYING: "rank_dying",
    abi.EVENT_STOP: "rank_stopped",
    abi.EVENT_CONTINUE: "rank_continued",
    abi.EVENT_OOM: "rank_oom_killed",
    abi.EVENT_EXEC: "rank_exec",
}


def to_event(record: abi.KernelEvent, rank: Rank | None) -> Event | None:
    """The Event of a record of buffer `process_events`."""
    kind = _KINDS.get(record.kind)
    if kind is None:
        return None
    who = describe(rank, record.tgid)
    sender = f" sent by process {record.other} ({record.comm_name.decode('utf-8', 'replace')})" if record.other else ""
    text = {
        abi.EVENT_DYING: f"{who} is dying" + (f": signal {record.value}{sender}" if record.value else ": it exits"),
        abi.EVENT_STOP: f"{who} is stopped: signal {record.value}{sender}",
        abi.EVENT_CONTINUE: f"{who} goes on: signal {record.value}{sender}",
        abi.EVENT_OOM: f"{who} was chosen by the out-of-memory killer",
        abi.EVENT_EXEC: f"{who} executed a new program",
    }[record.kind]
    return Event(
        kind=kind,
        at=unix_time(record.at_ns),
        text=text,
        job=rank.job if rank else "",
        rank=rank.rank if rank else None,
        pid=record.tgid,
        fields={"signal": str(record.value), "sender": str(record.other)},
    )


def exit_event(rank: Rank, reason: str, at: float) -> Event:
    """A rank is gone; `reason` is `code 1`, `SIGKILL`, `oom`, or `unknown`."""
    return Event(
        kind="rank_exited",
        at=at,
        text=f"{describe(rank, rank.pid)} exited: {reason}",
        job=rank.job,
        rank=rank.rank,
        pid=rank.pid,
        fields={"reason": reason},
    )
