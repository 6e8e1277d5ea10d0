"""kill: the rank is killed at the entry of a call: it dies silently in the middle of a collective."""

from __future__ import annotations

from singularityd.faults import options
from singularityd.faults.pattern import Pattern
from singularityd.kernel import abi

PATTERN = Pattern(
    name="kill",
    summary="Kills the rank by SIGKILL in the first call that is hit; `after=N` makes it call N+1",
    effect="The process is gone without a word, its peers are left in the collective. This cannot be taken back: what the job's launcher "
    "does about a dead rank is what is rehearsed",
    options=(options.POINT, options.BACKEND, options.PROBABILITY, options.AFTER, options.SEED),
    backends=("nccl", "gloo"),
    mechanisms=("signal",),
    check=lambda spec: None,
    does=lambda spec: "the process is killed",
    defaults={"count": 1},
    action=abi.ACTION_KILL,
)
