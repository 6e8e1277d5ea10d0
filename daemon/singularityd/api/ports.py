"""What the API asks of the rest of the front: small Protocols, so that it imports none of it. The app passes the real objects.

Everything is called on the loop thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from singularityd.api.audit import Audit
from singularityd.api.identity.access import Access
from singularityd.faults.limits import Caller
from singularityd.model import Calls, Capability, Event, Fault, FaultSpec, Rank, Skew


class RankRegistry(Protocol):
    """Which process is which rank."""

    def all(self) -> tuple[Rank, ...]:
        """The rank processes, by job and rank."""

    def by_pid(self, pid: int) -> Rank | None:
        """Any known process."""

    def claim(self, pid: int, *, job: str | None, rank: int | None, world: int | None, local_rank: int | None) -> Rank:
        """What an agent says of its own process; it overrules nothing."""

    def notes(self, pid: int) -> tuple[str, ...]:
        """What was odd in what is known of a process, refused claims among it."""

    def members(self, job: str) -> Sequence[Rank]:
        """The live ranks of a job, or of the only one. Raises NoSuchRank, NoSuchJob, AmbiguousJob."""


class DryRun(Protocol):
    """What an injection would do."""

    @property
    def fault(self) -> Fault:
        """Without an id."""


class FaultService(Protocol):
    """Arms, watches and ends faults; every method raises SingularityError subclasses."""

    async def inject(self, spec: FaultSpec, who: str, caller: Caller) -> Fault:
        """Arm; a cancelled call leaves nothing armed."""

    def dry_run(self, spec: FaultSpec, who: str, caller: Caller) -> DryRun:
        """Check, and say what would be done."""

    async def clear(self, fault_id: str, who: str) -> list[Fault]:
        """End one, or `all`."""

    async def wait(self, fault_id: str) -> Fault:
        """Returns when it has ended."""

    async def get(self, fault_id: str) -> Fault:
        """One fault of the journal."""

    def active(self) -> list[Fault]:
        """Those armed or being armed."""

    async def history(self, limit: int) -> list[Fault]:
        """The newest of the journal, newest first."""


class PlannedFault(Protocol):
    """One fault of a campaign's plan."""

    @property
    def index(self) -> int:
        """From 0."""

    @property
    def at_ms(self) -> int:
        """After the campaign's start."""

    @property
    def spec(self) -> FaultSpec:
        """What is armed."""

    @property
    def options(self) -> Mapping[str, str]:
        """Its options as a person would write them."""


class Outcome(Protocol):
    """What became of one."""

    @property
    def index(self) -> int:
        """Of the plan."""

    @property
    def fault(self) -> str:
        """Its id; empty where it was refused."""

    @property
    def refused(self) -> str:
        """Why it was not armed."""


class Campaign(Protocol):
    """One campaign's run."""

    @property
    def id(self) -> str:
        """`c3`; empty in a dry run."""

    @property
    def name(self) -> str:
        """Of the file."""

    @property
    def job(self) -> str:
        """The job it disturbs."""

    @property
    def seed(self) -> int:
        """Of the plan."""

    @property
    def who(self) -> str:
        """Who asked."""

    @property
    def reason(self) -> str:
        """Why."""

    @property
    def state(self) -> str:
        """`running` or `ended`."""

    @property
    def started_at(self) -> float:
        """Unix time."""

    @property
    def ended_at(self) -> float:
        """Unix time; 0 while it runs."""

    @property
    def ending(self) -> str:
        """Why it ended."""

    @property
    def planned(self) -> Sequence[PlannedFault]:
        """In order of time."""

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Of those whose time has come."""


class CampaignService(Protocol):
    """Plans and runs campaigns; every method raises SingularityError subclasses."""

    def dry_run(self, text: str, who: str = "") -> Campaign:
        """What a campaign file would do."""

    async def start(self, text: str, who: str, caller: Caller) -> Campaign:
        """Begin it."""

    async def stop(self, run_id: str, who: str) -> Campaign:
        """End it, with its faults."""

    async def clear_all(self, who: str) -> None:
        """End the one that runs, if one does."""

    async def get(self, run_id: str) -> Campaign:
        """One of the journal."""

    async def history(self, limit: int) -> Sequence[Campaign]:
        """The newest, newest first."""

    async def report(self, run: Any) -> tuple[str, str]:
        """Markdown and JSON."""

    async def replay(self, *, campaign: str = "", since: float = 0.0) -> str:
        """A campaign file that does the same again."""


class Parse(Protocol):
    """`faults.spec.parse`: from a user's words to a FaultSpec."""

    def __call__(
        self,
        pattern: str,
        rank: int,
        options: Mapping[str, str],
        *,
        job: str = "",
        duration: str = "",
        reason: str = "",
        may_kill_job: bool = False,
    ) -> FaultSpec:
        """Raises UnknownPattern and BadOption."""


