"""Percentiles out of the kernel's power-of-two histograms."""

from __future__ import annotations

from collections.abc import Sequence

MICROSECOND = 1e-6


def bounds(index: int) -> tuple[float, float]:
    """Bucket `index` as (low, high) in seconds: it holds calls of at least low and less than high. The last has no real high."""
    low = 0.0 if index == 0 else 2.0 ** (index - 1)
    return low * MICROSECOND, 2.0**index * MICROSECOND


def percentile(buckets: Sequence[int], percent: float) -> float | None:
    """The duration in seconds that `percent` % of the calls did not exceed (nearest rank), None where there are no calls.

    Inside a bucket the calls are taken as evenly spread, so the answer is off by at most the bucket's width: a factor of two.
    For the open last bucket the answer is its low bound, the most that is known.
    """
    total = sum(buckets)
    if total <= 0:
        return None
    place = max(1.0, percent / 100 * total)
    before = 0
    for index, count in enumerate(buckets):
        if count > 0 and before + count >= place:
            low, high = bounds(index)
            if index == len(buckets) - 1:
                return low
            return low + (high - low) * (place - before) / count
        before += count
    return bounds(len(buckets) - 1)[0]
