"""Every wait status of a traced thread has one meaning."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel.ptrace import calls
from singularityd.kernel.ptrace.stops import Kind, classify

STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def stopped(number: int, event: int = 0) -> int:
    return event << 16 | number << 8 | 0x7F


@given(st.integers(1, 64))
def test_a_plain_stop_is_a_signal_to_be_delivered(number: int) -> None:
    assert classify(stopped(number)) == (Kind.SIGNAL, number)


@given(st.sampled_from(STOPPING))
def test_an_event_stop_with_a_stopping_signal_is_a_group_stop(number: int) -> None:
    assert classify(stopped(number, calls.EVENT_STOP)) == (Kind.GROUP_STOP, number)


def test_events() -> None:
    assert classify(stopped(signal.SIGTRAP, calls.EVENT_STOP)).kind is Kind.NEW
    assert classify(stopped(signal.SIGTRAP, calls.EVENT_CLONE)).kind is Kind.CLONE
    assert classify(stopped(signal.SIGTRAP, calls.EVENT_EXEC)).kind is Kind.EXEC


@given(st.integers(0, 255), st.booleans())
def test_an_end_is_an_end_whatever_its_code(code: int, killed: bool) -> None:
    assert classify(signal.SIGKILL if killed else code << 8).kind is Kind.ENDED
