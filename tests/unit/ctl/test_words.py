"""Numbers, times and names as they are printed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from singularityd.ctl import words
from singularityd.ctl.output import Column, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.00085, "850 us"),
        (0.0009999, "1 ms"),
        (0.0125, "12.5 ms"),
        (3.2, "3.2 s"),
        (59.9, "59.9 s"),
        (59.96, "1 min"),
        (125, "2 min 5 s"),
        (3599.6, "1 h"),
        (14_580, "4 h 3 min"),
        (86_400 * 2 + 3600, "2 d 1 h"),
        (-1, "-1 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@settings(deadline=None)
@given(st.floats(0, 1e9))
def test_coarse_durations_fit_a_column(seconds: float) -> None:
    assert len(words.coarse(seconds)) <= 7


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (512, "512 B"), (1023, "1 KiB"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (1 << 60, "1024 PiB")]
)
def test_size(count: float, text: str) -> None:
    assert words.size(count) == text


def test_times_are_utc_and_absent_ones_are_not_1970() -> None:
    assert words.moment(1_780_000_000) == "2026-05-28 20:26:40Z"
    assert words.instant(1_780_000_000.0279) == "2026-05-28T20:26:40.027Z"
    assert words.near(1_780_000_000, 1_780_000_005) == "20:26:40Z"
    assert words.near(1_780_000_000, 1_780_090_000) == "2026-05-28 20:26Z"
    assert words.moment(0) == words.instant(0) == words.near(0, 5) == "-"


@settings(deadline=None)
@given(st.text())
def test_nothing_printed_steers_a_terminal(text: str) -> None:
    shown = words.printable(text)
    assert shown.isprintable()
    assert text != shown or text.isprintable()


@settings(deadline=None)
@given(st.text(st.characters(categories=["L", "N", "P", "M"])), st.integers(0, 40))
def test_shortened_text_fits(text: str, columns: int) -> None:
    assert words.width(words.shorten(text, columns)) <= max(columns, 0)
    if words.width(text) <= columns:
        assert words.shorten(text, columns) == text


def test_shortening_keeps_both_ends() -> None:
    assert words.shorten("torchrun:host-a:29500", 11) == "torch…29500"


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=150), st.text(max_size=150), st.integers(0, 10**12)), min_size=1, max_size=5))
def test_tables_fit_and_align(rows: list[tuple[str, str, int]]) -> None:
    columns = (Column("A", least=5), Column("B", least=5), Column("N", right=True))
    lines = table(columns, [(one, two, str(number)) for one, two, number in rows])
    assert len(lines) == len(rows) + 1
    assert all(words.width(line) <= 100 for line in lines)
    assert len({words.width(line) for line in lines}) == 1
