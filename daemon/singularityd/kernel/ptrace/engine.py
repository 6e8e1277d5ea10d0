"""Traces one rank: passes on what is not ours, holds the threads that are hit, lets them go in time. Runs inside the holder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import calls, choose, stops

_PASSES = 100
"""Looks at the thread list before giving up on a process that makes threads faster than they are seized."""
_BATCH = 256
"""Stops handled at a time: a process that makes threads all the time must not keep the holder from its deadline."""
_ATTEMPTS = 3


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
        quiet = 0
        for _ in range(_PASSES):
            seized = self._seize_new()
            if isinstance(seized, choose.Refusal):
                return seized
            self.drain()
            # Twice, because the kernel's list of threads may skip one when another ends while it is read.
            quiet = 0 if seized else quiet + 1
            if self.ended or not self.threads:
                return choose.Refusal("rank_gone", f"process {self._pid}: {self.ended or 'rank exited'}", "see singularityctl ranks")
            if quiet == 2:
                return None
        text = f"process {self._pid} makes threads faster than they can be traced"
        return choose.Refusal("cannot_stop", text, "try again when it has started up")

    def _seize_new(self) -> int | choose.Refusal:
        """How many threads were not traced until now."""
        seized = 0
        for tid in self._procfs.threads(self._pid) or []:
            if tid not in self.threads:
                one = self._seize(tid)
                if isinstance(one, choose.Refusal):
                    return one
                seized += one
        return seized

    def _seize(self, tid: int) -> bool | choose.Refusal:
        for _ in range(_ATTEMPTS):
            try:
                calls.ptrace(calls.SEIZE, tid, 0, calls.O_TRACECLONE | calls.O_TRACEEXEC)
            except ProcessLookupError:
                return False
            except PermissionError:
                status = self._procfs.status(self._pid, tid)
                if status is None or status.state in "ZX":
                    return False
                if status.tracer == os.getpid():  # made by a thread that was seized before: traced from birth
                    self.threads.add(tid)
                    return False
                if status.tracer:
                    return choose.traced(self._procfs, self._pid, status.tracer)
                continue  # a tracer that has just left, or one may not
            self.threads.add(tid)
            return True
        hint = "SELinux deny_ptrace, a user namespace or a missing CAP_SYS_PTRACE forbids it; see singularityctl doctor"
        return choose.Refusal("cannot_stop", f"the kernel does not permit tracing process {self._pid}", hint)

    def drain(self) -> bool:
        """Handle the stops that wait; never blocks. False where some may be left."""
        for _ in range(_BATCH):
            if self.ended:
                return True
            # WNOWAIT: a stop that was waited for has given its signal to us, and the signal would be lost if we were killed here.
            # So it is only looked at; PTRACE_CONT hands the signal on and takes the stop away in one.
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT | calls.WALL)
            except ChildProcessError:
                self.ended = "rank exited"
                return True
            if found is None:
                return True
            if found.si_code in (os.CLD_TRAPPED, os.CLD_STOPPED):
                self._on_stop(found.si_pid, stops.classify(found.si_status << 8 | 0x7F))
            else:
                self._take(found.si_pid)
                self._on_end(found.si_pid)
        return False

    def _take(self, tid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(tid, os.WNOHANG | calls.WALL)

    def _on_end(self, tid: int) -> None:
        self.threads.discard(tid)
        self._held.pop(tid, None)
        if not self.threads:
            self.ended = "rank exited"

    def _on_stop(self, tid: int, stop: stops.Stop) -> None:
        if tid not in self.threads:
            if self._procfs.status(self._pid, tid) is None:
                calls.detach(tid, stop.signal if stop.kind is stops.Kind.SIGNAL else 0)  # a process made by clone(2) without SIGCHLD
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
        self._take(tid)  # ours, and not to be seen again
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
