"""From a campaign and the ranks there are to the faults, with their times. Pure; the same seed gives the same plan on every machine.

Every random decision is a hash of the seed, of what is decided, and of a counter: no generator whose stream a release of Python could
change. Logarithms are taken in decimal arithmetic, which rounds alike everywhere; times are whole milliseconds.
"""

from __future__ import annotations

import decimal
import hashlib
from collections.abc import Sequence

import msgspec

from singularityd.errors import BadOption
from singularityd.faults import quantity, spec
from singularityd.faults.campaign import file
from singularityd.faults.campaign.file import Campaign, Choice, Generated, Ranks, Step
from singularityd.faults.limits import FaultLimits
from singularityd.model import FaultSpec

GAP_MS = 1000
"""Least distance between the end of a fault and the next on the same rank: its end is told a moment after its deadline."""
_MINUTE_MS = 60_000
_MOST_DRAWS = 5 * file.MOST_FAULTS
"""Faults that are left out cost time too, and the front plans on its loop: 5000 draws take about 0.1 s."""
_EXACT = decimal.Context(prec=30, rounding=decimal.ROUND_HALF_EVEN)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of a plan."""

    index: int
    """From 0, in order of time."""
    at_ms: int
    """After the campaign's start."""
    spec: FaultSpec

    @property
    def ends_ms(self) -> int:
        """Its deadline."""
        return self.at_ms + round(self.spec.duration * 1000)

    @property
    def options(self) -> dict[str, str]:
        """As a person would write them."""
        return spec.render(self.spec).options


