"""timeout: the call neither progresses nor returns until the deadline, as if the rank's peer or link had gone silent."""

from __future__ import annotations

from singularityd.errors import BadOption
from singularityd.faults import options
from singularityd.faults.pattern import Pattern
from singularityd.faults.quantity import duration_text
from singularityd.model import FaultSpec


def _check(spec: FaultSpec) -> None:
    lasts = round(spec.duration * 1000)
    if spec.milliseconds > lasts:
        text = f"ms={spec.milliseconds} is longer than the fault lasts ({duration_text(lasts)}): the call would be let go at the deadline"
        raise BadOption(text, hint=f"write --for {duration_text(spec.milliseconds)}, or leave ms out to hold until the deadline")


PATTERN = Pattern(
    name="timeout",
    summary="Holds the call: it neither progresses nor returns until the deadline, or `ms` after its hit",
    effect="The rank's thread stands still in the call and its peers wait for it in theirs. At the deadline the call goes on and nothing "
    "is lost, unless somebody's own time-out was shorter",
    options=(options.POINT, options.BACKEND, options.HOLD, options.PROBABILITY, options.COUNT, options.SEED),
    backends=("nccl", "gloo"),
    mechanisms=("ptrace",),
    check=_check,
)
