"""The holder: one child of the executor for each armed fault.

Its life: check the rank, choose a signal, seize every thread (this stops none of them), say Armed, wait for the deadline, do what the
plan says to the threads that are hit or to all of them, let them go, exit. Exiting is how it detaches: the kernel's exit_ptrace leaves
running threads running, where PTRACE_DETACH would need each of them interrupted first (an epoll_wait of the rank would then fail with
EINTR).

Executor side: `start`, then poll `Holder.fileno()`. `kill -9` of the holder in any state lets the rank go, and so does the
executor's own death (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes as c
import gc
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import calls, choose
from singularityd.kernel.ptrace.engine import Engine, Hit
from singularityd.kernel.ptrace.outbox import Outbox
from singularityd.kernel.ptrace.plan import Plan

__all__ = ["Armed", "Ended", "Held", "Hit", "HoldOrder", "Holder", "Plan", "Refused", "Released", "Report", "Trouble", "start"]

_ARMED, _REFUSED, _HELD, _RELEASED, _ENDED, _TROUBLE = 1, 2, 3, 4, 5, 6
_RECORD = struct.Struct("<IIQQ")
_TEXT_LIMIT = 2048
_BEGIN, _RELEASE = 1, 2
_COMMAND = struct.Struct("<IIQQ")
_IDLE = 60.0
"""Seconds a holder waits between Armed and begin before it gives up: its executor is wedged."""


class HoldOrder(NamedTuple):
    """Which rank, and how a hit is told from a signal of somebody else."""

    fault: int
    pid: int
    start_time: int
    plan: Plan
    ours: Callable[[int], Hit | None]
    """tid -> the hit, taken out; called in the child."""
    keep: tuple[int, ...] = ()
    """Descriptors that `ours` needs."""


class Armed(NamedTuple):
    """Every thread is traced; hits may be asked for with this signal."""

    threads: int
    signal: int
    took_ns: int


class Refused(NamedTuple):
    """The rank cannot be held."""

    code: str
    text: str
    hint: str


class Held(NamedTuple):
    """A thread stands still."""

    tid: int
    at_ns: int


class Released(NamedTuple):
    """It goes on."""

    tid: int
    held_ns: int


class Trouble(NamedTuple):
    """Something could not be done as asked; the fault goes on."""

    text: str


class Ended(NamedTuple):
    """The holder is done: deadline, cleared, rank exited, rank exec'd."""

    reason: str
    freezes: int = 0
    """How often the whole process was stopped."""


Report = Armed | Refused | Held | Released | Trouble | Ended


class Holder:
    """The executor's view."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._channel.setblocking(False)
        self._done = False
        self._reaped = False

    def fileno(self) -> int:
        """Readable when it reports or dies."""
        return self._channel.fileno()

    def begin(self, start_ns: int, end_ns: int) -> None:
        """The fault is in force; let go at this CLOCK_MONOTONIC time."""
        self._command(_BEGIN, start_ns, end_ns)

    def release(self, reason: str) -> None:
        """Let go now and end."""
        del reason
        self._command(_RELEASE)

    def _command(self, kind: int, start_ns: int = 0, end_ns: int = 0) -> None:
        try:
            self._channel.send(_COMMAND.pack(kind, 0, start_ns, end_ns))
        except OSError:
            return  # it is gone; read() says so

    def read(self) -> list[Report]:
        """Reports since the last call; the end of the child without one counts as Ended."""
        reports: list[Report] = []
        while True:
            try:
                data = self._channel.recv(_RECORD.size + _TEXT_LIMIT)
            except BlockingIOError:
                return reports
            except OSError:
                data = b""
            if not data:
                if not self._done:
                    self._done = True
                    reports.append(Ended("holder died"))
                return reports
            report = _decode(data)
            if report is not None:
                self._done = self._done or isinstance(report, (Ended, Refused))
                reports.append(report)

    def kill(self) -> None:
        """End it whatever it does; the kernel lets the rank go."""
        if self._reaped:
            return
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def reap(self) -> None:
        """Wait for its end (it was killed or has ended) and close the channel."""
        if not self._reaped:
            self._reaped = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self._channel.close()


def _decode(data: bytes) -> Report | None:
    if len(data) < _RECORD.size:
        return None
    kind, number, first, second = _RECORD.unpack_from(data)
    words = data[_RECORD.size :].decode("utf-8", "replace").split("\0")
    if kind == _ARMED:
        return Armed(number, first, second)
    if kind == _REFUSED and len(words) == 3:
        return Refused(*words)
    if kind == _HELD:
        return Held(number, first)
    if kind == _RELEASED:
        return Released(number, first)
    if kind == _TROUBLE:
        return Trouble(words[0])
    return Ended(words[0], number) if kind == _ENDED else None


def start(order: HoldOrder, *, procfs: ProcFs) -> Holder:
    """Fork a holder. The caller has one thread."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    # Signals are held back until the child has its own handlers: one of ours, run there, would write to our wake-up descriptor.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _child(order, procfs, there, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    there.close()
    return Holder(pid, here)


