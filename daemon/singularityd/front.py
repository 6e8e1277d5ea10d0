"""The front: constructs everything without privilege, and decides the order of start and stop.

Started by the executor as `python -m singularityd.front --channel FD`, with the settings as JSON in its environment. It imports what
it needs as root (the interpreter may lie where its own user cannot read), then becomes that user for good, then listens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import time
from pathlib import Path

import msgspec
import structlog

from singularityd import privileges
from singularityd.api.audit import Audit
from singularityd.api.chain import NAME as AUDIT
from singularityd.api.identity.access import Access
from singularityd.api.identity.roles import Groups
from singularityd.api.ports import CheckUp, NodeStatus, Ports
from singularityd.api.server import ApiServer
from singularityd.config import FRONT_SETTINGS, AccessSettings, Settings
from singularityd.errors import SingularityError
from singularityd.faults import spec
from singularityd.faults.campaign.runner import CampaignService
from singularityd.faults.journal import Journal
from singularityd.faults.limits import FaultLimits
from singularityd.faults.patterns import PATTERNS
from singularityd.faults.service import FaultService
from singularityd.kernel import libraries, messages
from singularityd.kernel.procfs import ProcFs
from singularityd.link import ExecutorLink
from singularityd.model import Rank
from singularityd.observe import kinds, log, otel
from singularityd.observe.bus import Bus
from singularityd.observe.health import Health
from singularityd.observe.http import MetricsServer
from singularityd.observe.metrics import MetricsPage
from singularityd.observe.vitals import LoopLag
from singularityd.ranks.memory import RankMemory
from singularityd.ranks.ras import RasPoller
from singularityd.ranks.registry import RankRegistry
from singularityd.watch import Watch

_PING_EVERY = 5.0
_REFRESH_EVERY = 1.0
_RAS_EVERY = 15.0


class Front:
    """Everything of the unprivileged half."""

    def __init__(self, settings: Settings, channel: socket.socket, control: log.LogControl) -> None:
        self.settings = settings
        self._control = control
        self._log = structlog.get_logger("front")
        self._stop = asyncio.Event()
        state = Path(settings.daemon.state_dir) / "front"
        self.bus = Bus()
        self.health = Health()
        self.health.expect("executor", stale_after=4 * _PING_EVERY)
        self.memory = RankMemory(state / "ranks.json")
        self.registry = RankRegistry(memory=self.memory, expire_after=settings.ranks.expire_after)
        self.watch = Watch(registry=self.registry, bus=self.bus, expire_after=settings.ranks.expire_after)
        self.link = ExecutorLink(channel, on_message=self._on_message, on_end=self._on_end)
        asked = settings.faults
        limits = FaultLimits(
            mode=asked.mode,
            off_switch=asked.off_switch,
            max_duration=asked.max_duration,
            max_active=asked.max_active,
            max_ranks_per_job=asked.max_ranks_per_job,
            budget=asked.budget,
            collective_timeout=asked.collective_timeout,
            per_minute=asked.per_minute,
        )
        journal = Journal(state / "faults.sqlite", retention=settings.faults.retention)
        self.faults = FaultService(
            registry=self.registry,
            executor=self.link,
            journal=journal,
            bus=self.bus,
            limits=limits,
            timeout_of=self.watch.collective_timeout,
        )
        self.watch.faults = self.faults
        self.campaigns = CampaignService(
            registry=self.registry, faults=self.faults, bus=self.bus, reading=self.watch.snapshot, limits=limits
        )
        self.lag = LoopLag()
        self.watch.lag = self.lag
        self.page = MetricsPage(self.watch.snapshot, settings.metrics)
        self.metrics = MetricsServer(
            settings.metrics.host,
            settings.metrics.port,
            self.page.page,
            self.health.report,
            connections=settings.metrics.connections,
            timeout=settings.metrics.timeout,
        )
        self.otel = otel.create(settings.otel, reading=self.page.reading, bus=self.bus)
        self.access = Access(_groups(settings.access), life=settings.access.token_life)
        self.audit = Audit(state / AUDIT, largest=settings.access.audit_size, files=settings.access.audit_files)
        self.api = ApiServer(Path(settings.daemon.runtime_dir), self._ports())

    def _ports(self) -> Ports:
        procfs = ProcFs()

        async def start_time(pid: int) -> int | None:
            return procfs.start_time(pid)

        return Ports(
            ranks=self.registry,
            faults=self.faults,
            campaigns=self.campaigns,
            bus=self.bus,
            parse=spec.parse,
            patterns=tuple(PATTERNS),
            kinds={kind.name: kind.severity for kind in kinds.KINDS},
            reading=self.watch.snapshot,
            status=self._status,
            check_up=lambda: CheckUp(self.watch.capabilities, self.watch.checked),
            health=self.health.parts,
            start_time=start_time,
            access=self.access,
            audit=self.audit,
        )

    def _status(self) -> NodeStatus:
        watch = self.watch
        address = f"{self.settings.metrics.host}:{self.metrics.port}" if self.settings.metrics.enabled else ""
        return NodeStatus(
            started_at=watch.started_at,
            executor_started_at=watch.executor_started_at,
            executor_pid=os.getppid(),
            executor_restarts=watch.restarts,
            probes=watch.probes,
            dropped=watch.dropped(),
            attach_errors=watch.attach_errors,
            shed=watch.shed,
            metrics_address=address,
        )

    # --- life ------------------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until the executor ends it."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        for number in (signal.SIGINT, signal.SIGHUP):  # sent to the whole group: they are the executor's to answer
            loop.add_signal_handler(number, lambda: None)
        await self.faults.start()
        await self.campaigns.open()
        if self.settings.metrics.enabled:
            await self.metrics.start()
        await self.api.start()
        if self.otel is not None:
            await self.otel.start()
        self.link.send(messages.FrontReady(version=messages.VERSION))
        gc.collect()
        gc.freeze()  # a full collection over the start's objects takes 20 ms, which API calls would feel
        async with asyncio.TaskGroup() as tasks:
            own = [tasks.create_task(part) for part in (self.lag.run(), self._ping(), self._refresh(), self._ask_ras())]
            await self._stop.wait()
            for task in own:
                task.cancel()
        await self._shut()
        return 0

    async def _shut(self) -> None:
        await self.api.stop()
        await self.campaigns.close()
        await self.faults.stop()
        self.audit.close()
        if self.otel is not None:
            await self.otel.stop()
        if self.settings.metrics.enabled:
            await self.metrics.stop()
        self.memory.close()
        self.watch.close()
        self.link.close()

    async def _ping(self) -> None:
        while True:
            try:
                await self.link.ping()
                self.health.good("executor")
            except SingularityError as error:
                self.health.bad("executor", error.text)
            await asyncio.sleep(_PING_EVERY)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_EVERY)
            await self.watch.refresh()

    async def _ask_ras(self) -> None:
        """NCCL's own RAS service knows the communicators that began before us; asked only while there is such a process."""
        poller = RasPoller()
        while self.settings.ranks.ras:
            await asyncio.sleep(_RAS_EVERY)
            if any(self._unplaced(rank) for rank in self.registry.all()):
                self.registry.observe_ras(await poller.poll())

    @staticmethod
    def _unplaced(rank: Rank) -> bool:
        uses = any(library.backend == "nccl" for library in rank.libraries)
        return uses and rank.state == "running" and rank.source not in ("probe", "ras")

    def _on_end(self, why: str) -> None:
        self._log.warning("the executor ended: so does the front", why=why)
        self._stop.set()

    def _on_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.Started):
            self.watch.begin(self.link.maps, message)
        elif isinstance(message, messages.LogLevel):
            self._control.set_level(log.name_of(int(message.level)))
        else:
            self.watch.on_message(message)


