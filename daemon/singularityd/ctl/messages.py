"""The daemon's messages as JSON values and as words. Keys and words here are frozen surfaces: docs/singularityctl.md lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from singularityd.ctl import words

if TYPE_CHECKING:
    from singularityd.api.v1 import node_pb2


def state(enumeration: Any, value: int) -> str:
    """`FAULT_STATE_DRY_RUN` -> `dry_run`; `unknown` for a value that a newer daemon sends."""
    try:
        name: str = enumeration.Name(value)
    except ValueError:
        return "unknown"
    prefix = enumeration.Name(0).removesuffix("UNSPECIFIED")
    return "unknown" if value == 0 else name.removeprefix(prefix).lower()


def fault_state(fault: node_pb2.Fault) -> str:
    """`arming`, `armed`, `ended`, `refused` or `dry_run`."""
    from singularityd.api.v1 import node_pb2

    return state(node_pb2.FaultState, fault.state)


def fault_value(fault: node_pb2.Fault) -> dict[str, Any]:
    """A fault for JSON; what has not happened yet is null."""
    return {
        "id": fault.id or None,
        "pattern": fault.pattern,
        "state": fault_state(fault),
        "job": fault.job,
        "rank": fault.rank,
        "pid": fault.pid or None,
        "point": fault.point,
        "backend": fault.backend or None,
        "milliseconds": fault.milliseconds,
        "probability_percent": fault.probability_percent,
        "duration_seconds": fault.duration_seconds,
        "count": fault.count,
        "seed": fault.seed,
        "reason": fault.reason,
        "mechanism": fault.mechanism or None,
        "who": fault.who,
        "created_at": fault.created_at or None,
        "armed_at": fault.armed_at or None,
        "ended_at": fault.ended_at or None,
        "hits": fault.hits,
        "seen": fault.seen if fault_state(fault) == "ended" and fault.seen >= fault.hits else None,
        "ending": fault.ending or None,
        "campaign": fault.campaign or None,
    }


def target(fault: node_pb2.Fault) -> str:
    """`rank 3 of job j (pid 7)`, as far as it is known."""
    job = f" of job {fault.job}" if fault.job else ""
    return f"rank {fault.rank}{job}" + (f" (pid {fault.pid})" if fault.pid else "")


def calls(fault: node_pb2.Fault) -> str:
    """Which calls it is meant for: `any`, `gloo allreduce`, `nccl any 25%`."""
    parts = [fault.backend, fault.point or "any"]
    if fault.probability_percent not in (0, 100):
        parts.append(f"{words.number(fault.probability_percent)}%")
    return " ".join(part for part in parts if part)


def standing(fault: node_pb2.Fault) -> str:
    """`armed, 0 hits`: what a person wants to know first. What was refused could hit nothing."""
    name = fault_state(fault)
    return f"{name}, {words.plural(fault.hits, 'hit')}" if name in ("armed", "ended") else name.replace("_", " ")


def deadline(fault: node_pb2.Fault) -> float:
    """Unix time of the end of an armed fault; 0 where it is not armed."""
    return fault.armed_at + fault.duration_seconds if fault.armed_at else 0.0
