"""error: the call is skipped and returns a failure of its library."""

from __future__ import annotations

from singularityd.faults import checks, options
from singularityd.faults.pattern import Pattern
from singularityd.model import FaultSpec


def _does(spec: FaultSpec) -> str:
    return checks.returned(spec)


PATTERN = Pattern(
    name="error",
    summary="Skips the call and returns `code` to the rank",
    effect="The rank sees its library fail and does what its framework does then; peers that made the call wait for it. Only for libraries "
    "whose calls return a result: gloo throws instead, so there it is refused, and timeout, delay, hang or kill serve",
    options=(options.POINT, options.BACKEND, options.CODE, options.PROBABILITY, options.AFTER, options.COUNT, options.SEED),
    backends=("nccl",),
    mechanisms=("ptrace",),
    check=lambda spec: None,
    does=_does,
    at_once=True,
    defaults={"result": "ncclSystemError", "backend": "nccl"},
)
