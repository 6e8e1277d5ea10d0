import contextlib
import functools
import io
import json
import logging
import os
import re
import socket
import struct
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from singularityd.errors import ConfigError
from singularityd.observe import journal
from singularityd.observe.health import Health
from singularityd.observe.log import ChangeLogger, RateLimit, setup
from singularityd.observe.settings import LogSettings
from singularityd.observe.vitals import usage


@pytest.fixture
def make(monkeypatch):
    """A configured log and a function that gives its lines."""
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def make(stream=None, **settings):
        stream = stream or io.StringIO()
        control = setup(LogSettings(**settings), stream)
        return control, lambda: stream.getvalue().splitlines()

    yield make
    structlog.reset_defaults()
    root.handlers[:], root.level = before, level


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_json_when_not_on_a_terminal_with_stable_order(make):
    _, lines = make()
    structlog.get_logger("link").info("rank_found", zebra=1, alpha="two\nlines", pid=3)
    (line,) = lines()
    assert list(json.loads(line)) == ["time", "level", "event", "logger", "alpha", "pid", "zebra"]
    assert json.loads(line)["alpha"] == "two\nlines"


def test_console_on_a_terminal(make):
    _, lines = make(Terminal())
    structlog.get_logger().info("rank_found\nforged", name="\udcff\x1b[31m")
    (line,) = lines()
    assert "rank_found" in line
    with pytest.raises(ValueError):
        json.loads(line)


