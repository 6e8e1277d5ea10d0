"""Errors across the wire."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd import errors
from singularityd.api import failure
from singularityd.errors import Failed, NoSuchRank, SingularityError


def every(kind: type[SingularityError]) -> Iterator[type[SingularityError]]:
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield below
            yield from every(below)


@pytest.mark.parametrize("kind", list(every(SingularityError)), ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_it_was_raised(kind: type[SingularityError]) -> None:
    raised = kind("no rank 7: é, 中", hint="write --rank 3 · or 4")
    assert raised.status in grpc.StatusCode.__members__
    got = failure.received(raised.status, failure.details(raised), failure.trailing(raised))
    assert type(got) is kind
    assert (got.text, got.hint, got.exit_code) == (raised.text, raised.hint, raised.exit_code)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in every(SingularityError)]
    assert len(codes) == len(set(codes))


def test_a_status_that_is_not_ours_is_no_error_of_the_daemon() -> None:
    assert failure.received("UNAVAILABLE", "connect failed", ()) is None


@pytest.mark.parametrize(("sent", "exit_code"), [("9", 9), ("0", 1), ("-1", 1), ("999", 1), ("x", 1), ("", 1)])
def test_a_code_of_a_newer_daemon_keeps_its_exit_code(sent: str, exit_code: int) -> None:
    got = failure.received("FAILED_PRECONDITION", "why", [("singularity-code", "brand_new"), ("singularity-exit", sent)])
    assert isinstance(got, Failed)
    assert (got.code, got.exit_code, got.text) == ("brand_new", exit_code, "why")
    assert (Failed.code, Failed.exit_code) == ("failed", 1)


@given(st.text(st.characters(), max_size=20_000), st.text(st.characters(), max_size=20_000))
def test_any_text_fits_into_the_headers(text: str, hint: str) -> None:
    error = NoSuchRank(text, hint=hint)
    details = failure.details(error)
    assert len(quote(details, safe="")) <= 3 * 3072
    assert "\0" not in details
    total = len(quote(details, safe=failure._PLAIN)) + sum(len(key) + len(value) for key, value in failure.trailing(error))
    assert total < 6144
    details.encode()


def test_a_long_list_is_cut_and_says_so() -> None:
    details = failure.details(NoSuchRank("job " * 5000))
    assert details.startswith("job job")
    assert details.endswith(" ...")
