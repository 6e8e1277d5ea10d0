"""The text formats of a page: Prometheus 0.0.4 and OpenMetrics 1.0.0.

prometheus_client's own encoder says the same, byte for byte (a test holds the two together), but takes ten times as long: it sorts and
escapes the labels of every bucket anew. Here a series' labels are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from singularityd.observe.families import BOUNDS, Family
from singularityd.observe.pace import never
from singularityd.observe.reading import Distribution, Reading, Series


class Format(NamedTuple):
    """How a page is written."""

    content_type: str
    openmetrics: bool


TEXT = Format("text/plain; version=0.0.4; charset=utf-8", openmetrics=False)
OPENMETRICS = Format("application/openmetrics-text; version=1.0.0; charset=utf-8", openmetrics=True)


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


_LE = tuple(map(_number, (*BOUNDS, float("inf"))))


def encode(reading: Reading, form: Format = TEXT, pace: Callable[[], None] = never) -> bytes:
    """The whole page. Any thread."""
    return b"".join(part.encode() for part in _parts(reading, form, pace))


def _parts(reading: Reading, form: Format, pace: Callable[[], None]) -> Iterator[str]:
    """The page in pieces: to join and encode two megabytes in one go would hold the interpreter for milliseconds."""
    for family, series in reading.families:
        yield _head(family, form)
        sample = _histogram if family.kind == "histogram" else _plain
        for one in series:
            yield sample(family, one)
            pace()
    if form.openmetrics:
        yield "# EOF\n"


def _head(family: Family, form: Format) -> str:
    name = family.name.removesuffix("_total") if form.openmetrics else family.name
    return f"# HELP {name} {_escape(family.help) if form.openmetrics else family.help}\n# TYPE {name} {family.kind}\n"


def _plain(family: Family, series: Series) -> str:
    pairs = _pairs(family.labels, series.labels)
    text = "{" + ",".join(pairs) + "}" if pairs else ""
    assert not isinstance(series.value, Distribution)
    return f"{family.name}{text} {_number(series.value)}\n"


def _histogram(family: Family, series: Series) -> str:
    value = series.value
    assert isinstance(value, Distribution)
    pairs = _pairs(family.labels, series.labels)
    # the format wants the labels sorted by name, `le` among them
    place = sum(name < "le" for name in family.labels)
    before = f"{family.name}_bucket{{" + "".join(f"{pair}," for pair in pairs[:place]) + 'le="'
    after = '"' + "".join(f",{pair}" for pair in pairs[place:]) + "} "
    buckets = "".join(f"{before}{bound}{after}{_count(count)}\n" for bound, count in zip(_LE, value.cumulative, strict=True))
    text = ",".join(pairs)
    total = f"{family.name}_count{{{text}}} {_count(value.cumulative[-1])}\n"
    return f"{buckets}{total}{family.name}_sum{{{text}}} {_number(value.total)}\n"


def _count(number: int) -> str:
    """floatToGoString of a whole number, which is in its simple range below a million."""
    return f"{number}.0" if number < 1_000_000 else _number(number)


def _pairs(names: tuple[str, ...], values: tuple[str, ...]) -> list[str]:
    return sorted(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _escape(value: str) -> str:
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
