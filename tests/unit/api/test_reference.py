"""docs/api.md says every service, call, code and limit there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from singularityd.api import limits
from singularityd.api.servicers import agent
from singularityd.api.v1 import node_pb2
from singularityd.errors import SingularityError

from .test_failure import every

TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()


def test_every_call_is_described() -> None:
    for service in node_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert re.search(rf"`{service.name}\.{method.name}`", TEXT) or (service.name == "Faults" and f"`{method.name}`" in TEXT), (
                f"{service.name}.{method.name}"
            )


def test_every_code_stands_beside_its_status() -> None:
    table = dict(re.findall(r"^\| ([A-Z_]+) \| (.*) \|$", TEXT, re.MULTILINE))
    starting = {"config", "not_permitted", "already_running", "address_in_use"}  # of the daemon's start, never of a call
    for kind in every(SingularityError):
        if kind.code not in starting:
            assert f"`{kind.code}`" in table[kind.status], kind.code


@pytest.mark.parametrize(
    ("name", "control", "agents"),
    [
        ("a request, bytes", limits.Limits().largest_request, limits.AGENT.largest_request),
        ("an answer, bytes", limits.Limits().largest_answer, limits.AGENT.largest_answer),
        (
            "calls a second (at once)",
            f"{limits.Limits().rate:g} ({limits.Limits().burst})",
            f"{limits.AGENT.rate:g} ({limits.AGENT.burst})",
        ),
        ("calls of one connection at a time", limits.Limits().streams_per_connection, limits.AGENT.streams_per_connection),
        ("calls at a time", limits.Limits().calls, limits.AGENT.calls),
        ("event streams at a time", limits.Limits().streams, f"{limits.AGENT.streams}, {agent.WATCHES} of one process"),
        ("health watches at a time", limits.Limits().health_streams, limits.AGENT.health_streams),
        ("a unary call, seconds", f"{limits.Limits().patience:g}", f"{limits.AGENT.patience:g}"),
        ("a new connection, until it speaks HTTP/2, seconds", f"{limits.Limits().handshake:g}", f"{limits.AGENT.handshake:g}"),
    ],
)
def test_limits_are_those_of_the_code(name: str, control: object, agents: object) -> None:
    assert f"| {name} | {control} | {agents} |" in TEXT


def test_the_longest_wait_is_that_of_the_code() -> None:
    assert f"never more than {limits.Limits().longest_wait:g} seconds" in TEXT


def test_the_agents_bounds_are_those_of_the_code() -> None:
    assert f"at most {agent.LONGEST_TEXT}\n  characters, at most {agent.MOST_FIELDS} fields of {agent.LONGEST_VALUE}" in TEXT
    each = f"{agent.REPORT_RATE:g} reports a second ({agent.REPORT_BURST} at once) for each process"
    assert f"{each}, {agent.TOTAL_RATE:g} ({agent.TOTAL_BURST}) for all of them" in TEXT
