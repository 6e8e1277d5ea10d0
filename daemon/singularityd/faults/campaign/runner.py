"""Runs one campaign at a time: each fault at its time through the fault service, which enforces every limit. Loop thread only.

A campaign is journaled before its first fault and after each; what a crash leaves running is closed at the next start. A fault that is
refused, and a rank that disappeared, are outcomes and no failure of the runner: the campaign goes on until a stop condition holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog

from singularityd.errors import CampaignRuns, JournalUnavailable, NoSuchCampaign, NoSuchRank, RankGone, Refused, SingularityError
from singularityd.faults.bookkeeping import Bookkeeping
from singularityd.faults.campaign import file, plan, record, replay, report
from singularityd.faults.campaign.file import Campaign
from singularityd.faults.campaign.plan import Planned
from singularityd.faults.campaign.record import Outcome, Run
from singularityd.faults.campaign.watching import Reading, Watcher
from singularityd.faults.limits import Caller, FaultLimits
from singularityd.model import Event, Fault, FaultSpec, Rank

SAMPLE_EVERY = 1.0
"""Seconds between two readings of the counters."""
ADMIN = Caller()
LEFT_OPEN = "daemon restarted"
_LIVE = ("running", "stopped")
_END_PATIENCE = 5.0


class Ranks(Protocol):
    """What is asked of the rank registry."""

    def resolve(self, rank: int, job: str = "") -> Rank:
        """Raises NoSuchRank, NoSuchJob, AmbiguousJob."""

    def all(self) -> tuple[Rank, ...]:
        """The rank processes."""


class Faults(Protocol):
    """What is asked of the fault service."""

    @property
    def books(self) -> Bookkeeping:
        """Where runs are journaled too."""

    async def inject(self, spec: FaultSpec, who: str, caller: Caller, campaign: str = "") -> Fault:
        """Arm."""

    async def clear(self, fault_id: str, who: str) -> list[Fault]:
        """End one."""

    async def wait(self, fault_id: str) -> Fault:
        """Returns when it has ended."""


class Subscription(Protocol):
    """Events as they come."""

    async def __anext__(self) -> Event:
        """The next."""

    def close(self) -> None:
        """Stop listening."""


class Bus(Protocol):
    """The event bus."""

    def subscribe(self, *, after: int | None = None, kinds: frozenset[str] = frozenset(), limit: int = 1024) -> Subscription:
        """From now on."""


class _Current:
    """The campaign that runs."""

    def __init__(self, run: Run, campaign: Campaign, caller: Caller) -> None:
        self.run = run
        self.caller = caller
        self.campaign = campaign
        self.watcher = Watcher(run.job)
        self.stop = asyncio.Event()
        self.ending = ""
        self.open: set[str] = set()
        """Ids of its faults that have not ended."""
        self.task: asyncio.Task[None] | None = None

    def end(self, why: str) -> None:
        """The first reason stands."""
        self.ending = self.ending or why
        self.stop.set()


class CampaignService:
    """All campaigns of this host."""

    def __init__(
        self,
        *,
        registry: Ranks,
        faults: Faults,
        bus: Bus,
        reading: Callable[[], Awaitable[Reading]],
        limits: FaultLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._faults = faults
        self._bus = bus
        self._reading = reading
        self._limits = limits or FaultLimits()
        self._clock = clock
        self._log = structlog.get_logger("campaigns")
        self._current: _Current | None = None
        self._starting = False
        self._stopping = False

    # --- life ------------------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Close what the last run of the daemon left running. Where the journal fails, the next `start` does it."""
        now = self._clock()
        try:
            for run in await self._faults.books.within(lambda connection: record.close_open(connection, LEFT_OPEN, now)):
                self._log.warning("a campaign was left running and is closed", campaign=run.id, name=run.name)
        except JournalUnavailable as error:
            self._log.error("campaigns left running cannot be closed yet", error=error.text)

    async def close(self) -> None:
        """End the one that runs, with its faults; afterwards none can begin. Called before the fault service stops."""
        self._stopping = True
        if self._current is not None:
            await self._finish(self._current, "daemon stopped")

    # --- requests --------------------------------------------------------------------------------------------------------------

    def dry_run(self, text: str, who: str = "") -> Run:
        """What would be done, with no id. Raises BadOption and the registry's errors; nothing is journaled."""
        return self._draft(file.read(text), text, who)

    async def start(self, text: str, who: str, caller: Caller = ADMIN) -> Run:
        """Begin; returned running. Raises as `dry_run` does, CampaignRuns, Refused, JournalUnavailable."""
        campaign = file.read(text)
        if self._stopping:
            raise Refused("the daemon is stopping", hint="try again when it runs")
        if self._current is not None:
            run = self._current.run
            raise CampaignRuns(f"campaign {run.id} ({run.name}) runs already", hint=f"singularityctl drill stop {run.id} ends it")
        if self._starting:
            raise CampaignRuns("another campaign is being started", hint="singularityctl drill list shows it in a moment")
        if self._limits.mode == "off":
            raise Refused("faults are switched off on this host", hint='set faults.mode = "admin"')
        draft = msgspec.structs.replace(self._draft(campaign, text, who), started_at=self._clock())
        self._starting = True
        try:
            run = await self._faults.books.within(lambda connection: record.create(connection, draft, LEFT_OPEN), durable=True)
        finally:
            self._starting = False
        current = self._current = _Current(run, campaign, caller)
        current.task = asyncio.get_running_loop().create_task(self._run(current), name=f"campaign-{run.id}")
        self._log.warning("a campaign began", campaign=run.id, name=run.name, job=run.job, faults=len(run.planned))
        return run

    async def stop(self, run_id: str, who: str) -> Run:
        """End it now, with its faults; one that is over is returned as it is. Raises NoSuchCampaign."""
        current = self._current
        if current is None or current.run.id != run_id:
            return await self.get(run_id)
        await self._finish(current, f"stopped by {who}" if who else "stopped")
        return current.run

    async def clear_all(self, who: str) -> None:
        """`clear all` ends the campaign too, or it would arm the next fault a moment later."""
        if self._current is not None:
            await self._finish(self._current, f"all faults were cleared by {who}")

    async def get(self, run_id: str) -> Run:
        """Raises NoSuchCampaign, JournalUnavailable."""
        if self._current is not None and self._current.run.id == run_id:
            return self._now(self._current)
        run = await self._faults.books.within(lambda connection: record.get(connection, run_id))
        if run is None:
            raise NoSuchCampaign(
                f"no campaign {run_id[:40]!r} is journaled", hint="ids look like c3; `singularityctl drill list` lists them"
            )
        return run

    async def history(self, limit: int) -> list[Run]:
        """The newest first. Raises JournalUnavailable."""
        found = await self._faults.books.within(lambda connection: record.newest(connection, limit))
        current = self._current
        return [self._now(current) if current is not None and run.id == current.run.id else run for run in found]

    async def faults_of(self, run: Run) -> list[Fault]:
        """Oldest first."""
        return await self._faults.books.faults_where(campaign=run.id)

    async def report(self, run: Run) -> tuple[str, str]:
        """Markdown and JSON on what was injected and what was observed. Raises JournalUnavailable."""
        value = report.build(run, await self.faults_of(run))
        return report.markdown(value), report.as_json(value)

    async def replay(self, *, campaign: str = "", since: float = 0.0) -> str:
        """A campaign file that does again what a campaign did, or what was armed since a Unix time. Raises NoSuchCampaign, Refused."""
        if campaign:
            await self.get(campaign)
        name = f"replay of {campaign}" if campaign else "replay"
        return replay.write(name, await self._faults.books.faults_where(campaign=campaign, since=since))

    # --- running ---------------------------------------------------------------------------------------------------------------

    def _draft(self, campaign: Campaign, text: str, who: str) -> Run:
        job = self._job(campaign)
        ranks = self._live(job)
        planned = plan.plan(campaign, ranks, self._limits, job=job)
        return Run(
            id="",
            name=campaign.name,
            job=job,
            seed=campaign.seed,
            who=who,
            reason=campaign.reason,
            state="running",
            text=text,
            planned=planned,
            ranks=tuple(ranks),
        )

    def _job(self, campaign: Campaign) -> str:
        """The whole name of the job, so that no later job is meant by it. The registry says what is wrong with the words."""
        numbers = sorted({rank.rank for rank in self._registry.all() if rank.rank is not None and rank.state in _LIVE})
        for number in numbers:
            with contextlib.suppress(NoSuchRank):
                return self._registry.resolve(number, campaign.job).job
        return self._registry.resolve(0, campaign.job).job

    def _live(self, job: str) -> list[int]:
        return sorted({rank.rank for rank in self._registry.all() if rank.job == job and rank.rank is not None and rank.state in _LIVE})

    async def _run(self, current: _Current) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        subscription = self._bus.subscribe(limit=4096)
        helpers = [loop.create_task(self._listen(current, subscription)), loop.create_task(self._sample(current))]
        waits: list[asyncio.Task[None]] = []
        try:
            for planned in current.run.planned:
                if await self._paused(current, began + planned.at_ms / 1000 - loop.time()):
                    break
                if (fault := await self._one(current, planned)) is not None:
                    waits.append(loop.create_task(self._await_end(current, fault)))
            if not current.stop.is_set() and waits:
                stopped = loop.create_task(current.stop.wait())
                everything = loop.create_task(_all(waits))
                await asyncio.wait({stopped, everything}, return_when=asyncio.FIRST_COMPLETED)
                everything.cancel()
                stopped.cancel()
            await self._paused(current, current.campaign.settle_ms / 1000)
        except Exception:  # noqa: BLE001 - a defect, told in the run's ending and in the log; the job must be let go all the same
            current.end("failed: see the daemon's log")
            self._log.exception("a campaign failed", campaign=current.run.id)
        finally:
            await self._clear(current, "campaign")
            await asyncio.wait(waits, timeout=_END_PATIENCE) if waits else None
            subscription.close()
            await self._read(current)
            for task in [*helpers, *waits]:
                task.cancel()
            await self._over(current)

    async def _paused(self, current: _Current, seconds: float) -> bool:
        """Wait so long; True as soon as the campaign is to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await current.stop.wait()
        return current.stop.is_set()

    async def _one(self, current: _Current, planned: Planned) -> Fault | None:
        run, at = current.run, self._clock()
        try:
            fault = await self._faults.inject(planned.spec, f"{run.who} (campaign {run.id})", current.caller, run.id)
        except SingularityError as error:
            outcome = Outcome(index=planned.index, at=at, refused=error.text, code=error.code)
            await self._note(current, outcome)
            if isinstance(error, (NoSuchRank, RankGone)) and "rank_gone" in current.campaign.stop.when:
                current.end(f"rank {planned.spec.rank} is gone")
            elif current.run.failures >= current.campaign.stop.max_failures:
                current.end(f"{current.run.failures} faults could not be armed, which is stop.max_failures")
            return None
        current.open.add(fault.id)
        await self._note(current, Outcome(index=planned.index, at=at, fault=fault.id))
        return fault

    async def _await_end(self, current: _Current, fault: Fault) -> None:
        await self._faults.wait(fault.id)
        current.open.discard(fault.id)

    async def _note(self, current: _Current, outcome: Outcome) -> None:
        current.run = msgspec.structs.replace(current.run, outcomes=(*current.run.outcomes, outcome))
        await self._save(current.run)

    async def _save(self, run: Run) -> None:
        try:
            await self._faults.books.within(lambda connection: record.update(connection, run))
        except JournalUnavailable as error:  # its faults are refused then, and max_failures ends it
            self._log.error("what became of a campaign could not be journaled", campaign=run.id, error=error.text)

    async def _listen(self, current: _Current, subscription: Subscription) -> None:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                current.watcher.event(await subscription.__anext__())

    async def _sample(self, current: _Current) -> None:
        while True:
            await self._read(current)
            self._check_ranks(current)
            await asyncio.sleep(SAMPLE_EVERY)

    async def _read(self, current: _Current) -> None:
        try:
            current.watcher.sample(await self._reading(), asyncio.get_running_loop().time())
        except Exception as error:  # noqa: BLE001 - the kernel's tables are gone with the executor; the campaign is not
            self._log.warning("a sample of the counters is missing", campaign=current.run.id, error=repr(error))

    def _check_ranks(self, current: _Current) -> None:
        live, when = self._live(current.run.job), current.campaign.stop.when
        if not live and "job_gone" in when:
            current.end("job gone")
        elif "rank_gone" in when and (gone := sorted(set(current.run.ranks) - set(live))):
            current.end(f"rank {gone[0]} is gone")

    # --- ending ----------------------------------------------------------------------------------------------------------------

    async def _finish(self, current: _Current, why: str) -> None:
        current.end(why)
        if current.task is not None:
            await asyncio.wait({current.task}, timeout=4 * _END_PATIENCE)

    async def _clear(self, current: _Current, who: str) -> None:
        for fault in sorted(current.open):
            try:
                await self._faults.clear(fault, f"{who} {current.run.id}")
            except SingularityError as error:
                self._log.error("a fault of a campaign was not cleared; its deadline ends it", fault=fault, error=error.text)

    def _now(self, current: _Current) -> Run:
        watcher = current.watcher
        return msgspec.structs.replace(current.run, events=tuple(watcher.events), events_left_out=watcher.left_out, seen=watcher.seen())

    async def _over(self, current: _Current) -> None:
        ending = current.ending or "done"
        current.run = msgspec.structs.replace(self._now(current), state="ended", ending=ending, ended_at=self._clock())
        await self._save(current.run)
        self._current = None
        self._log.warning("a campaign ended", campaign=current.run.id, ending=ending)


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    """Until each is done; cancelled, it leaves them running."""
    await asyncio.wait(tasks)
