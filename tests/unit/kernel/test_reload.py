"""SIGHUP, without a daemon: every order in which the child's answer, fronts that end and fronts that come up can fall."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel import messages, notify, reload
from singularityd.kernel.reload import FRONT_SETTINGS, Reader, Reload, parse


class Executor:
    """The loop's side, by hand."""

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[], None]] = {}
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.sent: list[messages.Message] = []
        self.lines: list[tuple[str, str]] = []
        self.slim: dict[str, Any] = {"a": 1}
        self.fronts = 1
        self.ended: list[str] = []

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self.watched[descriptor] = callback

    def forget(self, descriptor: int) -> None:
        self.watched.pop(descriptor, None)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((seconds, callback))

    def send(self, message: messages.Message) -> None:
        self.sent.append(message)

    def log(self, level: str, text: str) -> None:
        self.lines.append((level, text))

    def adopt(self, slim: dict[str, Any]) -> None:
        self.slim = slim

    def restart_front(self) -> bool:
        self.ended.append("in good order")
        return self.fronts > 0

    def replace_front(self, why: str) -> None:
        self.ended.append(why)

    def late(self) -> None:
        timers, self.timers = self.timers, []
        for _, callback in timers:
            callback()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heard: list[str] = []
    monkeypatch.setattr(notify, "send", heard.append)
    monkeypatch.setenv(FRONT_SETTINGS, "old")
    return heard


def made(executor: Executor) -> tuple[Reload, list[None]]:
    """A reload whose child is not started; `starts` counts those that would have been."""
    starts: list[None] = []
    it = Reload("/bin/false", executor, executor.slim)
    it._reader.start = lambda: starts.append(None)  # type: ignore[method-assign]
    return it, starts


def answer(*changed: str, restart: tuple[str, ...] = (), error: str = "", level: str = "debug") -> reload.Answer:
    return reload.Answer(error, list(changed), list(restart), {"a": 2}, json.dumps({"log": {"level": level}}))


def ask(it: Reload, got: reload.Answer) -> None:
    it.ask()
    it.turn()
    it._on_answer(got)


