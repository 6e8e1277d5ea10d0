"""Percentiles from histograms lie where the sorted data has them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from singularityd.ctl.percentile import bounds, percentile

BUCKETS = 32


def bucket_of(microseconds: float) -> int:
    """As the kernel counts: bucket i holds less than 2**i and not less than 2**(i-1)."""
    return min(BUCKETS - 1, int(microseconds).bit_length())


def histogram(data: list[int]) -> list[int]:
    counts = [0] * BUCKETS
    for value in data:
        counts[bucket_of(value)] += 1
    return counts


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**30 - 1), min_size=1, max_size=200), st.floats(0.1, 100))
def test_within_the_bucket_of_the_exact_percentile(data: list[int], percent: float) -> None:
    found = percentile(histogram(data), percent)
    exact = sorted(data)[max(0, math.ceil(percent / 100 * len(data)) - 1)]
    low, high = bounds(bucket_of(exact))
    assert found is not None
    assert low <= found <= high


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=BUCKETS, max_size=BUCKETS), st.floats(0, 100), st.floats(0, 100))
def test_never_falls_as_the_percent_grows(counts: list[int], one: float, other: float) -> None:
    low, high = percentile(counts, min(one, other)), percentile(counts, max(one, other))
    assert (low is None) == (high is None) == (sum(counts) == 0)
    if low is not None and high is not None:
        assert low <= high


def test_interpolates_within_a_bucket() -> None:
    assert percentile([0, 0, 0, 100], 50) == bounds(3)[0]  # the last bucket is open: no more than its low bound is known
    assert percentile([0, 0, 0, 100, 0], 50) == pytest.approx(6e-6)
    assert percentile([0, 0, 0, 100, 0], 75) == pytest.approx(7e-6)


def test_no_calls_have_no_percentile() -> None:
    assert percentile([], 50) is None
    assert percentile([0, 0], 99) is None
