"""What the watchdog is fed on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel.heartbeat import PATIENCE, STARTING, Heartbeat


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_ping_counts_for_a_while_and_a_start_for_longer() -> None:
    clock = Clock()
    heart = Heartbeat(clock)
    clock.now += STARTING - 0.1
    assert (heart.good, heart.silent) == (True, False)
    clock.now += 0.2
    assert (heart.good, heart.silent) == (False, False)  # it never answered: that is the manager's to end
    heart.pinged()
    clock.now += PATIENCE - 0.1
    assert (heart.good, heart.silent) == (True, False)
    clock.now += 0.2
    assert (heart.good, heart.silent) == (False, True)
    heart.lost()
    assert (heart.good, heart.silent) == (True, False)


def test_a_front_that_dies_again_and_again_is_no_progress() -> None:
    clock = Clock()
    heart = Heartbeat(clock)
    heart.pinged()
    for _ in range(20):
        heart.lost()
        clock.now += 5
    assert not heart.good
    heart.pinged()
    assert heart.good


@given(st.lists(st.tuples(st.sampled_from(["ping", "lost", "wait"]), st.integers(0, 20)), max_size=40))
def test_it_is_never_good_for_longer_than_the_limits_after_the_last_ping(steps: list[tuple[str, int]]) -> None:
    """With the executor looking once a second, as it does."""
    clock = Clock()
    heart = Heartbeat(clock)
    last = clock.now
    for what, seconds in steps:
        for _ in range(seconds):
            clock.now += 1
            if heart.silent:
                heart.lost()
        if what == "ping":
            heart.pinged()
            last = clock.now
        elif what == "lost":
            heart.lost()
        if clock.now - last < PATIENCE:
            assert heart.good
        if clock.now - last > PATIENCE + STARTING + 1:
            assert not heart.good
