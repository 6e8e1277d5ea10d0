"""From a snapshot to labelled values: the one place that decides what each metric is, for the page and for the OTLP export."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from singularityd import __version__
from singularityd.model import Fault, Rank
from singularityd.observe import families as f
from singularityd.observe.families import Family
from singularityd.observe.labels import UNKNOWN, Labels
from singularityd.observe.pace import never
from singularityd.observe.settings import MetricsSettings
from singularityd.observe.snapshot import Snapshot
from singularityd.observe.totals import Key, Owner, Total, Totals


class Distribution(NamedTuple):
    """A histogram's value."""

    cumulative: tuple[int, ...]
    """Calls at or below each of families.BOUNDS, then all of them."""
    total: float
    """Sum of the durations, seconds."""


class Series(NamedTuple):
    """One labelled value; the label values stand in the order of the family's label names and are safe to print."""

    labels: tuple[str, ...]
    value: float | Distribution


class Reading(NamedTuple):
    """Every family with its series, in the order of families.FAMILIES. Within a family the labels are unique and sorted."""

    families: tuple[tuple[Family, tuple[Series, ...]], ...]
    snapshot: Snapshot
    """What it was made from."""


Values = dict[tuple[str, ...], float | Distribution]

SAMPLES_OF_A_HISTOGRAM = len(f.BOUNDS) + 3
"""Its finite buckets, +Inf, _sum and _count; each is a series to Prometheus."""


class Memory:
    """What must be remembered from one reading to the next. Used by one thread at a time."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.dropped = 0
        """Series left out of all readings."""
        self.duration: float | None = None
        """Seconds the previous page took; None before there was one."""


class Context(NamedTuple):
    """What the families' functions have in common while one reading is made."""

    snapshot: Snapshot
    label: Labels
    owners: dict[int, Owner]
    ranks: dict[Owner, list[Rank]]
    sums: dict[Key, Total]
    pace: Callable[[], None]


def read(snapshot: Snapshot, settings: MetricsSettings, memory: Memory, pace: Callable[[], None] = never) -> Reading:
    """The reading of a snapshot. Snapshots must be given in the order in which they were taken; any thread, one at a time."""
    context = _context(snapshot, Labels(settings.label_length), memory.totals, pace)
    offered = kept = 0
    shown: dict[Family, tuple[Series, ...]] = {}
    for family, values in ((family, source(context)) for family, source in _SOURCES):
        cost = SAMPLES_OF_A_HISTOGRAM if family.kind == "histogram" else 1
        room = max(0, settings.series - kept) // cost
        shown[family] = tuple(Series(labels, values[labels]) for labels in _sorted(values, pace)[:room])
        offered += cost * len(values)
        kept += cost * len(shown[family])
        pace()
    memory.dropped += offered - kept
    own = {f.SERIES: offered, f.SERIES_DROPPED: memory.dropped, f.SCRAPE: memory.duration}
    shown.update((family, (Series((), value),)) for family, value in own.items() if value is not None)
    return Reading(tuple((family, shown.get(family, ())) for family in f.FAMILIES), snapshot)


def _sorted(values: Values, pace: Callable[[], None]) -> list[tuple[str, ...]]:
    """The labels in order, ranks by their numbers and not by their digits."""

    def key(labels: tuple[str, ...]) -> list[tuple[int, str]]:
        pace()
        return [(len(value) if value.isdecimal() else 0, value) for value in labels]

    return sorted(values, key=key)


def _context(snapshot: Snapshot, label: Labels, totals: Totals, pace: Callable[[], None]) -> Context:
    owners: dict[int, Owner] = {}
    ranks: dict[Owner, list[Rank]] = {}
    # a pid can be there twice, exited and used again: the later process owns it
    for rank in sorted(snapshot.ranks, key=lambda rank: rank.start_time):
        owner = Owner(label(rank.job), label.rank(rank.rank))
        owners[rank.pid] = owner
        ranks.setdefault(owner, []).append(rank)
    sums = totals.fold(snapshot.calls.stats, owners, label, frozenset(ranks), pace)
    return Context(snapshot, label, owners, ranks, sums, pace)


