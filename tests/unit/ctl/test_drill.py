"""`singularityctl drill`: what it asks, says and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import samples
from .fake import FakeClient, ask, check_golden


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = tmp_path / "drill.toml"
    made.write_text('name = "nightly"\n')
    return str(made)


@pytest.mark.parametrize(("name", "words"), [("drill-plan", ["plan"]), ("drill-run", ["run"]), ("drill-run-wait", ["run", "--wait"])])
def test_a_file_is_sent_whole_and_the_answer_is_a_table(name: str, words: list[str], path: str) -> None:
    client = FakeClient()
    result = ask("drill", *words, path, client=client)
    assert result.exit_code == 0, result.output
    asked = [said for what, said in client.asked if what == "start_campaign"]
    assert asked == [{"toml": 'name = "nightly"\n', "dry_run": words == ["plan"]}]
    check_golden(name, result.output)


@pytest.mark.parametrize(
    ("name", "words"),
    [("drill-list", ["list"]), ("drill-stop", ["stop", "c3"]), ("drill-list-json", ["list", "-o", "json"])],
)
def test_answers(name: str, words: list[str]) -> None:
    result = ask("drill", *words)
    assert result.exit_code == 0, result.output
    check_golden(name, result.output)


@pytest.mark.parametrize("command", ["run", "plan", "stop", "list", "report", "record"])
def test_help(command: str) -> None:
    check_golden(f"help-drill-{command}", ask("drill", command, "--help").output)


def test_report_and_record_are_printed_as_they_are() -> None:
    assert ask("drill", "report", "c3").stdout == "# Drill c3\n"
    assert ask("drill", "report", "c3", "-o", "json").stdout == "{}\n"
    client = FakeClient()
    assert ask("drill", "record", "--since", "60", client=client).stdout == 'name = "again"\n'
    assert ("record_campaign", {"campaign": "", "since": samples.NOW - 60}) in client.asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["record"], "--campaign"),
        (["record", "--campaign", "c3", "--since", "5"], "--campaign"),
        (["run", "/nonexistent/drill.toml"], "cannot be read"),
        (["plan", "/dev/zero"], "more than"),
    ],
)
def test_wrong_words_are_usage_errors_and_nothing_is_asked(words: list[str], said: str) -> None:
    client = FakeClient()
    result = ask("drill", *words, client=client)
    assert result.exit_code == 2
    assert said in result.output
    assert client.asked == []


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    assert ask("drill", "run", str(tmp_path / "bad")).exit_code == 2
