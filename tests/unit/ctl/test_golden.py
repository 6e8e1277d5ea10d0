"""The frozen surfaces: every --help and every table."""

from __future__ import annotations

import pytest
from singularityd.api.v1 import node_pb2 as pb
from singularityd.ctl.main import COMMANDS

from . import samples
from .fake import FakeClient, ask, check_golden

NAMES = [command.name or "" for command in COMMANDS]


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("columns", ["40", "100", "300"])
def test_help_is_the_same_in_every_terminal(name: str, columns: str) -> None:
    result = ask(*[name] if name else [], "--help", env={"COLUMNS": columns})
    assert result.exit_code == 0
    check_golden(f"help-{name}" if name else "help", result.output)
    assert max(len(line) for line in result.output.splitlines()) <= 100


SICK = FakeClient(status=samples.SICK)
BARE = FakeClient(doctor=samples.BARE)
UNHIT = FakeClient(wait=samples.UNHIT)
INJECT = ["inject", "--rank", "3", "timeout"]


@pytest.mark.parametrize(
    ("name", "words", "client", "code"),
    [
        ("status", ["status"], FakeClient(), 0),
        ("status-sick", ["status"], SICK, 1),
        ("ranks", ["ranks"], FakeClient(), 0),
        ("top", ["top", "--once"], FakeClient(), 0),
        ("events", ["events"], FakeClient(), 0),
        ("inject", INJECT, FakeClient(), 0),
        ("inject-wait", [*INJECT, "--wait"], FakeClient(), 0),
        ("inject-wait-unhit", [*INJECT, "--wait"], UNHIT, 5),
        ("inject-dry-run", [*INJECT, "--dry-run", "--for", "5s"], FakeClient(), 0),
        ("faults", ["faults", "--history"], FakeClient(), 0),
        ("patterns", ["faults", "--patterns"], FakeClient(), 0),
        ("clear", ["clear", "all"], FakeClient(), 0),
        ("doctor", ["doctor"], FakeClient(), 0),
        ("doctor-bare", ["doctor"], BARE, 1),
    ],
)
def test_answers(name: str, words: list[str], client: FakeClient, code: int) -> None:
    result = ask(*words, client=client)
    assert result.exit_code == code, result.output
    check_golden(name, result.output)
    assert client.closed


@pytest.mark.parametrize("name", ["status", "ranks", "top", "events", "inject", "faults", "clear", "doctor"])
def test_json(name: str) -> None:
    words = {"top": ["top", "--once"], "inject": INJECT, "clear": ["clear", "f12"]}.get(name, [name])
    result = ask(*words, "-o", "json")
    assert result.exit_code == 0
    check_golden(f"{name}-json", result.stdout)


def test_tables_stay_within_100_columns_whatever_the_names_are() -> None:
    long = pb.ListRanksReply()
    long.CopyFrom(samples.RANKS)
    for rank in long.ranks:
        rank.job, rank.name = "j" * 300, "n" * 15
        rank.pid = 4_194_304
    listed = ask("ranks", client=FakeClient(ranks=long))
    fault = pb.Fault()
    fault.CopyFrom(samples.REFUSED)
    fault.job, fault.ending, fault.point = "j" * 300, "e" * 300, "reduce_scatter_tensor_coalesced"
    faulty = ask("faults", client=FakeClient(faults=pb.ListFaultsReply(faults=[fault])))
    top = pb.TopReply()
    top.CopyFrom(samples.TOP_AFTER)
    top.rows[0].job = "k" * 300
    busy = ask("top", "--once", client=FakeClient(top=[samples.TOP_BEFORE, top]))
    for result in (listed, faulty, busy):
        assert result.exit_code == 0
        assert max(len(line) for line in result.stdout.splitlines()) <= 100
