import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.observe.labels import Labels, safe

# environment variables come as UTF-8 with surrogates for what is none
anything = st.text(st.characters(codec=None), max_size=200)


@given(anything, st.integers(16, 64))
def test_safe_labels_are_short_printable_and_stable(value, limit):
    label = safe(value, limit)
    assert 1 <= len(label) <= limit
    label.encode()
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp", "Cf") for character in label)
    assert safe(value, limit) == label == Labels(limit)(value)


@given(st.sets(anything.filter(bool), max_size=8))
def test_different_values_stay_different(values):
    assert len({safe(value, 16) for value in values}) == len(values) or any("~" in value for value in values)


@pytest.mark.parametrize("value", ["job-1", "größe", "torchrun:host:29500", 'say "hi"', "a\\b"])
def test_harmless_values_are_left_alone(value):
    assert safe(value, 128) == value


def test_long_values_end_in_a_hash():
    one, two = safe("a" * 10_000, 128), safe("a" * 10_001, 128)
    assert len(one) == len(two) == 128
    assert one != two
    assert one.startswith("a" * 119 + "~")


def test_unknown_is_never_zero():
    assert Labels(64).rank(None) == "unknown"
    assert Labels(64).rank(0) == "0"
    assert safe("", 64) == "unknown"
