"""`singularityd config`, and which settings a reload changes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd import config, config_reference
from singularityd.config import Settings
from singularityd.config_changes import RELOADABLE, Flags, differences, is_reloadable, with_values
from singularityd.config_command import lines

TABLES = {table.name: table.type for table in msgspec.structs.fields(Settings)}
ALL = [f"{name}.{field.name}" for name, kind in TABLES.items() for field in msgspec.structs.fields(kind)]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SINGULARITYD_")} | environment
    return subprocess.run(
        [sys.executable, "-m", "singularityd", *words], capture_output=True, text=True, env=variables, timeout=60, check=False
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_check_tells_every_problem_at_once_and_exits_78(file: Path) -> None:
    file.write_text("[metrics]\nprt = 1\nport = 99999\n[kernle]\nx = 1\n")
    wrong = ("--config", str(file), "--set", "log.level=loud")
    for words in (("config", "check", *wrong), (*wrong, "config", "check"), ("--check", *wrong)):
        done = run(*words)
        assert done.returncode == 78
        assert "4 problems" in done.stderr
        for told in ("did you mean port?", "metrics.port = 99999", "did you mean kernel?", "flags: log.level = 'loud'"):
            assert told in done.stderr
        assert done.stdout == ""


def test_check_of_good_settings_and_of_a_file_that_is_not_there(file: Path) -> None:
    file.write_text("metrics.port = 1\n")
    done = run("config", "check", "--config", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "the settings are valid\n", "")
    done = run("config", "check", SINGULARITYD_CONFIG=str(file.with_name("none.toml")))
    assert done.returncode == 78
    assert "No such file" in done.stderr


def test_show_says_where_each_value_comes_from_and_how_it_changes(file: Path) -> None:
    (file.parent / "conf.d").mkdir()
    more = file.parent / "conf.d/10-more.toml"
    file.write_text('log.level = "debug"\nmetrics.port = 1\n')
    more.write_text("metrics.port = 2\nkernel.guard = false\n")
    done = run("config", "show", "--origin", "--config", str(file), "--set", "faults.max_active=3", SINGULARITYD_STATE_DIR="/var/x")
    assert done.returncode == 0
    assert tomllib.loads(done.stdout)["metrics"]["port"] == 2
    said = {line.split(" = ")[0]: line.partition("# ")[2] for line in done.stdout.splitlines() if " = " in line}
    assert said["level"] == f"{file}; reload"
    assert said["port"] == f"{more}; reload"
    assert said["guard"] == f"{more}; restart"
    assert said["max_active"] == "flags; reload"
    assert said["state_dir"] == "environment; restart"
    assert said["nice"] == "default; restart"
    plain = run("config", "show", "--config", str(file))
    assert "#" not in plain.stdout


def test_tokens_are_shown_to_who_asks_for_them(file: Path) -> None:
    file.write_text('otel.headers = { authorization = "Bearer abc" }')
    shown, asked = (run("config", "show", "--config", str(file), *more).stdout for more in ((), ("--secrets",)))
    assert "abc" not in shown
    assert '"authorization" = "(hidden)"' in shown
    assert '"authorization" = "Bearer abc"' in asked


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values: dict[str, st.SearchStrategy[Any]] = {
    "otel.resource": st.dictionaries(texts, texts, max_size=3),
    "otel.headers": st.dictionaries(texts, texts, max_size=3),
    "kernel.slow_call": st.floats(0, 3600),
    "faults.max_duration": st.floats(0.001, 86_400),
    "metrics.host": texts,
    "metrics.port": st.integers(0, 65_535),
    "metrics.enabled": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional=values))
def test_what_show_prints_is_a_file_with_the_same_settings(tmp_path_factory: pytest.TempPathFactory, chosen: dict[str, Any]) -> None:
    place = tmp_path_factory.getbasetemp() / "shown.toml"
    place.touch()
    loaded = config.read(place, chosen, environment={})
    place.write_text("\n".join(lines(loaded, origin=True, secrets=True)), encoding="utf-8")
    again = config.load(place, environment={})
    place.write_text("")
    for name, value in chosen.items():
        table, _, key = name.partition(".")
        got = getattr(getattr(again, table), key)
        assert got == (pytest.approx(value) if isinstance(value, float) else value)
    assert again.otel == loaded.settings.otel


def test_only_settings_that_exist_are_named_as_reloadable() -> None:
    for name in RELOADABLE:
        assert name in TABLES or name in ALL
    for name in ("log.level", "faults.enabled", "metrics.series", "ranks.expire_after"):
        assert is_reloadable(*name.split("."))
    assert not any(is_reloadable(*name.split(".")) for name in ALL if name.startswith("daemon."))


def test_the_page_says_of_every_setting_how_it_changes() -> None:
    page = config_reference.page()
    for name in ALL:
        table, key = name.split(".")
        part = page.partition(f"\n## [{table}]\n")[2].partition("\n## ")[0]
        (row,) = [line for line in part.splitlines() if line.startswith(f"| `{key}` ")]
        assert f"| {'reload' if is_reloadable(table, key) else 'restart'} |" in row


@given(st.lists(st.sampled_from(["log.level", "metrics.port", "kernel.guard", "daemon.nice", "kernel.linger"]), unique=True))
def test_a_reload_takes_over_what_it_may_and_nothing_else(names: list[str]) -> None:
    other = {"log.level": "debug", "metrics.port": 5, "kernel.guard": False, "daemon.nice": 3, "kernel.linger": 7.0}
    after = with_values(Settings(), config.load("/dev/null", other, environment={}), names)
    changed, restart = differences(Settings(), after)
    assert sorted(changed + restart) == sorted(names)
    assert all(name in ("log.level", "metrics.port", "kernel.linger") for name in changed)
    effective = with_values(Settings(), after, changed)
    assert differences(effective, after) == ([], restart)


def test_flags_find_the_same_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.toml").write_text("metrics.port = 7")
    monkeypatch.chdir(tmp_path)
    flags = Flags("x.toml", ("log.level=debug",))
    kept = flags.to_environment()
    monkeypatch.chdir("/")
    again = Flags.from_environment(kept).load()
    assert (again.metrics.port, again.log.level) == (7, "debug")
    assert Flags.from_environment({}) == Flags(None, ())