# --- the daemon itself ------------------------------------------------------------------------------------------------------


def _build_info(_: Context) -> Values:
    return {(__version__, platform.python_version()): 1}


def _start_time(context: Context) -> Values:
    return {(): context.snapshot.started_at}


def _halves(executor: float, front: float) -> Values:
    return {(name,): value for name, value in (("executor", executor), ("front", front)) if value}


def _resident(context: Context) -> Values:
    return _halves(context.snapshot.executor_rss, context.snapshot.front_rss)


def _cpu(context: Context) -> Values:
    return _halves(context.snapshot.executor_cpu, context.snapshot.front_cpu)


def _named(context: Context, values: dict[str, int]) -> Values:
    result: Values = {}
    for name, value in values.items():
        _add(result, (context.label(name),), value)
    return result


def _capabilities(context: Context) -> Values:
    states = {"yes": 1.0, "no": 0.0, "unknown": float("nan")}
    return {(context.label(capability.name),): states[capability.state] for capability in context.snapshot.capabilities}


# --- ranks ------------------------------------------------------------------------------------------------------------------


def _rank_info(context: Context) -> Values:
    result: Values = {}
    for owner, ranks in context.ranks.items():
        if owner.rank == UNKNOWN:
            continue
        rank = _current(ranks)
        texts = (rank.source, rank.confidence, rank.scheme or "none", rank.name, _libraries(rank))
        numbers = (context.label.rank(rank.world), context.label.rank(rank.local_rank))
        result[(*owner, *numbers, *map(context.label, texts))] = 1
    return result


def _libraries(rank: Rank) -> str:
    return ", ".join(sorted({f"{library.backend} {library.version}".strip() for library in rank.libraries})) or "none"


def _current(ranks: list[Rank]) -> Rank:
    """Of the processes that have been this rank, the one that lives and began last."""
    return max(ranks, key=lambda rank: (_lives(rank), rank.start_time))


def _lives(rank: Rank) -> bool:
    return rank.state in ("running", "stopped")


def _rank_up(context: Context) -> Values:
    result: Values = {}
    for owner, ranks in context.ranks.items():
        living = sum(map(_lives, ranks))
        result[owner] = living if owner.rank == UNKNOWN else min(living, 1)
    return result


def _visibility(context: Context) -> Values:
    result: Values = {}
    for owner, ranks in context.ranks.items():
        for rank in ranks if owner.rank == UNKNOWN else [_current(ranks)]:
            _add(result, (*owner, rank.visibility), 1)
    return result


def _exits(context: Context) -> Values:
    result: Values = {}
    for (job, rank, reason), count in context.snapshot.exits.items():
        _add(result, (context.label(job), context.label(rank), context.label(reason)), count)
    return result


# --- faults -----------------------------------------------------------------------------------------------------------------


def _armed_faults(context: Context) -> Iterator[tuple[tuple[str, ...], Fault]]:
    for fault in context.snapshot.faults:
        if fault.armed_at:
            texts = (fault.id, fault.spec.pattern, fault.mechanism)
            yield (context.label(fault.job or fault.spec.job), str(fault.spec.rank), *map(context.label, texts)), fault


def _fault_active(context: Context) -> Values:
    return {labels: float(fault.state == "armed") for labels, fault in _armed_faults(context)}


def _fault_hits(context: Context) -> Values:
    return {labels: fault.hits for labels, fault in _armed_faults(context)}


# --- collectives ------------------------------------------------------------------------------------------------------------


def _calls(context: Context) -> Values:
    return {key: total.calls for key, total in context.sums.items()}


def _bytes(context: Context) -> Values:
    return {key: total.bytes for key, total in context.sums.items()}


def _last_call(context: Context) -> Values:
    result: Values = {}
    for key, total in context.sums.items():
        labels = (key.job, key.rank, key.comm, key.backend)
        result[labels] = max(total.last_call, _number(result.get(labels)))
    return result


