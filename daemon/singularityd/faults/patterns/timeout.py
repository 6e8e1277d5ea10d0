"""timeout: the call neither progresses nor returns until the deadline, as if the rank's peer or link had gone silent.

The brief's own example answers the call with -ETIMEDOUT. The default here is the hold: it is what a dead peer really looks like to the
rank, it works for every library, and nothing is lost by it. `mode=return` is the brief's example, with the error that the library has
for it.
"""

from __future__ import annotations

from singularityd.faults import checks, options
from singularityd.faults.pattern import Pattern
from singularityd.model import FaultSpec


def _check(spec: FaultSpec) -> None:
    checks.within_life("ms", spec.milliseconds, spec)


def _does(spec: FaultSpec) -> str:
    held = checks.held(spec)
    return f"{held}, then {checks.returned(spec)}" if spec.result else held


PATTERN = Pattern(
    name="timeout",
    summary="Holds the call: it neither progresses nor returns until the deadline, or `ms` after its hit",
    effect="The rank's thread stands still in the call and its peers wait for it in theirs. At the deadline the call goes on and nothing "
    "is lost, unless somebody's own time-out was shorter; with mode=return it is skipped then and returns the library's own time-out",
    options=(
        *(options.POINT, options.BACKEND, options.HOLD, options.MODE, options.CODE),
        *(options.PROBABILITY, options.AFTER, options.COUNT, options.SEED),
    ),
    backends=("nccl", "gloo"),
    mechanisms=("ptrace",),
    check=_check,
    does=_does,
)
