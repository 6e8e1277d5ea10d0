"""Traces one rank: passes on what is not ours, stops the threads that are hit, or all of them, and lets them go in time.

Runs inside the holder. A stop of all threads (`hang`, `slow`) interrupts system calls as SIGSTOP and SIGCONT would: most are begun again
by the kernel, epoll_wait and its like return EINTR.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from singularityd.kernel import abi
from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import calls, choose, registers, stops
from singularityd.kernel.ptrace.plan import Plan

_PASSES = 100
"""Looks at the thread list before giving up on a process that makes threads faster than they are seized."""
_BATCH = 256
"""Stops handled at a time: a process that makes threads all the time must not keep the holder from its deadline."""
_ATTEMPTS = 3
_CODE = 4096
"""Bytes of a function that are searched for a return instruction."""


class Hit(NamedTuple):
    """A call that the probe asked to stop at its entry."""

    fault: int
    at_ns: int
    ip: int
    sp: int
    number: int = 0
    """Of the matching calls of this fault, from 0."""


class Listener(Protocol):
    """Who is told."""

    def held(self, tid: int, at_ns: int) -> None:
        """A thread stands still."""

    def released(self, tid: int, held_ns: int) -> None:
        """It goes on."""

    def trouble(self, text: str) -> None:
        """Something could not be done as asked."""


class _Held(NamedTuple):
    """A thread that stands in a call that was hit."""

    since_ns: int
    until_ns: int
    """0: until the deadline."""
    hit: Hit


class Engine:
    """The threads of one process."""

    def __init__(
        self, *, pid: int, signal_number: int, plan: Plan, ours: Callable[[int], Hit | None], procfs: ProcFs, listener: Listener
    ) -> None:
        self._pid = pid
        self._signal = signal_number
        self._plan = plan
        self._ours = ours
        self._procfs = procfs
        self._listener = listener
        self._start_ns = 0
        self._held: dict[int, _Held] = {}
        self._frozen = False
        self._told = False
        self._froze_ns = 0
        self._standing: set[int] = set()
        """Threads that a freeze has stopped."""
        self._group_stopped: set[int] = set()
        """Threads that somebody's SIGSTOP has stopped: they stay so, whatever we do."""
        self.threads: set[int] = set()
        self.freezes = 0
        self.ended = ""

    def begin(self, start_ns: int) -> None:
        """The fault is in force since then (CLOCK_MONOTONIC)."""
        self._start_ns = start_ns

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
        self._standing.discard(tid)
        self._group_stopped.discard(tid)
        self._held.pop(tid, None)
        if not self.threads:
            self.ended = "rank exited"

    def _on_stop(self, tid: int, stop: stops.Stop) -> None:
        if tid not in self.threads:
            if self._procfs.status(self._pid, tid) is None:
                calls.detach(tid, stop.signal if stop.kind is stops.Kind.SIGNAL else 0)  # a process made by clone(2) without SIGCHLD
                return
            self.threads.add(tid)
        self._group_stopped.discard(tid)
        if stop.kind is stops.Kind.EXEC:
            calls.resume(tid)
            self.ended = "rank exec'd"
        elif stop.kind is stops.Kind.GROUP_STOP:
            # Stays stopped, as the sender wanted, and is continued by SIGCONT without our help.
            try:
                calls.ptrace(calls.LISTEN, tid)
                self._group_stopped.add(tid)
            except ProcessLookupError:
                self.threads.discard(tid)
        elif stop.kind is stops.Kind.SIGNAL:
            self._on_signal(tid, stop.signal)
        elif stop.kind is stops.Kind.NEW and self._frozen:
            self._take(tid)
            self._standing.add(tid)
        else:
            calls.resume(tid)

    def _on_signal(self, tid: int, number: int) -> None:
        hit = self._ours(tid) if number == self._signal else None
        if hit is None:
            calls.resume(tid, number)
            return
        self._take(tid)  # ours, and not to be seen again
        self._held[tid] = _Held(time.monotonic_ns(), self._plan.hold_until(hit.number, hit.at_ns, self._start_ns), hit)
        self._listener.held(tid, hit.at_ns)

    # --- letting go ------------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let threads go whose time is over."""
        now = time.monotonic_ns()
        for tid, held in list(self._held.items()):
            if held.until_ns and held.until_ns <= now:
                self._let_go(tid, held, returns=self._plan.returns)

    def release_all(self, *, on_time: bool) -> None:
        """The fault is over: `on_time` at its deadline, when calls that are to return their value do so; else they are made as usual."""
        self._thaw()
        for tid, held in list(self._held.items()):
            self._let_go(tid, held, returns=on_time and self._plan.returns)

    def _let_go(self, tid: int, held: _Held, *, returns: bool) -> None:
        del self._held[tid]
        if returns:
            self._return(tid, held.hit)
        calls.resume(tid)
        self._listener.released(tid, time.monotonic_ns() - held.since_ns)

    def _return(self, tid: int, hit: Hit) -> None:
        """Skip the call: its thread stands at the entry, so the caller's frame is whole."""
        table = registers.registers()
        try:
            gadget = self._find_ret(hit.ip)
            calls.get_registers(tid, table)
            table.skip_call(self._plan.value, entry_sp=hit.sp, gadget=gadget)
            calls.set_registers(tid, table)
        except ProcessLookupError:
            return  # killed meanwhile
        except OSError as error:
            self._listener.trouble(f"thread {tid} could not be made to return: {error.strerror}; the call was made as usual")

    def _find_ret(self, address: int) -> int:
        """Of the function's own code; raises OSError where there is none."""
        if not registers.NEEDS_RET:
            return 0
        with open(f"{self._procfs.root}/{self._pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            found = registers.find_ret(memory.read(_CODE) or b"", address)
        if found is None:
            raise OSError(errno.ENOEXEC, "no return instruction was found in the function")
        return found

    def next_turn_ns(self) -> int:
        """When something is due by itself, 0 when nothing is."""
        due = min((held.until_ns for held in self._held.values() if held.until_ns), default=0)
        if self._plan.action == abi.ACTION_DUTY and self._start_ns:
            return self._next_toggle(time.monotonic_ns())
        return due

    # --- all threads at once ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Stop or continue the whole process as the plan wants it now."""
        if not self._start_ns or self._plan.action not in (abi.ACTION_FREEZE, abi.ACTION_DUTY):
            return
        now = time.monotonic_ns()
        if self._plan.action == abi.ACTION_FREEZE:
            wanted = True
        else:
            running, whole = self._plan.turn_ns(len(self.threads))
            wanted = (now - self._start_ns) % whole >= running
        if wanted and not self._frozen:
            self._freeze(now)
        elif self._frozen and not wanted:
            self._thaw()
        self._tell_frozen()

    def _next_toggle(self, now: int) -> int:
        running, whole = self._plan.turn_ns(len(self.threads))
        phase = (now - self._start_ns) % whole
        return now - phase + (running if phase < running else whole)

    def _freeze(self, now: int) -> None:
        self._frozen, self._froze_ns = True, now
        for tid in self.threads - self._group_stopped:
            with contextlib.suppress(ProcessLookupError):
                calls.ptrace(calls.INTERRUPT, tid)

    def _tell_frozen(self) -> None:
        """Once for each freeze, when no thread runs any more; of a duty cycle the first only."""
        if self._told or not self._frozen or not self.threads <= self._standing | self._group_stopped:
            return
        self._told = True
        self.freezes += 1
        if self.freezes == 1:
            self._listener.held(self._pid, self._froze_ns)

    def _thaw(self) -> None:
        if not self._frozen:
            return
        self._frozen = self._told = False
        standing, self._standing = self._standing, set()
        for tid in standing:
            calls.resume(tid)
