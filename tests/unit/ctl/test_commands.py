"""Options, failures and the commands that read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from singularityd.api.v1 import node_pb2 as pb
from singularityd.ctl.main import COMMANDS
from singularityd.ctl.top import compare
from singularityd.errors import BadOption, ResumeLost, SingularityError

from . import samples
from .fake import FakeClient, ask


class Gone(SingularityError):
    exit_code = 4


NEED = {"drill": ["list"], "inject": ["--rank", "3", "timeout"], "clear": ["f12"], "top": ["--once"]}
NAMES = [command.name or "" for command in COMMANDS if command.name != "audit"]  # which asks no daemon: test_audit.py


@pytest.mark.parametrize("name", NAMES)
def test_global_options_stand_before_or_after_every_command(name: str) -> None:
    options = ["--socket", "/tmp/x.sock", "--timeout", "3", "-o", "json"]
    words = [name, *NEED.get(name, [])]
    before, after = FakeClient(), FakeClient()
    first = ask(*options, *words, client=before)
    second = ask(*words, *options, client=after)
    assert first.stdout == second.stdout != ""
    for line in first.stdout.splitlines() if name == "events" else [first.stdout]:
        json.loads(line)
    for client in (before, after):
        assert client.asked[0] == ("connect", {"socket": "/tmp/x.sock", "timeout": 3.0})


def test_the_later_of_two_options_wins() -> None:
    client = FakeClient()
    ask("--timeout", "3", "ranks", "--timeout", "4", client=client)
    assert client.asked[0][1]["timeout"] == 4


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "soon", ""])
def test_a_timeout_is_a_positive_finite_number(text: str) -> None:
    result = ask("ranks", f"--timeout={text}")
    assert result.exit_code == 2
    assert "--timeout" in result.stderr


@pytest.mark.parametrize("name", [name for name in NAMES if name != "version"])
def test_an_unreachable_daemon_is_exit_4_everywhere(name: str) -> None:
    gone = Gone("no daemon answers on /run/x", hint="systemctl start singularityd")
    call = {"events": "follow", "drill": "campaigns"}.get(name, name)
    client = FakeClient(**{call: [gone] if name == "events" else gone})
    result = ask(name, *NEED.get(name, []), client=client)
    assert result.exit_code == 4
    assert result.stderr == "singularityctl: no daemon answers on /run/x\nhint: systemctl start singularityd\n"
    assert result.stdout == ""


def test_version_needs_no_daemon() -> None:
    client = FakeClient(version=Gone("no daemon answers"))
    result = ask("version", client=client)
    assert result.exit_code == 0
    assert "daemon  does not answer" in result.stdout
    told = ask("version", "-o", "json", client=client)
    assert json.loads(told.stdout)["daemon"] is None
    assert json.loads(ask("version", "-o", "json").stdout)["daemon"]["version"] == samples.VERSION.version


@pytest.mark.parametrize("failure", [RuntimeError("so\x1b[31m it\nbroke"), ValueError()])
def test_a_defect_is_one_line_and_a_hint_never_a_traceback(failure: Exception) -> None:
    result = ask("ranks", client=FakeClient(ranks=failure))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 2
    assert type(failure).__name__ in result.stderr
    assert "\x1b" not in result.stderr
    shown = ask("ranks", client=FakeClient(ranks=failure), env={"SINGULARITYD_DEBUG": "1"})
    assert "Traceback" in shown.stderr


def test_an_interrupt_is_quiet() -> None:
    result = ask("ranks", client=FakeClient(ranks=KeyboardInterrupt()))
    assert result.exit_code == 130
    assert result.output == ""


def test_no_command_is_a_usage_error_with_the_help() -> None:
    result = ask()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr
    assert ask("--version").stdout.startswith("singularityctl ")


def test_an_unknown_command_is_named() -> None:
    result = ask("rank")
    assert result.exit_code == 2
    assert "rank" in result.stderr.splitlines()[0]


def test_unknown_is_null_and_never_0() -> None:
    rows = json.loads(ask("ranks", "-o", "json").stdout)["ranks"]
    stray = next(row for row in rows if row["pid"] == 977)
    assert (stray["rank"], stray["world"], stray["local_rank"], stray["pid_inside"]) == (None, None, None, 12)
    assert next(row for row in rows if row["pid"] == 4200)["rank"] == 0
    stray_line = next(line for line in ask("ranks").stdout.splitlines() if "977" in line)
    assert stray_line.split()[1] == "?"


def test_a_name_cannot_steer_the_terminal() -> None:
    evil = pb.ListRanksReply(ranks=[pb.Rank(job="a\x1b[2Jb\nc", pid=5)])
    said = ask("ranks", client=FakeClient(ranks=evil)).stdout
    assert "\x1b" not in said
    assert len(said.splitlines()) == 2


def test_a_state_of_a_newer_daemon_is_unknown() -> None:
    newer = pb.Rank(job="j", pid=5)
    newer.state = 77  # type: ignore[assignment]
    assert (
        json.loads(ask("ranks", "-o", "json", client=FakeClient(ranks=pb.ListRanksReply(ranks=[newer]))).stdout)["ranks"][0]["state"]
        == "unknown"
    )


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["ranks"], {"ranks": pb.ListRanksReply()}),
        (["faults"], {"faults": pb.ListFaultsReply()}),
        (["clear", "all"], {"clear": pb.ListFaultsReply()}),
        (["top", "--once"], {"top": pb.TopReply(at=1)}),
    ],
)
def test_nothing_is_said_on_stderr_and_is_no_failure(words: list[str], answers: dict[str, Any]) -> None:
    result = ask(*words, client=FakeClient(**answers))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("no ")


def test_doctor_judges_only_what_is_needed() -> None:
    for name, value, code in (
        ("uprobe", pb.CAPABILITY_STATE_NO, 1),
        ("uprobe", pb.CAPABILITY_STATE_UNKNOWN, 0),
        ("kprobe", pb.CAPABILITY_STATE_NO, 0),
    ):
        reply = pb.CheckReply(complete=True, capabilities=[pb.Capability(name=name, state=value, detail="d", remedy="r")])
        result = ask("doctor", client=FakeClient(doctor=reply))
        assert result.exit_code == code
        assert name in result.stdout
        assert "remedy: r" in result.stdout


def test_status_says_armed_without_hits_and_exits_1_when_sick() -> None:
    assert "armed, 0 hits" in ask("status").stdout
    assert ask("status", "-o", "json", client=FakeClient(status=samples.SICK)).exit_code == 1


def follow_words(*words: str) -> dict[str, Any]:
    client = FakeClient()
    ask("events", *words, client=client)
    return next(asked for name, asked in client.asked if name == "follow")


def test_events_ask_for_what_is_recorded_or_for_what_comes() -> None:
    assert follow_words() == {"token": "", "kinds": (), "from_start": True, "no_follow": True}
    assert follow_words("--follow") == {"token": "", "kinds": (), "from_start": False, "no_follow": False}
    assert follow_words("--since", "b:4", "--kind", "a", "--kind", "b") == {
        "token": "b:4",
        "kinds": ("a", "b"),
        "from_start": False,
        "no_follow": True,
    }


@pytest.mark.parametrize(("ending", "code"), [(KeyboardInterrupt(), 130), (ResumeLost("cut off"), 1), (Gone("gone"), 4)])
def test_the_resume_token_is_told_however_the_stream_ends(ending: BaseException, code: int) -> None:
    result = ask("events", "--follow", client=FakeClient(follow=[*samples.EVENTS, ending]))
    assert result.exit_code == code
    assert "--since b7:42" in result.stderr
    assert "--since" not in result.stdout


@pytest.mark.parametrize("refusal", [ResumeLost("of an earlier start"), BadOption("no token")])
def test_a_token_that_was_refused_is_not_recommended(refusal: SingularityError) -> None:
    assert "--since" not in ask("events", "--since", "b7:9", client=FakeClient(follow=[refusal])).stderr


def test_without_a_new_event_the_old_token_stays_good() -> None:
    assert "--since b7:9" in ask("events", "--since", "b7:9", client=FakeClient(follow=[])).stderr


def top_reply(at: float, calls: int, size: int, buckets: list[int]) -> pb.TopReply:
    return pb.TopReply(
        at=at, rows=[pb.TopRow(job="j", rank=0, pid=1, backend="gloo", op="allreduce", comm="0", calls=calls, bytes=size, buckets=buckets)]
    )


def test_top_takes_rates_and_percentiles_from_the_interval() -> None:
    (line,) = compare(top_reply(10, 100, 1000, [0, 100, 0, 0, 0]), top_reply(12, 150, 3000, [0, 100, 0, 50, 0]))
    assert (line.calls_per_second, line.bytes_per_second, line.over) == (25, 1000, "interval")
    assert line.p50 == pytest.approx(6e-6)


def test_top_falls_back_to_all_calls_where_none_ended() -> None:
    reading = top_reply(10, 100, 1000, [0, 100, 0, 0, 0])
    (line,) = compare(reading, top_reply(11, 100, 1000, [0, 100, 0, 0, 0]))
    assert (line.calls_per_second, line.over) == (0, "all")
    assert line.p50 is not None


def test_top_counters_begun_anew_never_give_negative_rates() -> None:
    (line,) = compare(top_reply(10, 100, 1000, [0, 100, 0]), top_reply(11, 4, 40, [0, 4, 0]))
    assert (line.calls_per_second, line.bytes_per_second) == (4, 40)


def test_two_readings_at_one_instant_divide_by_nothing() -> None:
    (line,) = compare(top_reply(10, 1, 1, [1, 0]), top_reply(10, 2, 2, [2, 0]))
    assert line.calls_per_second == 0


def test_top_of_several_jobs_names_each() -> None:
    after = pb.TopReply()
    after.CopyFrom(samples.TOP_AFTER)
    after.rows[0].job = "other"
    said = ask("top", "--once", client=FakeClient(top=[samples.TOP_BEFORE, after])).stdout
    assert f"job {samples.JOB}" in said
    assert "job other" in said


def test_top_waits_the_interval_between_readings() -> None:
    slept: list[float] = []
    ask("top", "--once", "--interval", "2.5", sleep=slept.append)
    assert slept == [2.5]
