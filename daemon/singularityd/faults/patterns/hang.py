"""hang: every thread of the rank stands still, as in a deadlock, a stopped container or a kernel that does not schedule it."""

from __future__ import annotations

from singularityd.faults.pattern import Pattern
from singularityd.kernel import abi

PATTERN = Pattern(
    name="hang",
    summary="Stops all threads of the rank until the deadline, wherever they are",
    effect="Nothing of the rank runs: no collective, no heartbeat, no watchdog of its own; its peers wait. Then all of it goes on",
    options=(),
    backends=("nccl", "gloo"),
    mechanisms=("ptrace",),
    check=lambda spec: None,
    does=lambda spec: "all threads stopped until the deadline",
    action=abi.ACTION_FREEZE,
)
