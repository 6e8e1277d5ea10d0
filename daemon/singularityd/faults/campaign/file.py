"""The campaign file: TOML, typed, every number bounded; every problem of a file is told at once.

Pure: no I/O, no clock, any thread. What the patterns and their options mean is judged by `faults.spec`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from singularityd.errors import BadOption, SingularityError
from singularityd.faults import quantity, spec
from singularityd.faults.patterns import PATTERNS

LONGEST_FILE = 60_000
"""Characters; the file travels whole in one request of at most 64 KiB."""
LONGEST_CAMPAIGN_MS = quantity.LONGEST_MS
MOST_FAULTS = 1000
LEAST_MTBF_MS = 100
_RANDOM = re.compile(r"random:([1-9][0-9]{0,6})")
_ALLOWED_RANKS = 'write "all", "random:K" or a list of ranks'

Text = Annotated[str, msgspec.Meta(max_length=300)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, le=spec.LARGEST_RANK)]
Ranks = str | Annotated[list[RankNumber], msgspec.Meta(min_length=1, max_length=MOST_FAULTS)]
Condition = Literal["job_gone", "rank_gone"]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of the file."""


class Step(_Table, frozen=True, kw_only=True):
    """One `[[fault]]`: on each of these ranks, at this time after the start."""

    at: str
    pattern: str
    rank: RankNumber | None = None
    ranks: Ranks | None = None
    options: dict[str, str | int] = {}
    lasts: str = msgspec.field(default="10s", name="for")


class Choice(_Table, frozen=True, kw_only=True):
    """One `[[campaign.pattern]]`: what a generated fault may be, and how often compared with the others."""

    pattern: str
    weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    options: dict[str, str | int] = {}
    lasts: str = msgspec.field(default="10s", name="for")


class Generated(_Table, frozen=True, kw_only=True):
    """`[campaign]`: faults at random times whose mean distance is `mtbf`."""

    mtbf: str
    pattern: Annotated[list[Choice], msgspec.Meta(min_length=1, max_length=100)]
    ranks: Ranks = "all"
    max_faults: Annotated[int, msgspec.Meta(ge=1, le=MOST_FAULTS)] = 100


class Stop(_Table, frozen=True, kw_only=True):
    """`[stop]`: what ends the campaign early."""

    max_failures: Annotated[int, msgspec.Meta(ge=1, le=MOST_FAULTS)] = 3
    """Faults that could not be armed."""
    when: list[Condition] = msgspec.field(default_factory=lambda: typing.cast(list[Condition], ["job_gone"]))


class Campaign(_Table, frozen=True, kw_only=True):
    """The whole file."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    duration: str
    job: Annotated[str, msgspec.Meta(max_length=spec.LONGEST_JOB)] = ""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    reason: Text = ""
    settle: str = "0s"
    fault: Annotated[list[Step], msgspec.Meta(max_length=MOST_FAULTS)] = []
    campaign: Generated | None = None
    stop: Stop = Stop()

    @property
    def duration_ms(self) -> int:
        """Faults begin and end within so many milliseconds after the start."""
        return quantity.milliseconds("duration", self.duration)

    @property
    def settle_ms(self) -> int:
        """So long the job is watched after the last fault, milliseconds."""
        return offset("settle", self.settle)


def read(text: str) -> Campaign:
    """The campaign of a file's text. Raises BadOption that lists every problem."""
    if len(text) > LONGEST_FILE:
        raise BadOption(f"the campaign file has {len(text)} characters", hint=f"write at most {LONGEST_FILE}")
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadOption(f"the campaign file is not TOML: {str(error)[:200] or 'too deep'}", hint="docs/drills.md has an example") from None
    problems: list[str] = []
    _check_table(Campaign, tree, "", problems)
    campaign = None
    if not problems:
        try:
            campaign = msgspec.convert(tree, Campaign)
        except msgspec.ValidationError as error:  # what only the whole can show
            problems.append(str(error)[:300])
    if campaign is not None:
        _check_meaning(campaign, problems)
    if problems or campaign is None:
        raise fault_list("the campaign file", problems)
    return campaign


