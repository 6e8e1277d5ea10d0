"""What a caller may ask for. The executor checks the ones that matter a second time, for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from singularityd.errors import Busy, NotAllowed, Refused
from singularityd.faults import spec as wording
from singularityd.faults.quantity import duration_text
from singularityd.kernel import abi
from singularityd.model import Fault, FaultMode, FaultSpec, Rank

_WINDOW = 60.0
_DAY = 86_400.0


class FaultLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Settings `[faults]`."""

    mode: FaultMode = "admin"
    off_switch: str = "/etc/singularityd/no-faults"
    max_duration: float = 60.0
    """Seconds from arming to the deadline."""
    max_active: int = 8
    """Faults of this host that are armed, or being armed, at once."""
    max_ranks_per_job: int = 1
    budget: float = 86.4
    """Seconds within any day for which one job may be disturbed."""
    collective_timeout: float = 600.0
    """Seconds, where the job itself does not tell."""
    per_minute: int = 60
    """Requests in any minute; dry runs are not counted."""
    silence: float = 2.0
    """Seconds after the deadline without word from the executor after which a fault is given up."""


class Caller(NamedTuple):
    """Who asks."""

    uid: int = 0
    admin: bool = True


class Situation(NamedTuple):
    """What a request meets."""

    rank: Rank
    job: Sequence[Rank]
    """All processes of the job on this host, the rank's own too."""
    active: Sequence[Fault]
    """Armed or being armed on this host."""
    ended: Sequence[Fault]
    """The newest of those that are over."""
    timeout: float | None
    """Seconds after which the job gives up a collective, where it tells."""


class Gate:
    """Applies the limits. Loop thread only."""

    def __init__(self, limits: FaultLimits) -> None:
        self.limits = limits
        self._times: deque[float] = deque()

    def check(self, spec: FaultSpec, caller: Caller, now: Situation, clock: float) -> None:
        """Raises NotAllowed, Busy or Refused, naming the setting. `clock` is Unix time."""
        self._check_mode(caller, now.rank)
        self._check_numbers(spec, now)
        self._check_job(now)
        self._check_timeout(spec, now)
        self._check_budget(now, clock)

    def _check_mode(self, caller: Caller, rank: Rank) -> None:
        mode = self.limits.mode
        if mode == "off":
            raise NotAllowed("faults are switched off on this host", hint='set faults.mode = "admin" and restart the daemon')
        if Path(self.limits.off_switch).exists():
            raise NotAllowed(
                f"faults are switched off: {self.limits.off_switch} exists", hint="remove the file once whoever made it agrees"
            )
        if mode == "admin" and not caller.admin:
            raise NotAllowed("only an administrator may inject faults here", hint='faults.mode = "drill" lets users into their own jobs')
        if mode == "drill" and not rank.drill:
            text = f"job {rank.job} does not take part in drills"
            raise NotAllowed(text, hint="start it with SINGULARITY_DRILL=1 in its environment")
        if mode == "drill" and not caller.admin and caller.uid != rank.uid:
            raise NotAllowed(f"job {rank.job} belongs to user {rank.uid}, not to {caller.uid}", hint="an administrator may")

    def _check_numbers(self, spec: FaultSpec, now: Situation) -> None:
        limits = self.limits
        if spec.duration > limits.max_duration:
            asked, most = (duration_text(round(seconds * 1000)) for seconds in (spec.duration, limits.max_duration))
            raise NotAllowed(f"a fault may last up to {most}, not {asked}", hint=f"write --for {most}, or raise faults.max_duration")
        if len(now.active) >= limits.max_active:
            raise Busy(
                f"{len(now.active)} faults are armed on this host, which is the limit",
                hint="wait for one to end, or `singularityctl clear` one; faults.max_active is the limit",
            )
        others = {fault.spec.rank for fault in now.active if fault.job == now.rank.job} - {now.rank.rank}
        if len(others) >= limits.max_ranks_per_job:
            names = ", ".join(str(number) for number in sorted(others))
            raise Busy(
                f"rank {names} of job {now.rank.job} has a fault already, and {limits.max_ranks_per_job} at a time is the limit",
                hint="wait for it to end, or raise faults.max_ranks_per_job",
            )

    @staticmethod
    def _check_job(now: Situation) -> None:
        """A job that has lost a rank is busy enough."""
        alive = {rank.rank for rank in now.job if rank.state in ("running", "stopped")}
        for rank in now.job:
            if rank.rank is not None and rank.rank not in alive:
                raise Refused(
                    f"rank {rank.rank} of job {rank.job} is {'dying' if rank.state == 'dying' else 'dead'}: its job is in trouble already",
                    hint="try again when the rank is back; singularityctl ranks shows it",
                )

    def _check_timeout(self, spec: FaultSpec, now: Situation) -> None:
        longest = _longest_hold(spec)
        timeout = now.timeout or self.limits.collective_timeout
        if longest > timeout / 2 and not spec.may_kill_job:
            known = "its collectives give up after" if now.timeout else "its collectives are taken to give up after"
            raise NotAllowed(
                f"a hold of {longest:g} s may end job {now.rank.job}: {known} {timeout:g} s",
                hint=f"hold for {timeout / 2:g} s at most, or write --may-kill-job",
            )

    def _check_budget(self, now: Situation, clock: float) -> None:
        allowed = self.limits.budget
        used = [
            (fault.ended_at - fault.armed_at, fault.ended_at)
            for fault in now.ended
            if fault.job == now.rank.job and fault.hits and fault.armed_at and fault.ended_at > clock - _DAY
        ]
        total = sum(seconds for seconds, _ in used)
        if total < allowed:
            return
        again = min(ended for _, ended in used) + _DAY - clock
        raise Busy(
            f"faults have disturbed job {now.rank.job} for {total:.0f} s within a day, and {allowed:.0f} s is the limit",
            hint=f"try again in {duration_text(max(1, round(again / 60)) * 60_000)}, or raise faults.budget",
        )

    def count(self, now: float) -> None:
        """Count one request at `now` (loop time, seconds). Raises Busy when the last minute is full."""
        while self._times and now - self._times[0] >= _WINDOW:
            self._times.popleft()
        if len(self._times) >= self.limits.per_minute:
            wait = _WINDOW - (now - self._times[0])
            text = f"{self.limits.per_minute} faults were asked for within a minute, which is the limit"
            raise Busy(text, hint=f"try again in {wait:.0f} s; faults.per_minute is the limit")
        self._times.append(now)


def _longest_hold(spec: FaultSpec) -> float:
    """Seconds that the rank may stand still at once."""
    pattern = wording.find(spec.pattern)
    if pattern.action == abi.ACTION_FREEZE:
        return spec.duration
    if pattern.action != abi.ACTION_HOLD or pattern.at_once:
        return 0.0
    if spec.on:
        return spec.on / 1000
    return (spec.milliseconds + spec.jitter) / 1000 if spec.milliseconds else spec.duration