def _groups(settings: AccessSettings) -> Groups:
    """The groups by number. Raises ConfigError for one that the host does not have: a role that nobody gets is a mistake."""
    return Groups(
        viewer=privileges.groups("access.viewer_groups", settings.viewer_groups),
        operator=privileges.groups("access.operator_groups", settings.operator_groups),
        admin=privileges.groups("access.admin_groups", settings.admin_groups),
    )


async def _run(settings: Settings, channel: socket.socket, control: log.LogControl) -> int:
    return await Front(settings, channel, control).run()


def main() -> int:
    """Entry of the front."""
    parser = argparse.ArgumentParser(prog="singularityd-front")
    parser.add_argument("--channel", type=int, required=True)
    arguments = parser.parse_args()
    settings = msgspec.json.decode(os.environ.pop(FRONT_SETTINGS), type=Settings)
    control = log.setup(settings.log)
    parent = os.getppid()
    channel = socket.socket(fileno=arguments.channel)
    try:
        if settings.otel.enabled:
            otel.preload()
        libraries.tables()  # imports them
        os.setpriority(os.PRIO_PROCESS, 0, settings.daemon.nice)
        privileges.drop(settings.daemon.user)
        if not privileges.die_with(parent):
            return 0
        return asyncio.run(_run(settings, channel, control))
    except SingularityError as error:
        structlog.get_logger("front").error("the front cannot run", error=error.text, hint=error.hint, at=time.time())
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
