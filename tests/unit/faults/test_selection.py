import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.errors import BadOption, NoSuchRank, UsageError
from singularityd.faults.selection import choose

HERE = (4, 0, 1, 2, 7)


@pytest.mark.parametrize(
    ("text", "ranks"), [("7", [7]), ("7,0", [0, 7]), ("0-2", [0, 1, 2]), ("0-2,7", [0, 1, 2, 7]), ("all", [0, 1, 2, 4, 7]), ("1,1", [1])]
)
def test_selections(text, ranks):
    assert choose(text, HERE, seed=0) == ranks


@pytest.mark.parametrize("text", ["", "-1", "1,", ",1", "2-1", "random:", "random:x", "ALL", "1 2", "٣", "0-99999999", "1-2-3"])
def test_what_is_no_selection(text):
    with pytest.raises(BadOption) as caught:
        choose(text, HERE, seed=0)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["3", "0-4", "random:6", "random:0"])
def test_ranks_that_are_not_there(text):
    with pytest.raises(NoSuchRank):
        choose(text, HERE, seed=0)


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=50), st.integers(1, 60), st.integers(0, 2**63))
def test_a_draw_is_of_those_there_are_and_the_same_again(here, count, seed):
    if count > len(here):
        return
    drawn = choose(f"random:{count}", sorted(here), seed=seed)
    assert len(set(drawn)) == count
    assert set(drawn) <= here
    assert drawn == choose(f"random:{count}", sorted(here, reverse=True), seed=seed)


@given(st.text(max_size=40))
def test_any_text_is_answered_or_refused(text):
    with contextlib.suppress(UsageError, NoSuchRank):
        assert set(choose(text, HERE, seed=1)) <= set(HERE)
