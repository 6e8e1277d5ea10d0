"""Who was late at a collective, and whom the others wait for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.model import Arrival, InFlight, Rank
from singularityd.observe.skew import skews, waits


def host(count=4, job="j", **states):
    ranks = {100 + number: Rank(pid=100 + number, start_time=1, job=job, rank=number) for number in range(count)}
    ranks |= {300 + number: Rank(pid=300 + number, start_time=1, job="other", rank=number) for number in range(count)}
    for name, state in states.items():
        number = int(name[1:])
        ranks[100 + number] = Rank(pid=100 + number, start_time=1, job=job, rank=number, state=state)
    return ranks.get


def came(number, sequence, at, *, op="allreduce", comm="1", size=4, place=None, pid=None, backend="gloo"):
    place = number if place is None else place
    return Arrival(pid=pid or 100 + number, backend=backend, comm=comm, comm_rank=place, comm_size=size, sequence=sequence, op=op, at=at)


def inside(number, sequence, seconds, *, op="allreduce", comm="1", fault="", pid=None):
    pid = pid or 100 + number
    return InFlight(pid=pid, tid=pid, backend="gloo", op=op, comm=comm, sequence=sequence, bytes=4, seconds=seconds, fault=fault)


ALL = [came(number, 7, 10.0 + number / 10) for number in range(4)]


def test_lateness_is_told_by_global_rank_from_the_first():
    (skew,) = skews(ALL, host())
    assert (skew.job, skew.backend, skew.comm, skew.op, skew.sequence) == ("j", "gloo", "1", "allreduce", 7)
    assert skew.lateness == pytest.approx({0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3})


def test_the_newest_that_all_have_entered():
    more = [came(number, 8, 20.0) for number in range(3)]
    assert skews(ALL + more, host())[0].sequence == 7
    assert skews([*ALL, *more, came(3, 8, 21.0)], host())[0].lateness == pytest.approx({0: 0, 1: 0, 2: 0, 3: 1.0})


def test_a_rank_that_never_came_is_no_member_and_one_that_lags_is():
    assert skews(ALL[:3], host())[0].lateness.keys() == {0, 1, 2}
    assert skews([*ALL[:3], came(3, 2, 1.0)], host()) == ()


def test_other_jobs_and_groups_are_kept_apart():
    others = [came(number, 7, 99.0, pid=300 + number) for number in range(4)]
    group = [came(number, 1, 5.0 + number, comm="2", size=2, place=number - 2) for number in (2, 3)]
    found = {(skew.job, skew.comm): skew.lateness for skew in skews(ALL + others + group, host())}
    assert found["j", "2"] == pytest.approx({2: 0.0, 3: 1.0})
    assert found["other", "1"] == pytest.approx(dict.fromkeys(range(4), 0.0))


def test_a_different_op_at_one_sequence_is_not_joined():
    assert skews([came(0, 7, 1.0), came(1, 7, 2.0, op="broadcast")], host()) == ()


@pytest.mark.parametrize(
    "arrivals",
    [
        [came(0, 7, 1.0, size=2, place=0), came(1, 7, 1.0, size=2, place=0)],
        [came(0, 7, 1.0, size=2), came(1, 7, 1.0, size=3)],
        [came(0, 7, 1.0, comm="unknown"), came(1, 7, 1.0, comm="unknown")],
        [came(0, 7, 1.0, size=None), came(1, 7, 1.0, size=None)],
        [came(0, 7, 1.0, pid=999), came(1, 7, 1.0)],
        [came(0, 7, 1.0)],
        [],
    ],
    ids=["one place twice", "two sizes", "unknown", "no size", "no rank", "alone", "nothing"],
)
def test_nothing_is_said_where_it_is_not_certain(arrivals):
    assert skews(arrivals, host()) == ()


def test_a_rank_that_exited_does_not_stop_the_others_from_being_compared():
    arrivals = [*ALL, *(came(number, 9, 30.0) for number in range(3))]
    assert skews(arrivals, host(r3="exited"))[0].sequence == 9


def test_whom_the_others_wait_for():
    arrivals = [*ALL, *(came(number, 8, 20.0) for number in range(3))]
    (wait,) = waits(arrivals, [inside(0, 8, 3.0), inside(1, 8, 2.9), inside(2, 8, 2.8)], host())
    assert (wait.waiting, wait.missing, wait.held, wait.seconds, wait.sequence) == ((0, 1, 2), (3,), {}, 3.0, 8)


def test_a_held_rank_is_neither_waiting_nor_missing():
    (wait,) = waits(ALL, [inside(0, 7, 3.0), inside(1, 7, 3.5, fault="f12")], host())
    assert (wait.waiting, wait.missing, wait.held, wait.seconds) == ((0,), (), {1: "f12"}, 3.5)


def test_a_rank_that_died_inside_is_missing():
    (wait,) = waits(ALL, [inside(0, 7, 3.0), inside(3, 7, 4.0)], host(r3="exited"))
    assert (wait.waiting, wait.missing, wait.seconds) == ((0,), (3,), 3.0)


def test_the_longest_wait_is_first_and_point_to_point_is_left_out():
    found = waits([], [inside(0, 1, 1.0), inside(1, 5, 2.0, comm="2"), inside(2, 1, 9.0, op="send"), inside(3, 1, 9.0, pid=999)], host())
    assert [(wait.comm, wait.waiting, wait.missing) for wait in found] == [("2", (1,), ()), ("1", (0,), ())]


arrivals_of_all = st.lists(
    st.builds(came, st.integers(0, 3), st.integers(0, 5), st.floats(0, 100), op=st.sampled_from(["allreduce", "barrier"])), max_size=30
)


@given(arrivals_of_all, st.randoms())
def test_order_does_not_matter_and_the_first_is_never_late(arrivals, random):
    found = skews(arrivals, host())
    mixed = list(arrivals)
    random.shuffle(mixed)
    assert skews(mixed, host()) == found
    for skew in found:
        assert min(skew.lateness.values()) == 0.0
        assert skew.lateness.keys() == {arrival.pid - 100 for arrival in arrivals}
