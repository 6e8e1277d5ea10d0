"""slow: the rank runs at a share of its speed, as a straggler does on a hot, throttled or overcommitted host."""

from __future__ import annotations

from singularityd.faults import options, quantity
from singularityd.faults.pattern import Pattern
from singularityd.kernel import abi
from singularityd.model import FaultSpec


def _does(spec: FaultSpec) -> str:
    return f"runs at {quantity.percent_text(round(spec.percent * quantity.PPM / 100))} of its speed, stopped in turns"


PATTERN = Pattern(
    name="slow",
    summary="Lets the rank run for `percent` of the time: all its threads are stopped and continued in turns",
    effect="A straggler: everything the rank does takes longer, and its peers wait for it in every step. What waits anyway is not slowed",
    options=(options.PERCENT, options.PERIOD),
    backends=("nccl", "gloo"),
    mechanisms=("ptrace",),
    check=lambda spec: None,
    does=_does,
    defaults={"percent": 50.0},
    action=abi.ACTION_DUTY,
)