def _child(order: HoldOrder, procfs: ProcFs, channel: socket.socket, parent: int) -> NoReturn:
    status = 1
    # What the executor had become rubbish by now must not be closed here: its descriptor numbers are used again.
    gc.disable()
    outbox = Outbox(channel)
    child = _Child(order, procfs, channel, outbox)
    try:
        if calls.die_with_parent(parent, signal.SIGKILL):
            calls.set_name("singularity-hld")
            _close_others({channel.fileno(), *order.keep})
            child.run()
            status = 0
    except BaseException as error:  # noqa: BLE001 - nothing may return into the executor's code
        text = f"the holder failed: {type(error).__name__}: {error}"
        outbox.put(_record(_ENDED, text=text) if child.armed else _record(_REFUSED, text=f"failed\0{text}\0report it with this line"))
    finally:
        os._exit(status)


def _close_others(keep: set[int]) -> None:
    """Links, the front's channel and the lock are the executor's alone: a copy here would keep them alive after its death."""
    low = 3
    libc = c.CDLL(None)
    for descriptor in [*sorted(number for number in keep if number >= low), 0]:
        last = descriptor - 1 if descriptor else 0xFFFFFFFF
        # close_range, the same number everywhere
        if last >= low and libc.syscall(c.c_long(436), c.c_uint(low), c.c_uint(last), c.c_uint(0)):
            _close_listed(keep)  # a kernel before 5.9
            return
        low = descriptor + 1


def _close_listed(keep: set[int]) -> None:
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)


def _record(kind: int, number: int = 0, first: int = 0, second: int = 0, *, text: str = "") -> bytes:
    return _RECORD.pack(kind, number, first, second) + text.encode()[:_TEXT_LIMIT]


class _Child:
    """What runs in the fork."""

    def __init__(self, order: HoldOrder, procfs: ProcFs, channel: socket.socket, outbox: Outbox) -> None:
        self.armed = False
        self._order = order
        self._procfs = procfs
        self._channel = channel
        self._outbox = outbox
        self._end_ns = 0
        self._reason = ""

    def held(self, tid: int, at_ns: int) -> None:
        """Engine's listener."""
        self._outbox.put(_record(_HELD, tid, at_ns))

    def released(self, tid: int, held_ns: int) -> None:
        """Engine's listener."""
        self._outbox.put(_record(_RELEASED, tid, held_ns))

    def trouble(self, text: str) -> None:
        """Engine's listener."""
        self._outbox.put(_record(_TROUBLE, text=text))

    def run(self) -> None:
        """From the checks to the exit."""
        wake = self._handle_signals()
        began = time.monotonic_ns()
        order = self._order
        refused = choose.refusal(self._procfs, order.pid, order.start_time)
        chosen = refused or choose.choose(self._procfs, order.pid)
        if isinstance(chosen, choose.Refusal):
            self._refuse(chosen)
            return
        engine = Engine(pid=order.pid, signal_number=chosen, plan=order.plan, ours=order.ours, procfs=self._procfs, listener=self)
        refused = engine.seize()
        if refused is not None:
            self._refuse(refused)
            return
        self.armed = True
        self._outbox.put(_record(_ARMED, len(engine.threads), chosen, time.monotonic_ns() - began))
        self._hold(engine, wake)
        self._outbox.put(_record(_ENDED, engine.freezes, text=self._reason or engine.ended))

    def _refuse(self, why: choose.Refusal) -> None:
        self._outbox.put(_record(_REFUSED, text="\0".join(why)))

    def _handle_signals(self) -> int:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return reading

    def _hold(self, engine: Engine, wake: int) -> None:
        idle = time.monotonic_ns() + int(_IDLE * 1e9)
        channel = os.dup(self._channel.fileno())  # low: select takes numbers below 1024 only
        while not self._reason:
            drained = engine.drain()
            engine.release()
            engine.turn()
            now = time.monotonic_ns()
            end = self._end_ns or idle
            if engine.ended or now >= end:
                self._reason = engine.ended or ("deadline" if self._end_ns else "executor silent")
                break
            due = min(end, engine.next_turn_ns() or end) if drained else now
            self._wait(engine, wake, channel, max(0.0, (due - now) / 1e9))
        # Whatever stops from here on goes on, with its signal, when we exit.
        engine.release_all(on_time=self._reason == "deadline")

    def _wait(self, engine: Engine, wake: int, channel: int, seconds: float) -> None:
        # select, because poll counts in milliseconds and rounds up: a delay of 1 ms would be 2.
        readable, writable, _ = select.select([wake, channel], [channel] if self._outbox else [], [], seconds)
        if wake in readable:
            os.read(wake, 4096)
        if writable:
            self._outbox.flush()
        if channel in readable:
            self._on_command(engine)

    def _on_command(self, engine: Engine) -> None:
        data = self._channel.recv(_COMMAND.size)
        if len(data) != _COMMAND.size:
            os._exit(1)  # the executor is gone
        kind, _, start_ns, end_ns = _COMMAND.unpack(data)
        if kind == _BEGIN:
            self._end_ns = end_ns
            engine.begin(start_ns)
        else:
            self._reason = "cleared"