def _in_flight(context: Context) -> Values:
    result: Values = {key[:5]: 0 for key in context.sums}
    for labels, _ in _flights(context):
        _add(result, labels, 1)
    return result


def _oldest(context: Context) -> Values:
    result: Values = {}
    for labels, seconds in _flights(context):
        result[labels] = max(seconds, _number(result.get(labels)))
    return result


def _flights(context: Context) -> Iterator[tuple[tuple[str, ...], float]]:
    label = context.label
    for call in context.snapshot.calls.in_flight:
        owner = context.owners.get(call.pid, (UNKNOWN, UNKNOWN))
        yield (*owner, label(call.comm), label(call.backend), label(call.op)), call.seconds


def _skew(context: Context) -> Values:
    result: Values = {}
    for skew in context.snapshot.skews:
        for rank, lateness in skew.lateness.items():
            result[(context.label(skew.job), str(rank), context.label(skew.comm), context.label(skew.backend))] = lateness
    return result


def _durations(family: Family) -> Callable[[Context], Values]:
    """The histograms by rank, communicator and operation, over all results whose end is seen."""

    def values(context: Context) -> Values:
        sums: dict[tuple[str, ...], Total] = {}
        for key, total in context.sums.items():
            if f.DURATIONS.get(key.backend, f.ENQUEUE) is family and key.result != "posted":
                sums.setdefault(key[:5], Total()).add(total)
                context.pace()
        result: Values = {}
        for labels, total in sums.items():
            context.pace()
            result[labels] = distribution(total.buckets, total.seconds)
        return result

    return values


def distribution(buckets: Iterable[int], seconds: float) -> Distribution:
    """The kernel's counts by power of two, reduced to every second bound and added up.

    Bucket i counts calls shorter than 2**i microseconds, so the calls below bound 2**i are the sum of buckets 0 to i; a call of exactly
    a bound counts towards the next one, a difference below a nanosecond's worth of calls that buys exact integers.
    """
    cumulative = tuple(accumulate(buckets))
    return Distribution((*cumulative[0:27:2], cumulative[-1]), seconds)


def _add(values: Values, labels: tuple[str, ...], amount: float) -> None:
    values[labels] = _number(values.get(labels)) + amount


def _number(value: float | Distribution | None) -> float:
    return 0 if value is None or isinstance(value, Distribution) else value


_SOURCES: tuple[tuple[Family, Callable[[Context], Values]], ...] = (
    (f.BUILD_INFO, _build_info),
    (f.START_TIME, _start_time),
    (f.RESIDENT, _resident),
    (f.CPU, _cpu),
    (f.LOOP_LAG, lambda context: {(): context.snapshot.loop_lag}),
    (f.QUEUE, lambda context: {(): context.snapshot.event_queue}),
    (f.SUBSCRIBERS, lambda context: {(): context.snapshot.event_subscribers}),
    (f.SUBMITTED, lambda context: _named(context, context.snapshot.submitted)),
    (f.RECEIVED, lambda context: _named(context, context.snapshot.received)),
    (f.DROPPED, lambda context: _named(context, context.snapshot.dropped)),
    (f.PROBES, lambda context: _named(context, context.snapshot.probes)),
    (f.ATTACH_ERRORS, lambda context: _named(context, context.snapshot.attach_errors)),
    (f.CAPABILITY, _capabilities),
    (f.RANK_INFO, _rank_info),
    (f.RANK_UP, _rank_up),
    (f.RANK_EXITS, _exits),
    (f.VISIBILITY, _visibility),
    (f.FAULT_ACTIVE, _fault_active),
    (f.FAULT_HITS, _fault_hits),
    (f.CALLS, _calls),
    (f.BYTES, _bytes),
    (f.LAST_CALL, _last_call),
    (f.SKEW, _skew),
    (f.OLDEST, _oldest),
    (f.IN_FLIGHT, _in_flight),
    (f.ENQUEUE, _durations(f.ENQUEUE)),
    (f.SECONDS, _durations(f.SECONDS)),
)
"""How each family gets its values, in the order in which the cap is spent. What a page tells of itself is added by `read`."""
