"""flap: calls are held for a while, let alone for a while, and so on, as over a link that goes down and up again."""

from __future__ import annotations

from singularityd.errors import BadOption
from singularityd.faults import checks, options
from singularityd.faults.pattern import Pattern
from singularityd.faults.quantity import duration_text
from singularityd.model import FaultSpec


def _check(spec: FaultSpec) -> None:
    checks.within_life("on", spec.on, spec)
    checks.within_life("off", spec.off, spec)
    if not spec.on or not spec.off:
        raise BadOption("flap needs both phases", hint="write for example on=2s off=3s")


PATTERN = Pattern(
    name="flap",
    summary="Holds calls during `on`, lets them alone during `off`, in turns until the deadline",
    effect="The rank stands in its call until the phase ends, then catches up; its peers wait in bursts",
    options=(
        *(options.POINT, options.BACKEND, options.ON, options.OFF),
        *(options.PROBABILITY, options.AFTER, options.COUNT, options.SEED),
    ),
    backends=("nccl", "gloo"),
    mechanisms=("ptrace",),
    check=_check,
    does=lambda spec: f"held in turns, {duration_text(spec.on)} on and {duration_text(spec.off)} off",
    defaults={"on": 1000, "off": 1000},
)
