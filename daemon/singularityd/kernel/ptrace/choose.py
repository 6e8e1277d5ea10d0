"""Whether a rank can be traced, and by which signal its threads can be asked to stop.

The signal must be ignored by default, so that it does no harm if the tracer dies between sending and stopping, and must be neither
blocked in any thread (it would never be delivered) nor handled nor read from a signalfd (the program would see it).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from singularityd.kernel.procfs import ProcFs

LADDER = (signal.SIGURG, signal.SIGWINCH)
_PATIENCE = 0.25
"""Seconds a thread may block a signal and still be taken for one that is just being made or ending."""


class Refusal(NamedTuple):
    """Why not; `code` is one of errors.py."""

    code: str
    text: str
    hint: str


def refusal(procfs: ProcFs, pid: int, start_time: int) -> Refusal | None:
    """None where nothing stands against tracing this very process."""
    if pid in (os.getpid(), os.getppid()):
        return Refusal("not_allowed", f"process {pid} is the daemon itself", "choose a rank: singularityctl ranks")
    status = procfs.status(pid)
    if status is None or procfs.start_time(pid) != start_time or _living(procfs, pid) is None:
        return Refusal("rank_gone", f"process {pid} has ended", "see singularityctl ranks")
    if status.tracer:
        return traced(procfs, pid, status.tracer)
    scope = procfs.read("sys/kernel/yama/ptrace_scope", 16)
    if scope is not None and scope.strip() == b"3":
        return Refusal(
            "cannot_stop", "kernel.yama.ptrace_scope is 3: nobody may trace", "boot with another value; it cannot be lowered at run time"
        )
    return None


def _living(procfs: ProcFs, pid: int) -> int | None:
    """A thread that has not ended: the process goes on without its first one, which is then a zombie without descriptors."""
    for tid in procfs.threads(pid) or []:
        status = procfs.status(pid, tid)
        if status is not None and status.state not in "ZX":
            return tid
    return None


def traced(procfs: ProcFs, pid: int, tracer: int) -> Refusal:
    """The refusal that names the other tracer."""
    other = procfs.status(tracer)
    name = other.name if other else "unknown"
    return Refusal("traced_by_another", f"process {pid} is traced by {name} (pid {tracer})", f"end {name} first, then inject again")


def choose(procfs: ProcFs, pid: int) -> int | Refusal:
    """The first signal of the ladder that every thread leaves to us."""
    reasons = {number: reason for number in LADDER if (reason := _taken(procfs, pid, number))}
    blocked = {number: _blocking(procfs, pid, number, procfs.threads(pid) or []) for number in LADDER if number not in reasons}
    end = time.monotonic() + _PATIENCE
    while blocked:
        for number, tids in blocked.items():
            if not tids:
                return int(number)
        if time.monotonic() > end:
            break
        # The C library blocks every signal for a moment while it makes or ends a thread: only who keeps blocking counts.
        time.sleep(0.002)
        blocked = {number: _blocking(procfs, pid, number, tids) for number, tids in blocked.items()}
    reasons |= {number: f"blocked by thread {tids[0]}" for number, tids in blocked.items()}
    text = "; ".join(f"{number.name} is {reasons[number]}" for number in LADDER)
    return Refusal("cannot_stop", f"process {pid} leaves no signal to stop a thread by: {text}", "this rank cannot be held")


def _taken(procfs: ProcFs, pid: int, number: int) -> str | None:
    bit = 1 << (number - 1)
    status = procfs.status(pid)
    if status is not None and status.caught & bit:
        return "handled by the program"
    return "read from a signalfd" if bit & _signalfd_mask(procfs, pid) else None


def _blocking(procfs: ProcFs, pid: int, number: int, tids: Sequence[int]) -> list[int]:
    bit = 1 << (number - 1)
    statuses = ((tid, procfs.status(pid, tid)) for tid in tids)
    return [tid for tid, status in statuses if status is not None and status.blocked & bit and status.state not in "ZX"]


def _signalfd_mask(procfs: ProcFs, pid: int) -> int:
    mask = 0
    task = f"{pid}/task/{_living(procfs, pid)}"
    try:
        descriptors = os.listdir(f"{procfs.root}/{task}/fd")
    except OSError:
        return 0
    for name in descriptors:
        try:
            if not os.readlink(f"{procfs.root}/{task}/fd/{name}").startswith("anon_inode:[signalfd]"):
                continue
        except OSError:
            continue
        for line in (procfs.read(f"{task}/fdinfo/{name}") or b"").split(b"\n"):
            if line.startswith(b"sigmask:"):
                mask |= int(line.split(b":")[1], 16)
    return mask
