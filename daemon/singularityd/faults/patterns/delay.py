"""delay: the call begins later, as over a slow or congested link."""

from __future__ import annotations

from singularityd.errors import BadOption
from singularityd.faults import checks, options
from singularityd.faults.pattern import Pattern
from singularityd.model import FaultSpec


def _check(spec: FaultSpec) -> None:
    checks.within_life("ms", spec.milliseconds, spec)
    checks.within_life("jitter", spec.jitter, spec)
    if spec.jitter and spec.distribution not in ("uniform", "normal"):
        raise BadOption(
            f"a {spec.distribution} delay has no jitter", hint="write distribution=uniform or distribution=normal, or leave jitter out"
        )
    if not spec.jitter and spec.distribution in ("uniform", "normal"):
        raise BadOption(f"a {spec.distribution} delay needs a jitter", hint="write for example jitter=20ms")


def _does(spec: FaultSpec) -> str:
    spread = f" +- {spec.jitter}ms" if spec.jitter else ""
    return f"delayed by {spec.milliseconds}ms{spread}{'' if spec.distribution == 'fixed' else f', {spec.distribution}'} each"


PATTERN = Pattern(
    name="delay",
    summary="Delays the call by `ms` before it begins",
    effect="The rank arrives late in each call that is hit, and its peers wait for it: they show the long calls, the rank the short ones",
    options=(
        *(options.POINT, options.BACKEND, options.DELAY, options.JITTER, options.DISTRIBUTION),
        *(options.PROBABILITY, options.AFTER, options.COUNT, options.SEED),
    ),
    backends=("nccl", "gloo"),
    mechanisms=("ptrace",),
    check=_check,
    does=_does,
    defaults={"milliseconds": 100},
)
