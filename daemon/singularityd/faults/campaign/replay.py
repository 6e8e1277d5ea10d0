"""From the journal's faults back to a campaign file that does the same again. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from singularityd.errors import Refused
from singularityd.faults import quantity, spec
from singularityd.faults.campaign import file
from singularityd.faults.campaign.plan import GAP_MS
from singularityd.model import Fault


def write(name: str, faults: Sequence[Fault]) -> str:
    """A fixed schedule: each fault that was armed, on its rank, at its distance from the first. Raises Refused where none was.

    The job is left out, so that the file can be run on the next one.
    """
    armed = sorted((fault for fault in faults if fault.armed_at), key=lambda fault: (fault.created_at, fault.spec.rank))
    if not armed:
        raise Refused("no fault was armed in that time", hint="singularityctl faults --history lists those there were")
    if len(armed) > file.MOST_FAULTS:
        raise Refused(f"{len(armed)} faults are more than a campaign may have ({file.MOST_FAULTS})", hint="begin later, with --since")
    first = armed[0].created_at
    begins: list[int] = []
    free: dict[int, int] = {}
    for fault in armed:
        # A fault that was cleared early let the next one follow sooner than a plan allows.
        begin = max(round((fault.created_at - first) * 1000), free.get(fault.spec.rank, 0))
        free[fault.spec.rank] = begin + round(fault.spec.duration * 1000) + GAP_MS
        begins.append(begin)
    last = max(free.values()) - GAP_MS
    if last > file.LONGEST_CAMPAIGN_MS:
        raise Refused("the faults lie more than a day apart", hint="begin later, with --since")
    head = [f"name = {_text(name)}", f"duration = {_text(quantity.duration_text(last))}"]
    return "\n".join([*head, *(line for begin, fault in zip(begins, armed, strict=True) for line in _step(begin, fault))]) + "\n"


def _step(begin: int, fault: Fault) -> list[str]:
    request = spec.render(fault.spec)
    lines = ["", "[[fault]]", f"at = {_text(quantity.duration_text(begin) if begin else '0s')}", f"rank = {request.rank}"]
    lines += [f"pattern = {_text(request.pattern)}", f"for = {_text(request.duration)}"]
    options = dict(request.options)
    if file.takes_seed(fault.spec.pattern):
        options.setdefault("seed", str(fault.spec.seed))
    inside = ", ".join(f"{key} = {_text(value)}" for key, value in options.items())
    return [*lines, f"options = {{ {inside} }}"] if inside else lines


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's for what is printable and below U+10000, so nothing else is escaped."""
    return json.dumps(value, ensure_ascii=False)