class PatternOption(Protocol):
    """One key of a pattern."""

    @property
    def name(self) -> str:
        """The key."""

    @property
    def values(self) -> str:
        """What may be written."""

    @property
    def help(self) -> str:
        """What it means."""


class Pattern(Protocol):
    """A named fault template of the catalogue."""

    @property
    def name(self) -> str:
        """What the user types."""

    @property
    def summary(self) -> str:
        """What is done to the call."""

    @property
    def effect(self) -> str:
        """What the rank and its peers will see."""

    @property
    def options(self) -> Sequence[PatternOption]:
        """Its keys."""

    @property
    def backends(self) -> Sequence[str]:
        """Libraries whose calls it can be done to."""

    @property
    def mechanisms(self) -> Sequence[str]:
        """Best first."""


class Subscription(Protocol):
    """One reader's events; those it is too slow for are dropped and told by an event of kind `events_dropped`."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Itself."""

    async def __anext__(self) -> Event:
        """Waits for the next."""

    def close(self) -> None:
        """Stop listening."""


class Recorder(Protocol):
    """The events that are kept, and their resume tokens."""

    @property
    def last(self) -> int:
        """The newest event's number."""

    @property
    def before_first(self) -> int:
        """The number after which everything is kept."""

    def since(self, sequence: int) -> list[Event]:
        """Raises ResumeLost."""

    def token(self, sequence: int) -> str:
        """The token to resume after an event."""

    def resume(self, token: str) -> int:
        """The number in a token. Raises BadOption and ResumeLost."""


class Bus(Protocol):
    """The event bus."""

    @property
    def recorder(self) -> Recorder:
        """Where published events are kept."""

    def publish(self, event: Event) -> Event:
        """Never blocks."""

    def subscribe(self, *, after: int | None = None, kinds: frozenset[str] = frozenset(), limit: int = 1024) -> Subscription:
        """From now on, or from after a number. Raises ResumeLost."""


class Reading(Protocol):
    """One consistent reading of everything that is shown (`observe.snapshot.Snapshot`)."""

    @property
    def calls(self) -> Calls:
        """The kernel's tables."""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks at that moment."""

    @property
    def skews(self) -> tuple[Skew, ...]:
        """Who is late."""

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Those active, and some that ended."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon is and does now, as far as the API does not ask the registry and the fault service itself."""

    started_at: float
    """Unix time."""
    executor_started_at: float = 0.0
    """Unix time; 0 while the executor is away."""
    executor_pid: int = 0
    executor_restarts: int = 0
    probes: Mapping[str, int] = {}
    """Backend -> attached sites."""
    dropped: Mapping[str, int] = {}
    """Buffer -> records lost."""
    attach_errors: Mapping[str, int] = {}
    """Reason -> files."""
    shed: Sequence[str] = ()
    """Sites that the guard took away: `symbol in path`."""
    metrics_address: str = ""
    """host:port; empty where the page is off."""


class CheckUp(NamedTuple):
    """What was tried on this host."""

    capabilities: Sequence[Capability]
    complete: bool
    """False until every check has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Everything the servicers are made of."""

    ranks: RankRegistry
    faults: FaultService
    bus: Bus
    parse: Parse
    patterns: Sequence[Pattern]
    kinds: Mapping[str, str]
    """Every kind of event -> its severity."""
    reading: Callable[[], Awaitable[Reading]]
    status: Callable[[], NodeStatus]
    check_up: Callable[[], CheckUp]
    health: Callable[[], Mapping[str, tuple[bool, str]]]
    """Part -> (works, detail), as `observe.health.Health.parts`."""
    campaigns: CampaignService | None = None
    start_time: Callable[[int], Awaitable[int | None]]
    """Of a live process as the executor sees it, clock ticks after boot; None where there is none."""
    access: Access | None = None
    """Who may do what; None, for tests of other things: whoever can open a socket may do what it offers."""
    audit: Audit | None = None
    """Where it is told; there wherever `access` is."""
