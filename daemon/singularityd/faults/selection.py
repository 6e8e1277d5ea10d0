"""Several ranks of a job by one word: `3`, `1,3`, `0-2`, `all`, `random:2`. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from singularityd.errors import BadOption, NoSuchRank
from singularityd.faults import quantity

_PARTS = re.compile(r"[0-9]{1,10}(?:-[0-9]{1,10})?(?:,[0-9]{1,10}(?:-[0-9]{1,10})?)*")
_RANDOM = re.compile(r"random:([0-9]{1,6})")
_MOST = 100_000
_WRITE = "write 3, 1,3, 0-2, all, or random:2"


def choose(text: str, here: Sequence[int], *, seed: int) -> list[int]:
    """The ranks that are meant, ascending. `here` are those there are; the same seed draws the same of them again.

    Raises BadOption for what is no selection, NoSuchRank where ranks are named that are not here, or more than there are.
    """
    there = sorted(set(here))
    if text == "all":
        return there
    match = _RANDOM.fullmatch(text)
    if match:
        return _draw(int(match[1]), there, seed)
    if _PARTS.fullmatch(text) is None:
        raise BadOption(f"ranks {quantity.shown(text)} cannot be read", hint=_WRITE)
    wanted = _listed(text)
    missing = [number for number in wanted if number not in set(there)]
    if missing:
        raise NoSuchRank(f"no rank {missing[0]} in the job: this host runs {', '.join(map(str, there))}", hint="see singularityctl ranks")
    return wanted


def _draw(count: int, there: Sequence[int], seed: int) -> list[int]:
    if not 1 <= count <= len(there):
        raise NoSuchRank(
            f"{count} ranks cannot be drawn from the {len(there)} of the job on this host", hint=f"write random:1 to {len(there)}"
        )
    return sorted(random.Random(seed).sample(there, count))  # noqa: S311 - to be drawn again, not to be secret


def _listed(text: str) -> list[int]:
    wanted: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high - low >= _MOST:
            raise BadOption(f"ranks {quantity.shown(part)} is no range", hint=_WRITE)
        wanted.update(range(low, high + 1))
    return sorted(wanted)
