"""Armed faults: one entry of inject_config and, for what ptrace does, one holder process each, from Arm to Ended.

The limits are checked here a second time: whatever the front asks, only a known rank, only within the settings, only until the
deadline. Nothing here outlives the executor: holders die with it, the kernel then lets every thread go, and an entry of
inject_config without its program's link does nothing. Executor only, single thread.
"""

from __future__ import annotations

import ctypes as c
import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from singularityd.kernel import abi, bpf, messages
from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import holder, plan

RETURN_AT_ONCE, RETURN_AT_END = 1, 2
"""Message Arm, `returns`, where `ms` is 0: without waiting; at the deadline."""
LONGEST_TURN_MS = 1000
"""Of a duty cycle: a rank stands still for less than this at a time."""
_LOOK = 0.1
"""Seconds between two looks for the off switch while a fault is armed."""
GRACE_NS = 250_000_000
"""How long after the deadline a holder may take to let go before it is killed, which lets go for it."""


class Limits(NamedTuple):
    """What the executor allows by itself."""

    enabled: bool
    max_duration_ms: int
    max_active: int
    off_switch: str
    """While this file exists nothing is armed."""


class Loop(Protocol):
    """What the executor's loop offers."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back when readable."""

    def forget(self, descriptor: int) -> None:
        """Stop watching."""

    def send(self, message: messages.Message) -> None:
        """Tell the front."""


class ArmedFault:
    """One fault between Arm and Ended."""

    def __init__(self, order: messages.Arm, held_by: holder.Holder | None) -> None:
        self.order = order
        self.number = int(order.fault)
        self.pid = int(order.pid)
        self.holder = held_by
        """None where the probe's own signal is the mechanism."""
        self.armed = False
        self.end_ns = 0
        self.reason = ""
        self.counts = abi.FaultEntry()
        self.freezes = 0

    @property
    def grace_ns(self) -> int:
        """How long after the deadline somebody else may end it."""
        return GRACE_NS if self.holder is not None else 0