def draw(seed: int, purpose: str, *counters: int) -> int:
    """64 bits that depend on nothing else: blake2b of the words, big-endian."""
    words = ":".join([str(seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")


def plan(campaign: Campaign, ranks: Sequence[int], limits: FaultLimits, *, job: str = "") -> tuple[Planned, ...]:
    """The faults in order of time; `job` is written into each. Raises BadOption that lists every problem.

    No two are on one rank at once, and none breaks a limit: a fixed schedule that does is refused, a generated one leaves such faults
    out.
    """
    there = sorted(set(ranks))
    if not there:
        raise BadOption("no rank of the job is known", hint="singularityctl ranks lists them")
    problems: list[str] = []
    if campaign.campaign is not None:
        drafts = _generated(campaign, campaign.campaign, there, limits, problems)
    else:
        drafts = _fixed(campaign, there, problems)
    drafts.sort(key=lambda draft: (draft[0], draft[1].rank))
    planned = tuple(
        Planned(index=index, at_ms=at, spec=msgspec.structs.replace(made, job=job, reason=made.reason or campaign.reason))
        for index, (at, made) in enumerate(drafts)
    )
    if not problems:
        problems += broken(planned, limits)
    if problems:
        raise file.fault_list("the plan", problems)
    return planned


def broken(planned: Sequence[Planned], limits: FaultLimits) -> list[str]:
    """What in a plan cannot be: overlaps on a rank, limits; empty where all is well."""
    problems: list[str] = []
    last: dict[int, Planned] = {}
    for place, one in enumerate(planned):
        whom = f"{one.spec.pattern} on rank {one.spec.rank} at {_at(one.at_ms)}"
        if one.spec.duration > limits.max_duration:
            problems.append(f"{whom} lasts longer than faults.max_duration, {limits.max_duration:g} s")
        before = last.get(one.spec.rank)
        if before is not None and one.at_ms < before.ends_ms + GAP_MS:
            problems.append(f"{whom} begins less than 1 s after the end of the one before on that rank, at {_at(before.ends_ms)}")
        last[one.spec.rank] = one
        at_once = 1 + sum(other.ends_ms + GAP_MS > one.at_ms for other in planned[:place])
        if at_once > limits.max_active:
            problems.append(f"{whom} would be the {at_once}th at once; faults.max_active is {limits.max_active}")
        elif at_once > limits.max_ranks_per_job:
            problems.append(f"{whom} would be on the {at_once}th rank at once; faults.max_ranks_per_job is {limits.max_ranks_per_job}")
        within = 1 + sum(other.at_ms > one.at_ms - _MINUTE_MS for other in planned[:place])
        if within > limits.per_minute:
            problems.append(f"{whom} would be the {within}th within a minute; faults.per_minute is {limits.per_minute}")
    return problems


def chosen(ranks: Ranks, there: Sequence[int], seed: int, purpose: str) -> list[int]:
    """The ranks that are meant. `random:K` takes the K of smallest hash. Raises BadOption for ranks that are not there."""
    if ranks == "all":
        return list(there)
    if isinstance(ranks, str):
        count = file.random_of(ranks) or 0
        if count > len(there):
            raise BadOption(f"{ranks}: there are only {len(there)} ranks here")
        return sorted(sorted(there, key=lambda rank: (draw(seed, purpose, rank), rank))[:count])
    if absent := sorted(set(ranks) - set(there)):
        raise BadOption(f"no rank {', '.join(map(str, absent[:10]))} is here; there are {_listed(there)}")
    return sorted(ranks)


def _fixed(campaign: Campaign, there: Sequence[int], problems: list[str]) -> list[tuple[int, FaultSpec]]:
    drafts: list[tuple[int, FaultSpec]] = []
    for place, step in enumerate(campaign.fault):
        meant: Ranks = [step.rank] if step.rank is not None else step.ranks or "all"
        try:
            targets = chosen(meant, there, campaign.seed, f"fault {place} rank")
        except BadOption as error:
            problems.append(f"fault[{place + 1}]: {error.text}")
            continue
        drafts += [(file.offset("at", step.at), _made(step, rank, draw(campaign.seed, "fault seed", place, rank))) for rank in targets]
    if len(drafts) > file.MOST_FAULTS:
        problems.append(f"{len(drafts)} faults are more than {file.MOST_FAULTS}")
        return []
    return drafts


def _generated(
    campaign: Campaign, generated: Generated, there: Sequence[int], limits: FaultLimits, problems: list[str]
) -> list[tuple[int, FaultSpec]]:
    """Exponential distances; a fault that finds no free rank, breaks a limit or would outlast the campaign is left out."""
    try:
        pool = chosen(generated.ranks, there, campaign.seed, "pool")
    except BadOption as error:
        problems.append(f"campaign.ranks: {error.text}")
        return []
    for place, choice in enumerate(generated.pattern, 1):
        if quantity.milliseconds("for", choice.lasts) > round(limits.max_duration * 1000):
            problems.append(f"campaign.pattern[{place}]: {choice.lasts} is longer than faults.max_duration, {limits.max_duration:g} s")
    if problems:
        return []
    mean, lasts = quantity.milliseconds("mtbf", generated.mtbf), campaign.duration_ms
    drafts: list[tuple[int, FaultSpec]] = []
    busy: dict[int, int] = {}
    at, index = 0, 0
    while len(drafts) < generated.max_faults and index < _MOST_DRAWS:
        at += _distance(campaign.seed, index, mean)
        if at >= lasts:
            break
        choice = _weighted(generated.pattern, draw(campaign.seed, "pattern", index))
        end = at + quantity.milliseconds("for", choice.lasts)
        free = [rank for rank in pool if busy.get(rank, 0) <= at]
        active = sum(until > at for until in busy.values())
        recent = sum(begun > at - _MINUTE_MS for begun, _ in drafts)
        if free and end <= lasts and active < min(limits.max_active, limits.max_ranks_per_job) and recent < limits.per_minute:
            rank = free[draw(campaign.seed, "rank", index) % len(free)]
            busy[rank] = end + GAP_MS
            drafts.append((at, _made(choice, rank, draw(campaign.seed, "fault seed", index, rank))))
        index += 1
    return drafts


def _made(words: Step | Choice, rank: int, seed: int) -> FaultSpec:
    """Its seed is the file's where that names one, else the plan's, so that a replay of the plan hits the same calls."""
    options = file.texts(words.options)
    if file.takes_seed(words.pattern):
        options.setdefault("seed", str(seed >> 1))
    return spec.parse(words.pattern, rank, options, duration=words.lasts)


def _distance(seed: int, index: int, mean: int) -> int:
    """Milliseconds to the next fault, at least 1; exponential by inversion."""
    share = _EXACT.divide(decimal.Decimal(draw(seed, "distance", index) + 1), decimal.Decimal(2**64))
    exact = _EXACT.multiply(-_EXACT.ln(share), decimal.Decimal(mean))
    return max(1, int(exact.to_integral_value(decimal.ROUND_HALF_EVEN)))


def _weighted(choices: Sequence[Choice], number: int) -> Choice:
    place = number % sum(choice.weight for choice in choices)
    for choice in choices:
        if place < choice.weight:
            return choice
        place -= choice.weight
    raise AssertionError("the weights add up")


def _at(milliseconds: int) -> str:
    return quantity.duration_text(milliseconds)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