def fault_list(what: str, problems: Sequence[str]) -> BadOption:
    """One error that names them all, each on a line of its own."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    shown = [*problems[:50], *([f"and {len(problems) - 50} more"] if len(problems) > 50 else [])]
    return BadOption("\n".join([f"{what} has {count}:", *(f"  {line}" for line in shown)]), hint="docs/drills.md describes every key")


def offset(name: str, text: str) -> int:
    """Milliseconds of a duration that may be 0."""
    return 0 if text in ("0s", "0ms", "0m") else quantity.milliseconds(name, text)


def texts(options: Mapping[str, str | int]) -> dict[str, str]:
    """Options as the words that `faults.spec` reads; a number may be written as one."""
    return {key: str(value) for key, value in options.items()}


def random_of(ranks: str) -> int | None:
    """The K of `random:K`."""
    match = _RANDOM.fullmatch(ranks)
    return int(match[1]) if match else None


def _check_table(kind: type, content: object, path: str, problems: list[str]) -> None:
    """One value after the other, so that all wrong ones are told."""
    where = path or "the file"
    if not isinstance(content, dict):
        problems.append(f"{where} is a table")
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in sorted(content.keys() - fields.keys()):
        near = difflib.get_close_matches(key.lower(), fields, n=1)
        said = f"; did you mean {near[0]}?" if near else f" (there are: {', '.join(fields)})"
        problems.append(f"unknown key {_join(path, key[:60])}{said}")
    for name, field in fields.items():
        if name in content:
            _check_value(field.type, content[name], _join(path, name), problems)
        elif field.required:
            problems.append(f"{_join(path, name)} is missing")


_NESTED: dict[str, type] = {"fault": Step, "campaign": Generated, "stop": Stop, "campaign.pattern": Choice}


def _check_value(kind: Any, value: object, path: str, problems: list[str]) -> None:
    nested = _NESTED.get(path)
    if nested is not None and isinstance(value, list) and nested in (Step, Choice):
        for place, one in enumerate(value[: MOST_FAULTS + 1], 1):
            _check_table(nested, one, f"{path}[{place}]", problems)
        if len(value) > MOST_FAULTS:
            problems.append(f"{path}: more than {MOST_FAULTS}")
        return
    if nested in (Generated, Stop):
        _check_table(nested, value, path, problems)
        return
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        problems.append(f"{path}: {str(error)[:200].replace('`', '')}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_meaning(campaign: Campaign, problems: list[str]) -> None:
    lasts = _heard(problems, "duration", lambda: campaign.duration_ms)
    _heard(problems, "settle", lambda: campaign.settle_ms)
    lines = {"name": campaign.name, "job": campaign.job, "reason": campaign.reason}
    problems += [f"{name}: write one line of plain text" for name, line in lines.items() if not line.isprintable()]
    if not campaign.fault and campaign.campaign is None:
        problems.append("nothing to do: write [[fault]] tables, or one [campaign]")
    if campaign.fault and campaign.campaign is not None:
        problems.append("[[fault]] is a fixed schedule and [campaign] a generated one: write one of the two")
    for place, step in enumerate(campaign.fault, 1):
        _check_step(step, f"fault[{place}]", lasts, problems)
    if (generated := campaign.campaign) is not None:
        mean = _heard(problems, "campaign.mtbf", lambda: quantity.milliseconds("mtbf", generated.mtbf))
        if mean is not None and mean < LEAST_MTBF_MS:
            problems.append(f"campaign.mtbf: {generated.mtbf} is shorter than {LEAST_MTBF_MS}ms")
        _check_ranks(generated.ranks, "campaign.ranks", problems)
        for place, choice in enumerate(generated.pattern, 1):
            _check_words(choice, f"campaign.pattern[{place}]", lasts, problems)


def _check_step(step: Step, path: str, lasts: int | None, problems: list[str]) -> None:
    if (step.rank is None) == (step.ranks is None):
        problems.append(f"{path}: write one of rank and ranks")
    if step.ranks is not None:
        _check_ranks(step.ranks, f"{path}.ranks", problems)
    begins = _heard(problems, f"{path}.at", lambda: offset("at", step.at))
    ends = _check_words(step, path, lasts, problems)
    if lasts is not None and begins is not None and ends is not None and begins + ends > lasts:
        problems.append(f"{path}: it would end after the campaign's duration of {quantity.duration_text(lasts)}")


def _check_words(words: Step | Choice, path: str, lasts: int | None, problems: list[str]) -> int | None:
    """The fault's life, milliseconds, where everything in its words is right."""
    try:
        made = spec.parse(words.pattern, 0, texts(words.options), duration=words.lasts)
    except SingularityError as error:
        problems.append(f"{path}: {error.text}{f' ({error.hint})' if error.hint else ''}")
        return None
    life = round(made.duration * 1000)
    if lasts is not None and life > lasts:
        problems.append(f"{path}.for: {words.lasts} is longer than the campaign")
        return None
    return life


def _check_ranks(ranks: Ranks, path: str, problems: list[str]) -> None:
    if isinstance(ranks, str):
        if ranks != "all" and random_of(ranks) is None:
            problems.append(f"{path}: {quantity.shown(ranks)}: {_ALLOWED_RANKS}")
    elif len(set(ranks)) != len(ranks):
        problems.append(f"{path}: a rank is named twice")


def _heard(problems: list[str], path: str, ask: Any) -> int | None:
    try:
        return int(ask())
    except BadOption as error:
        problems.append(f"{path}: {error.text}; {error.hint}")
        return None


def takes_seed(pattern: str) -> bool:
    """Whether a pattern of this name has an option `seed`."""
    return any(option.name == "seed" for one in PATTERNS if one.name == pattern for option in one.options)