def test_new_settings_are_in_force_when_the_new_front_serves(told: list[str]) -> None:
    executor = Executor()
    it, starts = made(executor)
    ask(it, answer("metrics.port", restart=("kernel.headers",)))
    assert (len(starts), executor.slim, executor.ended) == (1, {"a": 2}, ["in good order"])
    assert told[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
    it.front_ready()  # the old one's, late
    assert len(told) == 1
    it.front_lost()
    it.front_ready()
    assert told[1] == "READY=1\nSTATUS=watching; the settings were reloaded: metrics.port; kernel.headers changed too and need a restart"
    assert (it.busy, executor.slim) == (False, {"a": 2})
    assert os.environ[FRONT_SETTINGS] != "old"
    executor.late()
    assert executor.ended == ["in good order"]


def test_a_front_that_dies_with_them_gets_the_old_ones_back(told: list[str]) -> None:
    executor = Executor()
    it, _ = made(executor)
    ask(it, answer("metrics.port"))
    it.front_lost()
    it.front_lost()
    assert (executor.slim, os.environ[FRONT_SETTINGS], it.busy) == ({"a": 1}, "old", False)
    assert told[-1].startswith("READY=1\nSTATUS=watching; the settings were not reloaded")
    it.front_lost()  # another time, by itself: nothing to take back
    assert len(told) == 2
    ask(it, answer("metrics.port"))
    assert executor.slim == {"a": 2}


def test_a_front_that_hangs_with_them_is_ended_and_gets_the_old_ones_back(told: list[str]) -> None:
    executor = Executor()
    it, _ = made(executor)
    ask(it, answer("metrics.port"))
    it.front_lost()
    executor.late()
    assert "did not serve within 25 s" in executor.ended[-1]
    it.front_lost()
    assert (executor.slim, it.busy) == ({"a": 1}, False)


def test_where_no_front_runs_the_next_one_is_the_proof(told: list[str]) -> None:
    executor = Executor()
    executor.fronts = 0
    it, _ = made(executor)
    ask(it, answer("metrics.port"))
    it.front_ready()
    assert "were reloaded" in told[-1]


def test_what_needs_no_new_front(told: list[str]) -> None:
    executor = Executor()
    it, _ = made(executor)
    ask(it, answer("log.level", "kernel.linger"))
    (message,) = executor.sent
    assert isinstance(message, messages.LogLevel)
    assert (int(message.level), executor.ended, executor.slim) == (10, [], {"a": 2})
    ask(it, answer(restart=("daemon.nice",)))
    assert "none that a reload changes is other than before; daemon.nice changed too" in told[-1]


def test_every_problem_is_a_line_of_the_log(told: list[str]) -> None:
    executor = Executor()
    it, _ = made(executor)
    ask(it, answer(error="the settings have 2 problems:\n  a\n  b"))
    assert [text for _, text in executor.lines][:3] == ["the settings have 2 problems:", "a", "b"]
    assert {level for level, _ in executor.lines} == {"error"}
    assert "\n" not in told[-1].partition("STATUS=")[2]
    assert executor.slim == {"a": 1}


def test_requests_while_one_is_carried_out_become_one_more(told: list[str]) -> None:
    executor = Executor()
    it, starts = made(executor)
    ask(it, answer("metrics.port"))
    for _ in range(5):
        it.ask()
        it.turn()
    assert len(starts) == 1
    it.front_lost()
    it.front_ready()
    for _ in range(5):
        it.turn()
    assert len(starts) == 2


STEPS = st.lists(st.sampled_from(["ask", "turn", "wrong", "good", "lost", "ready", "late"]), max_size=40)


@given(STEPS)
def test_whatever_happens_the_settings_in_force_are_those_of_the_front(steps: list[str]) -> None:
    os.environ[FRONT_SETTINGS] = "old"
    executor = Executor()
    it, starts = made(executor)
    answered = 0
    for number, step in enumerate(steps):
        if step in ("wrong", "good"):
            if len(starts) == answered:
                continue
            answered += 1
            slim = {"a": number + 2}
            got = answer(error="no") if step == "wrong" else answer("metrics.port")._replace(slim=slim, front=json.dumps(slim))
            it._on_answer(got)
        else:
            {"ask": it.ask, "turn": it.turn, "lost": it.front_lost, "ready": it.front_ready, "late": executor.late}[step]()
        front = os.environ[FRONT_SETTINGS]
        assert executor.slim == ({"a": 1} if front == "old" else json.loads(front))
    it.front_lost()
    it.front_lost()
    it.front_ready()
    assert not it.busy


# --- the child ----------------------------------------------------------------------------------------------------------------


def run(reader: Reader, executor: Executor, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while reader.busy and time.monotonic() < end:
        for descriptor in select.select(list(executor.watched), [], [], 0.1)[0]:
            executor.watched[descriptor]()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print('{}')", "nonsense"),
        ("print('x' * 3000000)", "ended with code -9"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
        ("import os, time; os.close(1); time.sleep(60)", "ended with code -9"),
    ],
)
def test_a_child_that_says_what_is_no_answer(code: str, expected: str) -> None:
    executor, got = Executor(), []
    reader = Reader(sys.executable, executor, got.append)
    reader._command = [sys.executable, "-c", code]
    reader.start()
    run(reader, executor)
    assert expected in got[0].error
    assert (len(got), executor.watched) == (1, {})


def test_a_child_that_hangs_is_ended_and_one_that_cannot_start_is_told() -> None:
    executor, got = Executor(), []
    reader = Reader(sys.executable, executor, got.append)
    reader._command = [sys.executable, "-c", "import time; time.sleep(60)"]
    reader.start()
    executor.late()
    assert "longer than 20 s" in got[0].error
    reader._command = ["/nowhere/python"]
    reader.start()
    assert "cannot be started" in got[1].error
    assert not reader.busy


@given(st.binary(max_size=200) | st.from_regex(rb'\{"error": .*\}'))
def test_nothing_that_is_said_breaks_the_executor(said: bytes) -> None:
    assert parse(said, 0).error


def test_the_real_child_reads_as_the_start_did(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec
    from singularityd.config import Settings
    from singularityd.config_changes import Flags

    file = tmp_path / "config.toml"
    flags = Flags(str(file), ("log.level=warning", "metrics.port=0"))
    file.write_text("")
    monkeypatch.setenv(FRONT_SETTINGS, msgspec.json.encode(flags.load()).decode())
    for name, value in flags.to_environment().items():
        monkeypatch.setenv(name, value)

    def answered() -> reload.Answer:
        executor, got = Executor(), []
        reader = Reader(sys.executable, executor, got.append)
        reader.start()
        run(reader, executor)
        return got[0]

    assert answered()[:3] == ("", [], [])
    file.write_text('[log]\nlevel = "debug"\n[metrics]\nport = 9\nseries = 5\n[faults]\nmode = "off"\n[kernel]\nguard = false\nlinger = 3')
    good = answered()
    assert good.error == ""
    assert sorted(good.changed) == ["faults.mode", "kernel.linger", "metrics.series"]
    assert good.restart == ["kernel.guard"]
    assert (good.slim["faults_enabled"], good.slim["linger"], good.slim["guard_limit"]) == (False, 3.0, 20_000)
    front = msgspec.json.decode(good.front, type=Settings)
    assert (front.metrics.series, front.metrics.port, front.kernel.guard) == (5, 0, True)
    file.write_text("log.levle = 1\nmetrics.series = 0")
    bad = answered()
    assert "levle" in bad.error
    assert "metrics.series" in bad.error
