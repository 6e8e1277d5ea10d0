"""The halves' protocol: any datagram is a message of its kind and size, or is refused; nothing else happens."""

from __future__ import annotations

import ctypes as c

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel import messages

BOTH = {**messages.FROM_FRONT, **messages.FROM_EXECUTOR}


@given(st.binary(max_size=messages.LARGEST))
def test_any_datagram_is_decoded_or_refused(data: bytes) -> None:
    try:
        message = messages.decode(data, BOTH)
    except messages.MessageError:
        return
    assert len(data) == c.sizeof(type(message))


@given(st.sampled_from(sorted(BOTH)), st.data())
def test_any_content_of_the_right_size_decodes_and_its_texts_read(kind: int, data: st.DataObject) -> None:
    size = c.sizeof(BOTH[kind])
    filler = data.draw(st.binary(min_size=1, max_size=64))
    raw = kind.to_bytes(4, "little") + (filler * size)[: size - 4]
    message = messages.decode(raw, BOTH)
    for name, field, *_ in message._fields_:
        if getattr(field, "_type_", None) is c.c_char:
            assert isinstance(message.text(name), str)
    assert bytes(message) == raw


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(messages.MessageError, match="unknown message kind"):
        messages.decode(bytes(messages.Done(request=1)), messages.FROM_FRONT)
    with pytest.raises(messages.MessageError, match="unknown message kind"):
        messages.decode(bytes(messages.Ping(request=1)), messages.FROM_EXECUTOR)


@given(st.text(), st.integers(0, 40))
def test_clip_never_splits_a_character_and_never_grows(text: str, limit: int) -> None:
    clipped = messages.clip(text, limit)
    assert len(clipped) <= limit
    assert b"\0" not in clipped
    clipped.decode("utf-8")


def test_every_kind_fits_into_one_datagram_and_has_a_number_of_its_own() -> None:
    assert len(messages.FROM_FRONT.keys() & messages.FROM_EXECUTOR.keys()) == 0
    assert all(c.sizeof(kind) <= messages.LARGEST for kind in BOTH.values())


def test_texts_survive_and_are_cut_at_the_field() -> None:
    message = messages.Refused(request=7, fault=9, code="rank_gone", words="é" * 1000, hint="")
    again = messages.decode(bytes(message), messages.FROM_EXECUTOR)
    assert isinstance(again, messages.Refused)
    assert (again.request, again.fault, again.text("code"), again.text("hint")) == (7, 9, "rank_gone", "")
    assert again.text("words") == "é" * 255