class Arms:
    """All faults of this host."""

    def __init__(
        self,
        *,
        maps: Mapping[str, int],
        procfs: ProcFs,
        loop: Loop,
        limits: Limits,
        is_rank: Callable[[int, int], bool],
        unwatched: Callable[[int, int, int], str],
    ) -> None:
        """`is_rank` is asked (pid, start time); `unwatched` (pid, point, backend) says why no such call can be hit, or nothing."""
        self._inject_map = maps["inject_config"]
        self._held_map = maps["held"]
        self._procfs = procfs
        self._loop = loop
        self.limits = limits
        """Replaced as a whole when the settings are reloaded."""
        self._is_rank = is_rank
        self._unwatched = unwatched
        self._faults: dict[int, ArmedFault] = {}

    def __len__(self) -> int:
        return len(self._faults)

    def arm(self, order: messages.Arm) -> None:
        """Start a holder, or answer Refused."""
        refusal = self._refusal(order)
        if refusal:
            self._refuse(order, *refusal)
            return
        if order.action == abi.ACTION_KILL:
            self._faults[int(order.fault)] = fault = ArmedFault(order, None)
            self._begin(fault, mechanism="signal")
            return
        request = holder.HoldOrder(
            fault=int(order.fault),
            pid=int(order.pid),
            start_time=int(order.start_time),
            plan=plan_of(order),
            ours=self._take_hit,
            keep=(self._held_map,),
        )
        try:
            held_by = holder.start(request, procfs=self._procfs)
        except OSError as error:
            self._refuse(order, "failed", f"cannot start a holder: {error.strerror}", "see the host's process limits")
            return
        fault = ArmedFault(order, held_by)
        self._faults[fault.number] = fault
        self._loop.watch(held_by.fileno(), lambda: self._on_reports(fault))

    def _refusal(self, order: messages.Arm) -> tuple[str, str, str] | None:
        limits = self.limits
        if not limits.enabled:
            return "not_allowed", "faults are switched off on this host", 'set faults.mode = "admin" and restart'
        if os.path.exists(limits.off_switch):
            return "not_allowed", f"faults are switched off: {limits.off_switch} exists", "remove the file once whoever made it agrees"
        if not 0 < order.duration_ms <= limits.max_duration_ms:
            text = f"a fault may last up to {limits.max_duration_ms / 1000:g} s, not {order.duration_ms / 1000:g} s"
            return "not_allowed", text, "shorten --for or raise faults.max_duration"
        if not 0 < order.ppm <= 1_000_000 or (order.point and order.point not in abi.OPS) or order.backend not in (0, *abi.BACKENDS):
            return "bad_option", "probability, point or backend out of range", ""
        if not _is_sound(order):
            return "bad_option", "the action's numbers are out of range", ""
        if not self._is_rank(int(order.pid), int(order.start_time)):
            return "rank_gone", f"process {order.pid} is no rank of this host", "see singularityctl ranks"
        needs_probe = order.action in (abi.ACTION_HOLD, abi.ACTION_KILL)
        if needs_probe and (why := self._unwatched(int(order.pid), int(order.point), int(order.backend))):
            return "not_watched", why, "singularityctl status shows what is probed; another point, or kernel.guard = false, may reach it"
        if order.fault in self._faults or any(fault.pid == order.pid for fault in self._faults.values()):
            return "already_armed", f"process {order.pid} already has a fault", "singularityctl clear ends it"
        if len(self._faults) >= limits.max_active:
            return "busy", f"{limits.max_active} faults are armed on this host", "wait, or raise faults.max_active"
        return None

    def _refuse(self, order: messages.Arm, code: str, text: str, hint: str) -> None:
        self._loop.send(messages.Refused(request=order.request, fault=order.fault, code=code, words=text, hint=hint))

    def _take_hit(self, tid: int) -> holder.Hit | None:
        # Runs in the holder: its own copy of the descriptor. Taking it out makes a second SIGURG of the same thread somebody else's.
        value = abi.Held()
        if not bpf.take(self._held_map, c.c_uint32(tid), value):
            return None
        return holder.Hit(fault=int(value.fault), at_ns=int(value.at_ns), ip=int(value.ip), sp=int(value.sp), number=int(value.index))

    def _on_reports(self, fault: ArmedFault) -> None:
        assert fault.holder is not None
        for report in fault.holder.read():
            self._on_report(fault, report)
            if fault.number not in self._faults:
                return

    def _on_report(self, fault: ArmedFault, report: holder.Report) -> None:
        if isinstance(report, holder.Armed):
            self._begin(fault, mechanism="ptrace", signal=report.signal, threads=report.threads)
        elif isinstance(report, holder.Refused):
            self._refuse(fault.order, report.code, report.text, report.hint)
            self._drop(fault)
        elif isinstance(report, holder.Held):
            self._loop.send(messages.Holding(held=1, fault=fault.number, at_ns=report.at_ns, tid=report.tid))
        elif isinstance(report, holder.Released):
            now = time.monotonic_ns()
            self._loop.send(messages.Holding(held=0, fault=fault.number, at_ns=now, held_ns=report.held_ns, tid=report.tid))
        elif isinstance(report, holder.Trouble):
            self._loop.send(messages.Notice(level=30, words=f"fault f{fault.number}: {report.text}"))
        elif isinstance(report, holder.Ended):
            fault.freezes = report.freezes
            self._end(fault, fault.reason or report.reason)

    def _begin(self, fault: ArmedFault, *, mechanism: str, signal: int = 0, threads: int = 0) -> None:
        order = fault.order
        start = time.monotonic_ns()
        fault.end_ns = start + int(order.duration_ms) * 1_000_000
        if order.action in (abi.ACTION_HOLD, abi.ACTION_KILL):
            self._put(fault, start, signal)
        if fault.holder is not None:
            fault.holder.begin(start, fault.end_ns)
        fault.armed = True
        answer = messages.Armed(
            request=order.request,
            fault=order.fault,
            start_ns=start,
            end_ns=fault.end_ns,
            signal=signal,
            threads=threads,
            mechanism=mechanism,
        )
        self._loop.send(answer)

    def _put(self, fault: ArmedFault, start: int, signal: int) -> None:
        """Into inject_config: from here calls are hit."""
        order = fault.order
        entry = abi.FaultEntry(
            id=order.fault,
            start_ns=start,
            end_ns=fault.end_ns,
            seed=order.seed,
            max_hits=order.count,
            after=order.after,
            on_ns=int(order.on_ms) * 1_000_000,
            period_ns=(int(order.on_ms) + int(order.off_ms)) * 1_000_000 if order.on_ms else 0,
            ms=order.ms,
            ppm=order.ppm,
            rank=order.rank,
            point=order.point,
            backend=order.backend,
            signal=signal,
            action=order.action,
        )
        bpf.update(self._inject_map, c.c_uint32(fault.pid), entry)

    def _end(self, fault: ArmedFault, reason: str) -> None:
        if not fault.armed:
            self._refuse(fault.order, "rank_gone", f"process {fault.pid}: {reason}", "see singularityctl ranks")
            self._drop(fault)
            return
        self._drop(fault)
        self._loop.send(messages.Ended(fault=fault.number, hits=fault.counts.hits + fault.freezes, seen=fault.counts.seen, reason=reason))

    def _withdraw(self, fault: ArmedFault) -> None:
        """Take the entry, with its last counts, out of inject_config: from here no call is hit."""
        bpf.take(self._inject_map, c.c_uint32(fault.pid), fault.counts)

    def _drop(self, fault: ArmedFault) -> None:
        self._faults.pop(fault.number, None)
        self._withdraw(fault)
        if fault.holder is not None:
            self._loop.forget(fault.holder.fileno())
            fault.holder.kill()
            fault.holder.reap()

    def clear(self, number: int, reason: str) -> None:
        """End one fault now; 0 ends all. The entry goes first, so that no new call is hit while the holder lets go."""
        for fault in list(self._faults.values()):
            if number in (0, fault.number):
                fault.reason = reason
                self._withdraw(fault)
                if fault.holder is None:
                    self._end(fault, reason)
                    continue
                fault.holder.release(reason)
                fault.end_ns = min(fault.end_ns or time.monotonic_ns(), time.monotonic_ns())

    def kill_all(self) -> None:
        """Let every rank go at once, for the daemon stops."""
        self.end_all("daemon stopped")

    def end_all(self, reason: str) -> None:
        """Let every rank go at once: the holders die, the kernel does the rest."""
        for fault in list(self._faults.values()):
            self._end(fault, fault.reason or reason)

    def on_exit(self, pid: int, reason: str = "rank exited") -> None:
        """The rank is gone, or runs another program; its holder will say so, and is not waited for longer than the grace."""
        for fault in list(self._faults.values()):
            if fault.pid != pid:
                continue
            fault.reason = fault.reason or reason
            if fault.holder is None:
                self._end(fault, fault.reason)
            else:
                fault.end_ns = min(fault.end_ns or time.monotonic_ns(), time.monotonic_ns())

    def enforce(self) -> None:
        """End what is over and has no holder, and kill holders that are late: whatever a holder does, its death lets the rank go."""
        if self._faults and os.path.exists(self.limits.off_switch):
            self.end_all("switched off")
        now = time.monotonic_ns()
        for fault in list(self._faults.values()):
            if fault.end_ns and now > fault.end_ns + fault.grace_ns:
                self._end(fault, fault.reason or "deadline")

    def next_deadline(self) -> float | None:
        """Seconds until `enforce` must be called, None when nothing is armed."""
        if not self._faults:
            return None
        ends = [(fault.end_ns + fault.grace_ns - time.monotonic_ns()) / 1e9 for fault in self._faults.values() if fault.end_ns]
        return max(0.0, min([*ends, _LOOK]))


