"""Traces one rank: passes on what is not ours, holds the threads that are hit, lets them go in time. Runs inside the holder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import calls, choose, stops

_PASSES = 100
"""Looks at the thread list before giving up on a process that makes threads faster than they are seized."""


class Hit(NamedTuple):
    """A call that the probe asked to hold."""

    fault: int
    at_ns: int
    ip: int
    sp: int


class Listener(Protocol):
    """Who is told."""

    def held(self, tid: int, at_ns: int) -> None:
        """A thread stands still."""

    def released(self, tid: int, held_ns: int) -> None:
        """It goes on."""


class Engine:
    """The threads of one process."""

    def __init__(
        self, *, pid: int, signal_number: int, milliseconds: int, ours: Callable[[int], Hit | None], procfs: ProcFs, listener: Listener
    ) -> None:
        self._pid = pid
        self._signal = signal_number
        self._hold_ns = milliseconds * 1_000_000
        self._ours = ours
        self._procfs = procfs
        self._listener = listener
        self._held: dict[int, tuple[int, int]] = {}
        self.threads: set[int] = set()
        self.ended = ""

    def seize(self) -> choose.Refusal | None:
        """Trace every thread; none is stopped by it. A refusal leaves nothing traced once the holder exits."""
        for _ in range(_PASSES):
            left = [tid for tid in self._procfs.threads(self._pid) or [] if tid not in self.threads]
            if not left:
                break
            for tid in left:
                refused = self._seize(tid)
                if refused is not None:
                    return refused
            self.drain()
        if not self.threads:
            return choose.Refusal("rank_gone", f"process {self._pid} has ended", "see singularityctl ranks")
        return None

    def _seize(self, tid: int) -> choose.Refusal | None:
        try:
            calls.ptrace(calls.SEIZE, tid, 0, calls.O_TRACECLONE | calls.O_TRACEEXEC)
        except ProcessLookupError:
            return None
        except PermissionError:
            status = self._procfs.status(self._pid, tid)
            if status is None or status.state in "ZX":
                return None
            if status.tracer == os.getpid():  # made by a thread that was seized before: traced from birth
                self.threads.add(tid)
                return None
            if status.tracer:
                return choose.traced(self._procfs, self._pid, status.tracer)
            hint = "SELinux deny_ptrace, a user namespace or a missing CAP_SYS_PTRACE forbids it; see singularityctl doctor"
            return choose.Refusal("cannot_stop", f"the kernel does not permit tracing process {self._pid}", hint)
        self.threads.add(tid)
        return None

    def drain(self) -> None:
        """Handle every stop that waits; never blocks."""
        while not self.ended:
            try:
                tid, status = os.waitpid(-1, os.WNOHANG | calls.WALL)
            except ChildProcessError:
                self.ended = self.ended or "rank exited"
                return
            if tid == 0:
                return
            self._on_stop(tid, stops.classify(status))

    def _on_stop(self, tid: int, stop: stops.Stop) -> None:
        if stop.kind is stops.Kind.ENDED:
            self.threads.discard(tid)
            self._held.pop(tid, None)
            if not self.threads:
                self.ended = "rank exited"
            return
        self.threads.add(tid)
        if stop.kind is stops.Kind.EXEC:
            calls.resume(tid)
            self.ended = "rank exec'd"
        elif stop.kind is stops.Kind.GROUP_STOP:
            # Stays stopped, as the sender wanted, and is continued by SIGCONT without our help.
            try:
                calls.ptrace(calls.LISTEN, tid)
            except ProcessLookupError:
                self.threads.discard(tid)
        elif stop.kind is stops.Kind.SIGNAL:
            self._on_signal(tid, stop.signal)
        else:
            calls.resume(tid)

    def _on_signal(self, tid: int, number: int) -> None:
        hit = self._ours(tid) if number == self._signal else None
        if hit is None:
            calls.resume(tid, number)
            return
        now = time.monotonic_ns()
        self._held[tid] = (now, now + self._hold_ns if self._hold_ns else 0)
        self._listener.held(tid, hit.at_ns)

    def release(self, *, everything: bool) -> None:
        """Let threads go whose time is over, or all of them."""
        now = time.monotonic_ns()
        for tid, (since, until) in list(self._held.items()):
            if everything or (until and until <= now):
                del self._held[tid]
                calls.resume(tid)
                self._listener.released(tid, now - since)

    def next_release_ns(self) -> int:
        """When the next thread is due, 0 when none is."""
        return min((until for _, until in self._held.values() if until), default=0)
