"""`singularityctl inject`: what it asks the daemon, what it says, how it ends."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from singularityd.api.v1 import node_pb2 as pb
from singularityd.ctl.inject import pairs
from singularityd.errors import Failed, NoSuchRank, SingularityError

from . import samples
from .fake import FakeClient, ask


def asked(client: FakeClient, name: str) -> dict[str, Any]:
    return next(words for what, words in client.asked if what == name)


PARTS = (["--rank", "3"], ["timeout"], ["point=allreduce"], ["--for", "5s"], ["--wait"])


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(PARTS))))[::7])
def test_options_and_arguments_in_any_order(order: tuple[int, ...]) -> None:
    words = [PARTS[place] for place in order]
    if words.index(["timeout"]) > words.index(["point=allreduce"]):
        words.remove(["timeout"])
        words.insert(words.index(["point=allreduce"]), ["timeout"])
    client = FakeClient()
    result = ask("inject", *itertools.chain(*words), client=client)
    assert result.exit_code == 0, result.output
    assert asked(client, "inject") == {
        "rank": 3,
        "job": "",
        "pattern": "timeout",
        "options": {"point": "allreduce"},
        "duration": "5s",
        "reason": "",
        "dry_run": False,
        "may_kill_job": False,
    }
    assert asked(client, "wait") == {"id": "f12", "timeout": samples.ARMED.duration_seconds + 15}


@pytest.mark.parametrize("text", ["1,3", "0-2", "all", "random:2"])
def test_several_ranks(text: str) -> None:
    client = FakeClient()
    result = ask("inject", "--rank", text, "--may-kill-job", "timeout", "ms=5", "--wait", client=client)
    assert result.exit_code == 0, result.output
    question = asked(client, "inject_many")
    assert (question["ranks"], question["options"], question["may_kill_job"]) == (text, {"ms": "5"}, True)
    assert [what for what, _ in client.asked].count("wait") == 2
    assert result.output.count("armed f12") == 2


def test_several_ranks_of_which_one_is_not_hit() -> None:
    result = ask("inject", "--rank", "all", "timeout", "--wait", client=FakeClient(wait=[samples.UNHIT, samples.ENDED]))
    assert result.exit_code == 5
    assert "2 hits" in result.output


def test_rank_0_is_a_rank() -> None:
    client = FakeClient()
    assert ask("inject", "--rank", "0", "timeout", client=client).exit_code == 0
    assert asked(client, "inject")["rank"] == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["timeout"], "--rank"),
        (["--rank", "3"], "PATTERN"),
        (["--rank", "three", "timeout"], "three"),
        (["--rank", "-1", "timeout"], "-1"),
        (["--rank", "99999999999999999999", "timeout"], "99999999999999999999"),
        (["--rank", "3", "timeout", "probability"], "'probability' is not KEY=VALUE"),
        (["--rank", "3", "timeout", "=25%"], "'=25%' is not KEY=VALUE"),
        (["--rank", "3", "timeout", "ms=1", "ms=2"], "ms is given twice"),
        (["--rank", "3", "timeout", "--wait", "--dry-run"], "--dry-run"),
        (["--rank", "3", "timeout", "--froo"], "--froo"),
    ],
)
def test_usage_errors_name_the_thing_and_the_remedy_and_ask_no_daemon(words: list[str], named: str) -> None:
    client = FakeClient()
    result = ask("inject", *words, client=client)
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.startswith("singularityctl: ")
    assert named in first
    assert second.startswith("hint: ")
    assert result.stdout == ""
    assert not client.asked


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1).filter(lambda key: "=" not in key), st.text(), max_size=5))
def test_pairs_of_whatever_text(options: dict[str, str]) -> None:
    assert pairs(f"{key}={text}" for key, text in options.items()) == options


def test_values_may_hold_an_equals_sign() -> None:
    assert pairs(["point=a=b"]) == {"point": "a=b"}


def test_says_what_was_armed_where_how_and_until_when() -> None:
    said = ask("inject", "--rank", "3", "timeout").stdout
    for word in ("f12", "timeout", "rank 3", samples.JOB, "pid 4203", "ptrace, signal SIGURG", "for 10 s (default)"):
        assert word in said
    assert "(default)" not in ask("inject", "--rank", "3", "timeout", "--for", "10s").stdout


def test_dry_run_is_told_as_such() -> None:
    client = FakeClient()
    result = ask("inject", "--rank", "3", "timeout", "--dry-run", client=client)
    assert asked(client, "inject")["dry_run"] is True
    assert result.stdout.startswith("would arm timeout on rank 3")
    assert "clear" not in result.output


def test_wait_without_a_hit_exits_5_also_in_json() -> None:
    for more in ([], ["-o", "json"]):
        result = ask("inject", "--rank", "3", "timeout", "--wait", *more, client=FakeClient(wait=samples.UNHIT))
        assert result.exit_code == 5
        assert "armed, 0 hits: no matching call (any) of rank 3 was seen" in result.stderr
        assert "hint: " in result.stderr
    assert json.loads(result.stdout)["hits"] == 0


def test_calls_that_were_seen_and_not_chosen_are_told_as_such() -> None:
    unlucky = pb.Fault()
    unlucky.CopyFrom(samples.UNHIT)
    unlucky.MergeFrom(pb.Fault(seen=40, probability_percent=0.5))
    result = ask("inject", "--rank", "3", "timeout", "probability=0.5%", "--wait", client=FakeClient(wait=unlucky))
    assert result.exit_code == 5
    assert "rank 3 made 40 matching calls (any 0.5%) while f12 was armed, and none was chosen" in result.stderr


def test_wait_in_json_prints_the_ended_fault_once() -> None:
    result = ask("inject", "--rank", "3", "timeout", "--wait", "-o", "json")
    assert json.loads(result.stdout)["state"] == "ended"


def test_refused_in_the_answer_is_a_failure() -> None:
    result = ask("inject", "--rank", "3", "timeout", client=FakeClient(inject=samples.REFUSED))
    assert result.exit_code == 1
    assert "gdb (pid 77)" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("failure", "code"),
    [(NoSuchRank("no rank 7 in job j", hint="there are 0-3"), 3), (Failed("the executor does not answer"), 1)],
)
def test_the_daemons_refusal_is_passed_on(failure: SingularityError, code: int) -> None:
    result = ask("inject", "--rank", "7", "timeout", client=FakeClient(inject=failure))
    assert result.exit_code == code
    assert result.stderr.splitlines()[0] == f"singularityctl: {failure.text}"
    assert ("hint: there are 0-3" in result.stderr) == bool(failure.hint)


def test_a_file_is_a_campaign(tmp_path: Path) -> None:
    path = tmp_path / "drill.toml"
    path.write_text('name = "x"')
    for words, name in ((["-f", str(path)], "start_campaign"), (["--file", str(path), "--dry-run"], "start_campaign")):
        client = FakeClient()
        result = ask("inject", *words, client=client)
        assert result.exit_code == 0, result.output
        assert any(what == name for what, _ in client.asked)
    for words in (["-f", str(path), "--rank", "3"], ["-f", str(path), "timeout"], ["--rank", "3"]):
        assert ask("inject", *words).exit_code == 2