def plan_of(order: messages.Arm) -> holder.Plan:
    """What the holder is told."""
    return holder.Plan(
        action=int(order.action),
        milliseconds=int(order.ms),
        jitter=int(order.jitter_ms),
        distribution=int(order.distribution),
        returns=bool(order.returns),
        value=int(order.value),
        until_end=order.returns != RETURN_AT_ONCE,
        on=int(order.on_ms),
        off=int(order.off_ms),
        running_ppm=int(order.running_ppm),
        period=int(order.period_ms),
        seed=int(order.seed),
        rank=int(order.rank),
    )


def _is_sound(order: messages.Arm) -> bool:
    """Whether the numbers of an action are such that it ends, and does what it says."""
    if order.action not in abi.ACTIONS or order.distribution not in plan.DISTRIBUTIONS.values():
        return False
    if order.returns > RETURN_AT_END or (order.returns and order.action != abi.ACTION_HOLD):
        return False
    if order.returns and order.backend != abi.BACKEND_CODES["nccl"]:
        return False  # a C++ function that throws has no result to give
    if order.action == abi.ACTION_DUTY and not (0 < order.running_ppm < 1_000_000 and order.period_ms <= LONGEST_TURN_MS):
        return False
    longest = order.duration_ms
    return bool(order.ms <= longest and order.jitter_ms <= longest and order.on_ms <= longest and order.off_ms <= longest)
