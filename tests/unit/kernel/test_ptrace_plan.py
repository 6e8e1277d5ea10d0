"""How long each call is held: as asked, never negative, the same again for the same seed."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel import abi
from singularityd.kernel.ptrace.plan import EXPONENTIAL, FIXED, LONGEST_FACTOR, NORMAL, UNIFORM, Plan

MS = 1_000_000


def delays(distribution: int, jitter: int = 0, seed: int = 7) -> list[float]:
    plan = Plan(milliseconds=200, jitter=jitter, distribution=distribution, seed=seed, rank=3)
    return [plan.delay_ms(index) for index in range(20_000)]


def test_fixed_is_exact() -> None:
    assert set(delays(FIXED)) == {200}


@pytest.mark.parametrize(("distribution", "spread"), [(UNIFORM, 50 / 3**0.5), (NORMAL, 50), (EXPONENTIAL, 200)])
def test_mean_and_spread(distribution: int, spread: float) -> None:
    found = delays(distribution, jitter=50)
    assert abs(statistics.mean(found) - 200) < 5
    assert abs(statistics.stdev(found) - spread) < 0.05 * spread
    assert min(found) >= 0
    assert max(found) <= LONGEST_FACTOR * 200


def test_the_seed_decides() -> None:
    assert delays(NORMAL, 50) == delays(NORMAL, 50)
    assert delays(NORMAL, 50) != delays(NORMAL, 50, seed=8)


def test_uniform_stays_within_its_jitter() -> None:
    assert all(150 <= delay <= 250 for delay in delays(UNIFORM, 50))


@given(
    ms=st.integers(0, 2**32 - 1),
    jitter=st.integers(0, 2**32 - 1),
    distribution=st.integers(0, 3),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**64 - 1),
    on=st.integers(0, 10_000),
    off=st.integers(0, 10_000),
    at=st.integers(0, 10**12),
)
def test_never_before_the_hit(ms: int, jitter: int, distribution: int, seed: int, index: int, on: int, off: int, at: int) -> None:
    plan = Plan(milliseconds=ms, jitter=jitter, distribution=distribution, seed=seed, on=on, off=off)
    start = 5
    until = plan.hold_until(index, start + at, start)
    if on:
        phase = at % ((on + off) * MS)
        assert until == start + at - phase + on * MS
    else:
        assert until == 0 if not ms else until >= start + at


def test_a_call_that_returns_at_once_is_not_held() -> None:
    assert Plan(returns=True, until_end=False).hold_until(0, 99, 5) == 99
    assert Plan(returns=True, until_end=True).hold_until(0, 99, 5) == 0


@pytest.mark.parametrize(("threads", "whole"), [(1, 20 * MS), (50, 20 * MS), (1000, 400 * MS)])
def test_a_turn_grows_with_the_threads(threads: int, whole: int) -> None:
    plan = Plan(action=abi.ACTION_DUTY, running_ppm=250_000)
    assert plan.turn_ns(threads) == (whole // 4, whole)
    assert plan._replace(period=100).turn_ns(threads) == (25 * MS, 100 * MS)