@pytest.fixture
def journal_stream(tmp_path, monkeypatch):
    """A file that stands for the stream that systemd hands to a service."""
    with (tmp_path / "stream").open("w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        yield stream


def written(stream):
    stream.flush()
    return Path(stream.name).read_text().splitlines()


def journald_at(place, monkeypatch):
    there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    there.bind(str(place))
    there.settimeout(5)
    monkeypatch.setattr(journal, "Journal", functools.partial(journal.Journal, str(place)))
    return there


def parsed(data):
    """The journal's native form, read as journald does."""
    found, at = {}, 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, mark, value = data[at:end].partition(b"=")
        at = end + 1
        if not mark:
            (size,) = struct.unpack_from("<Q", data, at)
            value = data[at + 8 : at + 8 + size]
            assert data[at + 8 + size : at + 9 + size] == b"\n"
            at += 9 + size
        assert re.fullmatch(rb"[A-Z][A-Z0-9_]{0,63}", name)
        found[name.decode()] = value.decode()
    return found


def test_a_priority_in_front_where_the_journal_takes_no_fields(make, journal_stream, monkeypatch):
    monkeypatch.setattr(journal, "Journal", functools.partial(journal.Journal, "/nowhere/socket"))
    make(journal_stream)
    structlog.get_logger().warning("x")
    assert written(journal_stream)[0].startswith('<4>{"time":')


def test_fields_for_the_journal(make, journal_stream, tmp_path, monkeypatch):
    there = journald_at(tmp_path / "journal", monkeypatch)
    make(journal_stream)
    structlog.get_logger("watch").error("fault_held", fault="f3", **{"odd name": "ü\nMESSAGE=forged", "event_id": 7})
    got = parsed(there.recv(65536))
    assert got == {
        "MESSAGE": "fault_held event_id=7 fault=f3 odd name=ü\nMESSAGE=forged",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "singularityd",
        "SINGULARITY_EVENT": "fault_held",
        "SINGULARITY_LOGGER": "watch",
        "SINGULARITY_FAULT": "f3",
        "SINGULARITY_EVENT_ID": "7",
        "SINGULARITY_ODD_NAME": "ü\nMESSAGE=forged",
    }
    assert written(journal_stream) == []
    structlog.get_logger().info("large", text="x" * 3_000_000)  # more than a datagram holds: the stream has it
    assert written(journal_stream)[0].startswith('<6>{"time":')


def test_whoever_inherited_the_variable_is_not_under_the_journal(make, tmp_path, journal_stream, monkeypatch):
    there = journald_at(tmp_path / "journal", monkeypatch)
    _, lines = make()
    structlog.get_logger().warning("x")
    assert lines()[0].startswith('{"time":')
    there.settimeout(0.05)
    with pytest.raises(TimeoutError):
        there.recv(10)


def test_format_json_is_json_under_the_journal_too(make, journal_stream, tmp_path, monkeypatch):
    journald_at(tmp_path / "journal", monkeypatch)
    make(journal_stream, format="json")
    structlog.get_logger().warning("x")
    assert written(journal_stream)[0].startswith('<4>{"time":')


@given(st.dictionaries(st.text(min_size=1, max_size=80), st.text(), max_size=5), st.text())
def test_whatever_is_logged_is_well_formed_for_the_journal(fields, event):
    got = parsed(journal.datagram(journal.fields("info", {**fields, "event": event})))
    assert got["PRIORITY"] == "6"
    assert got["SINGULARITY_EVENT"] == event.encode("utf-8", "backslashreplace").decode()


def test_level_at_run_time(make):
    control, lines = make(level="warning")
    logger = structlog.get_logger()
    logger.info("no")
    control.set_level("debug")
    logger.debug("yes")
    assert [json.loads(line)["event"] for line in lines()] == ["yes"]
    with pytest.raises(ValueError, match="verbose"):
        control.set_level("verbose")


def test_traceback_only_for_what_is_not_ours(make):
    control, lines = make(burst=100)
    logger = structlog.get_logger()
    ours = ConfigError("bad port", hint="set it")

    def log(error):
        try:
            raise error
        except Exception as caught:
            logger.error("failed", error=caught)
        return json.loads(lines()[-1])

    said = log(ours)
    assert (said["error"], said["code"], said["hint"]) == ("bad port", "config", "set it")
    assert "traceback" not in said
    assert "ValueError: odd" in log(ValueError("odd"))["traceback"]
    control.set_level("debug")
    assert "traceback" in log(ours)
    try:
        raise ours
    except ConfigError:
        logger.exception("failed")
    assert json.loads(lines()[-1])["code"] == "config"


def test_rate_limit_counts_what_it_suppresses():
    now = [0.0]
    limit = RateLimit(2, 60, lambda: now[0])
    passed = []

    def log(event):
        with contextlib.suppress(structlog.DropEvent):
            passed.append(limit(None, "info", {"event": event}))

    for _ in range(5):
        log("a")
    log("b")
    now[0] = 60
    log("a")
    log("a")
    assert passed == [{"event": "a"}, {"event": "a"}, {"event": "b"}, {"event": "a", "suppressed": 3}, {"event": "a"}]


def test_rate_limit_forgets_old_keys():
    limit = RateLimit(1, 60)
    for number in range(5000):
        limit(None, "info", {"event": f"e{number}"})
    assert len(limit._windows) <= 1024


def test_standard_library_loggers_come_through(make):
    _, lines = make()
    logging.getLogger("asyncio").warning("slow callback %d", 7)
    logging.getLogger("asyncio").info("chatter")
    (line,) = lines()
    assert json.loads(line)["event"] == "asyncio"
    assert json.loads(line)["message"] == "slow callback 7"


def test_change_logger():
    with structlog.testing.capture_logs() as logs:
        changes = ChangeLogger(structlog.get_logger())
        for value in (1, 1, 2, 2, 1):
            changes.say("disk", value, "disk_state", level="warning", free=value)
        changes.say("other", 1, "other_state")
        changes.forget("disk")
        changes.say("disk", 1, "disk_state")
    assert [(log["event"], log.get("free")) for log in logs] == [
        ("disk_state", 1),
        ("disk_state", 2),
        ("disk_state", 1),
        ("other_state", None),
        ("disk_state", None),
    ]


def test_health_needs_every_part_and_notices_silence():
    now = [0.0]
    health = Health(lambda: now[0])
    health.expect("executor", stale_after=5)
    health.expect("journal")
    assert health.report() == (False, "BAD executor: starting\nBAD journal: starting")
    health.good("executor", "pid 1")
    health.good("journal")
    assert health.report() == (True, "ok  executor: pid 1\nok  journal")
    now[0] = 6
    assert health.report()[0] is False
    assert "silent for 6 s" in health.report()[1]
    health.good("executor")
    health.bad("journal", "disk full")
    assert health.report() == (False, "ok  executor\nBAD journal: disk full")
    with pytest.raises(KeyError):
        health.good("typo")


def test_usage_is_this_process():
    before = usage()
    sum(range(2_000_000))
    assert usage().cpu > before.cpu
    assert 5 << 20 < before.rss < 50 << 30
