"""Arms, watches and ends faults. Loop thread only; blocking work happens in `bookkeeping`.

The order is: resolve the rank, check the limits, write the journal's row (on the disk), order the executor, write "armed", publish. So
nothing is armed without a row, and what a crash leaves open is closed at the next start. The executor and the kernel end a fault at
its deadline by themselves; everything here that waits for them has a time limit of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import structlog

from singularityd.errors import AlreadyArmed, ExecutorGone, Failed, JournalUnavailable, NoSuchFault, Refused, SingularityError
from singularityd.faults import results, target, telling
from singularityd.faults import spec as wording
from singularityd.faults.active import Active, Ending
from singularityd.faults.asking import ARM_PATIENCE, CLEAR_PATIENCE, Asking
from singularityd.faults.bookkeeping import Bookkeeping
from singularityd.faults.journal import JournalLike, number_of
from singularityd.faults.limits import Caller, FaultLimits, Gate, Situation
from singularityd.faults.orders import Armed, ArmOrder, Executor
from singularityd.faults.tasks import Tasks
from singularityd.faults.worker import Worker, WorkerLike
from singularityd.model import Event, Fault, FaultSpec, Rank

__all__ = ["ArmOrder", "Armed", "DryRun", "Executor", "FaultLimits", "FaultService"]

RECOVERY_RETRY = 5.0
"""Seconds between two attempts to close what the last run left."""
ENDED_KEPT = 256
PAST_KEPT = 4096
ADMIN = Caller()
"""Faults that are over and kept at hand, for words about them that come late and for the metrics page."""


class Publisher(Protocol):
    """The event bus."""

    def publish(self, event: Event) -> Event:
        """Never blocks."""


class DryRun(NamedTuple):
    """What an injection would do."""

    fault: Fault
    """Without an id: nothing was journaled."""
    rank: Rank
    text: str


class FaultService:
    """All faults of this host."""

    def __init__(
        self,
        *,
        registry: target.Ranks,
        executor: Executor,
        journal: JournalLike,
        bus: Publisher,
        clock: Callable[[], float] = time.time,
        limits: FaultLimits | None = None,
        worker: WorkerLike | None = None,
        timeout_of: Callable[[Rank], float | None] = lambda rank: None,
    ) -> None:
        """`timeout_of` says after how many seconds a rank gives up a collective, where it tells."""
        self._registry = registry
        self._tasks = Tasks()
        self._asking = Asking(executor, self._tasks)
        self._books = Bookkeeping(journal, worker or Worker("journal"))
        self._bus = bus
        self._clock = clock
        self._gate = Gate(limits or FaultLimits())
        self._timeout_of = timeout_of
        self._log = structlog.get_logger("faults")
        self._actives: dict[tuple[int, int], Active] = {}
        self._numbered: dict[int, Active] = {}
        self._ended: OrderedDict[int, Active] = OrderedDict()
        self._past: deque[Fault] = deque(maxlen=PAST_KEPT)
        """Faults that have ended, oldest first."""
        self._recovery: asyncio.Task[None] | None = None
        self._stopping = False
        self._executor_there = True

    @property
    def books(self) -> Bookkeeping:
        """The journal from the loop's side; campaigns are kept in the same file."""
        return self._books

    # --- life ----------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Close what the last run left open. A journal that cannot be used is logged and tried again; nothing is armed until it can."""
        try:
            await self._recover()
        except JournalUnavailable as error:
            self._log.error("faults cannot be armed: the journal is unavailable", error=error.text, hint=error.hint)
            self._retry_recovery()

    async def stop(self) -> None:
        """Clear every fault, also those just being armed, and journal it. Afterwards nothing is armed and nothing can be."""
        self._stopping = True
        ends = [self._end(active, "daemon stopped") for active in self._actives.values()]
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(failure, BaseException):
                self._log.warning("a fault was not cleared in order; its deadline ends it", error=str(failure))
        for active in list(self._numbered.values()):
            self._finish(active, "daemon stopped")
        await self._tasks.drain(CLEAR_PATIENCE)
        await self._books.finish(wait=CLEAR_PATIENCE)

    async def on_executor_lost(self) -> None:
        """The privileged half died, and with it every hold: the kernel lets traced threads go."""
        self._executor_there = False
        for active in list(self._actives.values()):
            if active.number:
                self._finish(active, "executor died")
            else:
                self._wish(active, "executor died")

    def executor_back(self) -> None:
        """Faults can be armed again."""
        self._executor_there = True

    # --- requests ------------------------------------------------------------------------------------------------------------

    async def inject(self, spec: FaultSpec, who: str, caller: Caller = ADMIN, campaign: str = "") -> Fault:
        """Arm a fault; returned armed, or already ended where that came first. `who` is for the journal and the event.

        Raises the registry's errors, NotAllowed, Busy, Refused, AlreadyArmed, RankGone, JournalUnavailable, ExecutorGone and what the
        executor refuses with. A caller that gives up meanwhile (cancellation) leaves nothing armed.
        """
        rank, value = self._admit(spec, caller)
        self._gate.count(asyncio.get_running_loop().time())
        draft = msgspec.structs.replace(self._draft(spec, rank, who), campaign=campaign)
        active = Active(draft, self._bus.publish, value=value)
        self._actives[active.key] = active
        arming = self._tasks.spawn(self._arm(active))
        try:
            return await asyncio.shield(arming)
        except asyncio.CancelledError:
            self._wish(active, "caller gone")
            if active.in_force:
                self._tasks.spawn(self._end(active, "caller gone"))
            raise

    def dry_run(self, spec: FaultSpec, who: str = "", caller: Caller = ADMIN) -> DryRun:
        """Everything that is checked before arming, and what would happen; nothing is armed, journaled or published."""
        rank, _ = self._admit(spec, caller)
        fault = self._draft(spec, rank, who)
        fault = msgspec.structs.replace(fault, mechanism=wording.find(spec.pattern).mechanisms[0])
        whom = telling.whom(spec.rank, rank.job)
        text = f"would arm {spec.pattern} on {whom} (process {rank.pid}{f', {rank.name}' if rank.name else ''}) by {fault.mechanism}"
        return DryRun(fault, rank, f"{text}: {telling.calls(spec)}, for {spec.duration:g} s; nothing was armed")

    async def clear(self, fault_id: str, who: str) -> list[Fault]:
        """End one fault, or `all`, now; returned ended. One that is over already is returned as it is.

        Raises NoSuchFault, and ExecutorGone where the executor does not answer; the deadline then ends the fault.
        """
        if fault_id == "all":
            chosen = list(self._actives.values())
        elif (active := self._find(fault_id)) is None or active.over:
            return [await self.get(fault_id)]
        else:
            chosen = [active]
        results = await asyncio.gather(*(self._end(active, "cleared", who) for active in chosen), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [active.fault for active in chosen if active.fault.id]

    async def wait(self, fault_id: str) -> Fault:
        """The fault when it is over; at once where it is. Raises NoSuchFault."""
        active = self._find(fault_id)
        if active is None:
            return await self.get(fault_id)
        await asyncio.wait({active.ended})
        return active.fault

    async def get(self, fault_id: str) -> Fault:
        """Raises NoSuchFault, JournalUnavailable."""
        active = self._find(fault_id)
        fault = active.fault if active is not None else await self._books.get(fault_id)
        if fault is None:
            raise NoSuchFault(f"no fault {fault_id[:40]!r} is journaled", hint="ids look like f12; `singularityctl faults` lists them")
        return fault

    def active(self) -> list[Fault]:
        """Those being armed, with an id, and those armed; oldest first."""
        return [active.fault for active in self._numbered.values()]

    def recent(self, within: float) -> tuple[Fault, ...]:
        """Those that are active, and those that ended in the last `within` seconds; for the metrics page. Oldest first."""
        since = self._clock() - within
        ended = [active.fault for active in self._ended.values() if active.fault.ended_at >= since]
        return tuple(sorted([*ended, *self.active()], key=lambda fault: number_of(fault.id) or 0))

    async def history(self, limit: int) -> list[Fault]:
        """The newest faults of the journal, newest first, with what is known here and not written yet. Raises JournalUnavailable."""
        written = await self._books.history(limit)
        return [active.fault if (active := self._find(fault.id)) is not None else fault for fault in written]

    # --- what the executor says (called by the link) --------------------------------------------------------------------------

    def on_hit(self, number: int, *, tid: int, op: str, comm: str, index: int, at: float) -> None:
        """The kernel program chose a call of thread `tid`; `index` counts the calls seen, `at` is Unix time."""
        active = self._known(number)
        if active is None:
            return
        if not active.final:
            active.change(hits=active.fault.hits + 1)
            self._books.save(active.fault, soon=True)
        active.tell(telling.hit(active.fault, tid=tid, op=op, comm=comm, index=index, at=at))

    def on_held(self, number: int, tid: int, at: float) -> None:
        """The thread stands still since `at` (Unix time)."""
        if (active := self._known(number)) is not None:
            active.tell(telling.held(active.fault, tid, at))

    def on_released(self, number: int, tid: int, at: float, held: float) -> None:
        """The thread goes on since `at`, after `held` seconds."""
        if (active := self._known(number)) is not None:
            active.tell(telling.released(active.fault, tid, at, held))

    def on_ended(self, number: int, *, reason: str, hits: int, seen: int) -> None:
        """The fault is over; the counts are the last word, whatever `on_hit` has counted."""
        active = self._known(number)
        if active is None:
            return
        ending = Ending(reason, hits, seen)
        if active.over or active.in_force:
            self._finish(active, active.wish if active.wish and reason == "cleared" else reason, ending)
        else:
            active.early = ending

    # --- arming --------------------------------------------------------------------------------------------------------------

    def _admit(self, spec: FaultSpec, caller: Caller) -> tuple[Rank, int]:
        """The rank, and what a skipped call returns; all in one go with no await: two requests for a rank cannot both pass."""
        if self._stopping:
            raise Refused("the daemon is stopping", hint="try again when it runs")
        rank = target.find(self._registry, spec)
        whom = telling.whom(spec.rank, rank.job)
        other = self._actives.get((rank.pid, rank.start_time))
        if other is not None and other.fault.id:
            raise AlreadyArmed(f"{whom} has fault {other.fault.id} already", hint=f"`singularityctl clear {other.fault.id}` ends it")
        if other is not None:
            raise AlreadyArmed(f"another request is arming a fault on {whom}", hint="`singularityctl faults` shows it in a moment")
        now = Situation(
            rank=rank,
            job=self._registry.jobs().get(rank.job, ()),
            active=[active.fault for active in self._actives.values()],
            ended=self._past,
            timeout=self._timeout_of(rank),
        )
        self._gate.check(spec, caller, now, self._clock())
        if not self._executor_there:
            raise ExecutorGone("the privileged half of the daemon is not running", hint="it is restarted by itself; try again in a moment")
        return rank, results.code(spec.result, rank) if spec.result else 0

    def _draft(self, spec: FaultSpec, rank: Rank, who: str) -> Fault:
        return Fault(
            id="", spec=spec, state="arming", job=rank.job, pid=rank.pid, start_time=rank.start_time, who=who, created_at=self._clock()
        )

    async def _arm(self, active: Active) -> Fault:
        try:
            await self._recover()
            active.fault = await self._books.create(active.fault)
        except JournalUnavailable as error:
            self._refuse(active, error)
            raise
        except Exception as error:  # a defect, and the rank must not stay reserved for it
            self._refuse(active, Failed(f"the journal failed: {error!r}"))
            raise
        active.number = number_of(active.fault.id) or 0
        self._numbered[active.number] = active
        try:
            answer = None if active.wish else await self._asking.arm(_order_of(active), active.ended)
            if answer is None:
                raise _not_armed(active)
        except SingularityError as error:
            self._refuse(active, error)
            raise
        return await self._in_force(active, answer)

    async def _in_force(self, active: Active, answer: Armed) -> Fault:
        """The executor has armed it: from here it ends by a word of the executor, or by the backstop."""
        active.in_force = True
        active.change(state="armed", mechanism=answer.mechanism, armed_at=self._clock())
        news = telling.armed(active.fault, answer)
        patience = active.fault.spec.duration + self._gate.limits.silence
        active.timer = asyncio.get_running_loop().call_later(patience, lambda: self._tasks.spawn(self._overdue(active)))
        if active.early is not None:
            self._finish(active, active.early.reason, active.early)
        try:
            if not active.over:
                await self._books.update(active.fault)
        except JournalUnavailable as error:
            active.open(news)
            await self._journal_lost(active, error)
            raise
        active.open(news)
        if active.wish and not active.over:
            await self._end(active, active.wish, active.wished_by)
        return active.fault

    async def _journal_lost(self, active: Active, error: JournalUnavailable) -> None:
        self._log.error("a fault is cleared: the journal failed after arming", fault=active.fault.id, error=error.text)
        try:
            await self._end(active, "journal failed")
        except SingularityError:
            self._log.error("the fault could not be cleared; its deadline ends it", fault=active.fault.id)

    # --- ending --------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _wish(active: Active, reason: str, who: str = "") -> None:
        if not active.wish:
            active.wish, active.wished_by = reason, who

    async def _end(self, active: Active, reason: str, who: str = "") -> Fault:
        """Have it ended and wait for that. While it is being armed, `_arm` sees the wish and ends it. Raises ExecutorGone."""
        self._wish(active, reason, who)
        if not active.in_force:
            await asyncio.wait({active.ended}, timeout=3 * ARM_PATIENCE)
        if active.in_force:
            try:
                await self._asking.clear(active.number)
            except SingularityError:
                active.wish = active.wished_by = ""
                raise
            await asyncio.wait({active.ended}, timeout=CLEAR_PATIENCE)
        if not active.over and active.number:
            self._finish(active, "executor silent")
        return active.fault

    async def _overdue(self, active: Active) -> None:
        """The backstop: nothing was heard by the deadline and some seconds more."""
        if active.over:
            return
        self._log.error("the executor is silent about a fault that should be over", fault=active.fault.id)
        await self._asking.clear_quietly(active.number)
        await asyncio.wait({active.ended}, timeout=CLEAR_PATIENCE / 2)
        if not active.over:
            self._finish(active, "executor silent")

    def _refuse(self, active: Active, error: SingularityError) -> None:
        """It is not armed, and the caller is told by the error; where it is over already, only what was kept is published."""
        if not active.over:
            hits, seen = (active.early.hits, active.early.seen) if active.early is not None else (active.fault.hits, 0)
            active.change(state="refused", ending=error.text, ended_at=self._clock(), hits=hits, seen=seen)
            self._close(active)
            active.tell(telling.refused(active.fault))
        active.open()

    def _finish(self, active: Active, reason: str, ending: Ending | None = None) -> None:
        """It is over. Called again for a word that comes late: the counts are corrected then, the rest stands."""
        first = not active.over
        if ending is not None and not active.final:
            active.final = True
            active.change(hits=ending.hits, seen=ending.seen)
        if first:
            by = active.wished_by if reason == active.wish else ""
            active.change(state="ended", ending=reason, ended_at=self._clock())
            self._close(active)
            self._past.append(active.fault)
            active.tell(telling.ended(active.fault, by))
        elif active.fault.id:
            self._books.save(active.fault)

    def _close(self, active: Active) -> None:
        active.stop_timer()
        active.in_force = False
        self._actives.pop(active.key, None)
        if active.number:
            del self._numbered[active.number]
            self._ended[active.number] = active
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)
        if active.fault.id:
            self._books.save(active.fault)
        active.ended.set_result(active.fault)

    # --- small things --------------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Close what the last run left open, once; tried again for the next fault where the journal fails."""
        if self._recovery is None or (self._recovery.done() and (self._recovery.cancelled() or self._recovery.exception() is not None)):
            self._recovery = self._tasks.spawn(self._close_leftovers())
        await asyncio.shield(self._recovery)

    def _retry_recovery(self) -> None:
        """Until it succeeds `singularityctl faults` shows faults as armed that are not."""

        async def again() -> None:
            try:
                await self._recover()
            except JournalUnavailable:
                self._retry_recovery()

        if not self._stopping:
            asyncio.get_running_loop().call_later(RECOVERY_RETRY, lambda: self._stopping or self._tasks.spawn(again()))

    async def _close_leftovers(self) -> None:
        for fault in await self._books.close_open("daemon restarted"):
            self._bus.publish(telling.ended(fault))
        # What faults have cost a job today is not forgotten by a restart.
        self._past.extendleft(fault for fault in await self._books.history(PAST_KEPT) if fault.ended_at)

    def _known(self, number: int) -> Active | None:
        return self._numbered.get(number) or self._ended.get(number)

    def _find(self, fault_id: str) -> Active | None:
        number = number_of(fault_id)
        return None if number is None else self._known(number)


def _not_armed(active: Active) -> SingularityError:
    """What the caller is told when somebody, or the executor's death, was faster than the arming."""
    why = active.fault.ending if active.over else active.wish
    text = f"fault {active.fault.id} was ended before it was armed: {why}"
    return ExecutorGone(text, hint="try again in a moment") if why == "executor died" else Refused(text)


def _order_of(active: Active) -> ArmOrder:
    fault, spec = active.fault, active.fault.spec
    pattern = wording.find(spec.pattern)
    return ArmOrder(
        number=active.number,
        pid=fault.pid,
        start_time=fault.start_time,
        rank=spec.rank,
        op=spec.point,
        backend=spec.backend,
        milliseconds=spec.milliseconds,
        probability=spec.probability,
        duration=spec.duration,
        seed=spec.seed,
        count=spec.count,
        after=spec.after,
        action=pattern.action,
        jitter=spec.jitter,
        distribution=spec.distribution,
        returns=bool(spec.result),
        at_once=pattern.at_once,
        value=active.value,
        on=spec.on,
        off=spec.off,
        percent=spec.percent,
        period=spec.period,
    )
