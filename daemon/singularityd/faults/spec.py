"""From the words of a request to a FaultSpec, and back. Pure: no I/O, no clock, any thread.

Whatever the texts are, `parse` answers with a FaultSpec or raises UnknownPattern or BadOption, which name the allowed values, the
nearest one and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from singularityd.errors import BadOption, UnknownPattern
from singularityd.faults import points, quantity, results
from singularityd.faults.pattern import Option, Pattern
from singularityd.faults.patterns import PATTERNS
from singularityd.kernel.libraries import tables
from singularityd.model import FaultSpec

LARGEST_RANK = 2**31 - 1
LONGEST_JOB = 1024
LONGEST_REASON = 300

_ELSEWHERE = {
    "duration": "the fault's life is said by --for; ms is how long each call is held",
    "for": "the fault's life is said by --for; ms is how long each call is held",
    "rank": "the rank is said by --rank",
    "job": "the job is said by --job",
    "reason": "the reason is said by --reason",
}


class Request(NamedTuple):
    """The words of a request, as `parse` takes them: `parse(*request[:3], **rest)`."""

    pattern: str
    rank: int
    options: dict[str, str]
    job: str
    duration: str
    reason: str


def parse(
    pattern: str,
    rank: int,
    options: Mapping[str, str] | Iterable[tuple[str, str]],
    *,
    job: str = "",
    duration: str = "",
    reason: str = "",
    may_kill_job: bool = False,
) -> FaultSpec:
    """The validated request. `duration` is a text such as `5s`, empty for the default of 10 s.

    `options` may be pairs, so that a key given twice is seen and refused.
    """
    chosen = find(pattern)
    values: dict[str, Any] = {"rank": _rank(rank), "job": _line("job", job, LONGEST_JOB), "reason": _line("reason", reason, LONGEST_REASON)}
    if duration:
        values["duration"] = quantity.milliseconds("duration", duration) / 1000
    values["may_kill_job"] = may_kill_job
    values |= chosen.defaults
    values |= _options(chosen, options.items() if isinstance(options, Mapping) else options)
    if values.get("result") and not values.get("backend"):
        values["backend"] = "nccl"  # the one whose calls return something
    spec = FaultSpec(pattern=chosen.name, **values)
    _check_point(chosen, spec)
    chosen.check(spec)
    return spec


def render(spec: FaultSpec) -> Request:
    """The shortest words that `parse` turns into this spec."""
    texts = {option.name: option.write(spec) for option in find(spec.pattern).options}
    duration = quantity.duration_text(round(spec.duration * 1000))
    return Request(spec.pattern, spec.rank, {key: text for key, text in texts.items() if text}, spec.job, duration, spec.reason)


def find(name: str) -> Pattern:
    """The pattern of that name. Raises UnknownPattern with those there are."""
    for pattern in PATTERNS:
        if pattern.name == name:
            return pattern
    there_is = f"there is: {', '.join(pattern.name for pattern in PATTERNS)}"
    near = difflib.get_close_matches(name.lower(), [pattern.name for pattern in PATTERNS], n=1)
    raise UnknownPattern(f"pattern {quantity.shown(name)} is not known", hint=_did_you_mean(near) + there_is)


def pairs(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """`KEY=VALUE` arguments as pairs. Raises BadOption for one without `=`."""
    found = []
    for argument in arguments:
        key, mark, text = argument.partition("=")
        if not mark:
            raise BadOption(f"option {quantity.shown(argument)} has no value", hint="write KEY=VALUE, for example probability=25%")
        found.append((key, text))
    return found


def _options(pattern: Pattern, given: Iterable[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for key, text in given:
        if key in texts:
            raise BadOption(f"option {key} is given twice", hint="keep one of them")
        texts[key] = text
        for field, value in _option(pattern, key).read(text).items():
            if field == "result":
                values[field] = value if key == "code" else values.get(field, value)
            elif values.setdefault(field, value) != value:
                said = f"point={texts['point']} is a function of {_backend_of(texts['point'])}"
                raise BadOption(f"{said}, and backend={texts['backend']} is another library", hint="keep one of the two options")
    if "code" in texts and any(option.name == "mode" for option in pattern.options) and texts.get("mode") != "return":
        raise BadOption(f"code={texts['code']} is returned with mode=return only", hint="write mode=return, or use the pattern error")
    return values


def _backend_of(point: str) -> str:
    return points.resolve(point)[1]


def _option(pattern: Pattern, key: str) -> Option:
    for option in pattern.options:
        if option.name == key:
            return option
    names = [option.name for option in pattern.options]
    if key in _ELSEWHERE:
        raise BadOption(f"{key} is not an option of {pattern.name}", hint=_ELSEWHERE[key])
    near = difflib.get_close_matches(key.lower(), names, n=1)
    raise BadOption(
        f"{pattern.name} has no option {quantity.shown(key)}", hint=f"{_did_you_mean(near)}{pattern.name} has: {', '.join(names)}"
    )


def _check_point(pattern: Pattern, spec: FaultSpec) -> None:
    """A point that the pattern can never reach would be armed and never hit."""
    if spec.backend and (spec.backend not in pattern.backends or (spec.result and not results.returned_by(spec.backend))):
        raise not_for(spec, spec.backend)
    if spec.backend and spec.point != points.ANY and spec.point not in points.operations(spec.backend):
        allowed = ", ".join(points.operations(spec.backend))
        raise BadOption(f"{spec.backend} has no call {spec.point}", hint=f"{spec.backend} has: {allowed}")


def not_for(spec: FaultSpec, backend: str) -> BadOption:
    """Why a fault cannot be done to calls of a library, and what can."""
    refusal = next((table.refusal for table in tables() if table.backend == backend), "")
    what = "a result cannot be returned from" if spec.result else f"{spec.pattern} cannot be done to"
    others = ", ".join(other.name for other in PATTERNS if backend in other.backends)
    return BadOption(f"{what} calls of {backend}: {refusal}", hint=f"{backend} has: {others}")


def _rank(rank: int) -> int:
    if isinstance(rank, bool) or not 0 <= rank <= LARGEST_RANK:
        text = f"rank {quantity.shown(str(rank)) if abs(rank) <= 2**64 else 'of so many digits'} cannot be"
        raise BadOption(text, hint=f"write the global rank in its job, 0 to {LARGEST_RANK}; singularityctl ranks lists them")
    return rank


def _line(name: str, text: str, longest: int) -> str:
    if len(text) > longest:
        raise BadOption(f"{name} has {len(text)} characters", hint=f"write at most {longest}")
    if not text.isprintable():
        raise BadOption(f"{name} {quantity.shown(text)} has characters that are not printable", hint="write one line of plain text")
    return text


def _did_you_mean(near: list[str]) -> str:
    return f"did you mean {near[0]}? " if near else ""
