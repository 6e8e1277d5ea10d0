import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd import config, config_reference
from singularityd.config import Settings, load, override, render_default
from singularityd.errors import ConfigError
from singularityd.faults.limits import FaultLimits

ROOT = Path(__file__).parents[2]
TABLES = {table.name: table.type for table in msgspec.structs.fields(Settings)}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config.toml"


def read(file, text="", overrides=None, **environment):
    file.write_text(text)
    return load(file, overrides, environment=environment)


def problems(file, text="", overrides=None, **environment):
    with pytest.raises(ConfigError) as caught:
        read(file, text, overrides, **environment)
    first, *rest = caught.value.text.splitlines()
    assert f"{len(rest)} problem" in first
    assert caught.value.exit_code == 78
    return rest


# --- the shipped file and the page --------------------------------------------------------------------------------------------


def test_the_shipped_file_and_the_page_are_what_the_settings_say():
    remedy = "run: python -m singularityd.config --write"
    assert (ROOT / "systemd/config.toml").read_text() == render_default(), remedy
    assert (ROOT / "docs/configuration.md").read_text() == config_reference.page(), remedy


def test_the_shipped_file_changes_nothing_and_uncommented_says_the_defaults(file):
    assert read(file, render_default()) == Settings()
    text = re.sub(r"(?m)^# ([a-z_]+ = )", r"\1", render_default())
    assert read(file, text) == Settings()
    said = tomllib.loads(text)
    assert {name: set(table) for name, table in said.items()} == {
        name: {field.name for field in msgspec.structs.fields(kind)} for name, kind in TABLES.items()
    }


def test_every_setting_is_documented_and_every_float_is_a_duration_in_seconds():
    for name, about, fields in config_reference.tables():
        assert about
        for field in fields:
            assert field.help, f"{name}.{field.name}"
            if isinstance(field.default, float):
                assert config.is_seconds(field.kind)


def test_python_m_prints_the_file():
    run = subprocess.run([sys.executable, "-m", "singularityd.config"], capture_output=True, text=True, check=True)
    assert run.stdout == render_default()


def test_importing_and_loading_it_is_light():
    """The process that becomes the executor does it before it is small."""
    code = (
        "import sys; from singularityd.config import load; load(environment={}); "
        "print([name for name in ('asyncio', 'grpc', 'structlog', 'sqlite3', 'click', 'psutil') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_limits_of_faults_have_the_same_defaults_in_both_places():
    limits, settings = FaultLimits(), Settings().faults
    for name in set(FaultLimits.__struct_fields__) - {"silence"}:
        assert getattr(limits, name) == getattr(settings, name)


# --- which file, and what wins ------------------------------------------------------------------------------------------------


def test_a_missing_default_file_is_fine_and_a_missing_named_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "none" / "config.toml")
    assert load(environment={}) == Settings()
    for arguments in ({"path": tmp_path / "x.toml", "environment": {}}, {"environment": {"SINGULARITYD_CONFIG": str(tmp_path / "x.toml")}}):
        with pytest.raises(ConfigError, match="No such file"):
            load(**arguments)


def test_the_default_file_is_read_where_it_exists(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("daemon.nice = 5")
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "config.toml")
    assert load(environment={}).daemon.nice == 5


def test_a_flag_names_the_file_before_the_environment_does(tmp_path, file):
    other = tmp_path / "other.toml"
    other.write_text("daemon.nice = 1")
    file.write_text("daemon.nice = 2")
    assert load(file, environment={"SINGULARITYD_CONFIG": str(other)}).daemon.nice == 2
    assert load(environment={"SINGULARITYD_CONFIG": str(other)}).daemon.nice == 1


def test_precedence_setting_by_setting(tmp_path, file):
    parts = tmp_path / "conf.d"
    parts.mkdir()
    (parts / "20-b.toml").write_text('[daemon]\nnice = 3\nstate_dir = "/b"\n')
    (parts / "10-a.toml").write_text('[daemon]\nnice = 2\nuser = "a"\nruntime_dir = "/a"\n')
    (parts / "99-not-read.txt").write_text("nonsense")
    got = read(
        file,
        '[daemon]\nnice = 1\nuser = "file"\n[faults]\nmax_active = 2\n',
        {"metrics.port": 0, "daemon.state_dir": "/flag", "daemon.nice": None},
        SINGULARITYD_RUNTIME_DIR="/env",
        SINGULARITYD_STATE_DIR="/env",
    )
    assert (got.daemon.nice, got.daemon.user) == (3, "a")
    assert (got.daemon.runtime_dir, got.daemon.state_dir) == ("/env", "/flag")
    assert (got.faults.max_active, got.metrics.port) == (2, 0)


def test_empty_variables_and_those_of_others_are_not_read(file):
    got = read(file, "", None, SINGULARITYD_RUNTIME_DIR="", SINGULARITYD_CONFIG="", SINGULARITYD_SOCKET="x", HOME="/x")
    assert got == Settings()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("metrics.port=0", ("metrics.port", 0)),
        ("faults.mode = off", ("faults.mode", "off")),
        ("faults.max_duration=30s", ("faults.max_duration", "30s")),
        ('log.level="debug"', ("log.level", "debug")),
        ("log.level=debug", ("log.level", "debug")),
        ("otel.endpoint=http://h:1/?a=b", ("otel.endpoint", "http://h:1/?a=b")),
    ],
)
def test_flags_that_set(text, expected):
    assert override(text) == expected


def test_a_flag_without_a_value():
    with pytest.raises(ConfigError, match="sets nothing"):
        override("metrics.port")


# --- values -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [('"10s"', 10.0), ("10", 10.0), ("0.5", 0.5), ('"500ms"', 0.5), ('"2m"', 120.0), ('"1.5s"', 1.5)]
)
def test_durations(file, text, expected):
    assert read(file, f"faults.max_duration = {text}").faults.max_duration == expected


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('faults.max_duration = "10"', "has no unit; write 10s for seconds"),
        ('faults.max_duration = "10 s"', "not a duration"),
        ("faults.max_duration = 0", "allowed: 0.001 to 86,400 seconds"),
        ("faults.max_duration = -1", "allowed"),
        ("faults.max_duration = nan", "finite"),
        ("faults.max_duration = inf", "finite"),
        ("faults.max_duration = true", "got bool"),
        ("faults.max_duration = 1979-05-27", "Expected float"),
        ("metrics.port = 65536", "allowed: 0 to 65,535"),
        ("metrics.port = 1.0", "Expected int, got float"),
        ('metrics.port = "10610"', "Expected int, got str"),
        ("metrics.port = true", "got bool"),
        ("daemon.nice = 99999999999999999999", "too large"),
        ('daemon.runtime_dir = "run"', "absolute path"),
        ('daemon.runtime_dir = "/run\\n"', "absolute path"),
        ('daemon.user = "Root"', "user's name"),
        ('log.level = "loud"', '"debug", "info", "warning", "error"'),
        ("kernel.event_pages = 48", "not a power of two; write 32 or 64"),
        ('kernel.headers = "/usr/src:lib"', "'lib' is not an absolute directory"),
        (f'daemon.runtime_dir = "/{"ü" * 60}"', "121 bytes"),
        ('otel.endpoint = "ftp://x"', "http://HOST:PORT"),
        ("faults.mode = 1", "Expected str"),
        ('faults.mode = "on"', "Invalid enum"),
        ("otel.headers = 1", "Expected object"),
    ],
)
def test_wrong_values_are_told_with_place_setting_and_what_is_allowed(file, line, told):
    (problem,) = problems(file, line)
    assert problem.strip().startswith(f"{file}: ")
    assert line.split(" = ")[0].split(".")[0] in problem
    assert told in problem
    assert len(problem) < 500


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("faults.max_duraton = 1", "unknown setting faults.max_duraton; did you mean max_duration?"),
        ("fault.enabled = true", "unknown table [fault]; did you mean faults?"),
        ("zzz = 1", "there are: daemon, kernel, faults, ranks, access, metrics, otel, log"),
        ("faults.Mode = true", "did you mean mode?"),
        ("faults = 3", "write [faults]"),
        ("faults.qqq = 3", "there are: mode, off_switch, max_duration"),
    ],
)
def test_unknown_keys(file, line, told):
    (problem,) = problems(file, line)
    assert told in problem


def test_all_problems_of_all_places_at_once(tmp_path, file):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "a.toml").write_text("[otel]\nprotocl = 'grpc'\n[broken\nx = 1")
    (tmp_path / "conf.d" / "b.toml").write_text("metrics.port = -1")
    told = problems(
        file,
        "[faults]\nmdoe = 1\nmax_active = 0\n[kernel]\nevent_pages = 3\n",
        {"log.level": "loud", "nodot": 1},
        SINGULARITYD_RUNTIME_DIR="relative",
    )
    wanted = [
        "mdoe; did you mean mode?",
        "faults.max_active = 0",
        "a.toml: not TOML",
        "line 3",
        "b.toml: metrics.port = -1",
        "environment: daemon.runtime_dir = 'relative'",
        "flags: log.level = 'loud'",
        "flags: 'nodot' is not TABLE.KEY",
        "not a power of two",
    ]
    for words in wanted:
        assert any(words in line for line in told), words
    assert len(told) == len(wanted) - 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = [" * 5000, b"x = " + b"9" * 5000, b"a = 1\na = 2", b"\x00"])
def test_files_that_are_no_settings(file, content):
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(file, environment={})
    assert str(file) in caught.value.text


def test_a_directory_in_the_files_place(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, environment={})


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.sampled_from(["10s", "/x", "0ms", "-5s"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
names = st.sampled_from([f"{name}.{field.name}" for name, kind in TABLES.items() for field in msgspec.structs.fields(kind)])


@given(overrides=st.dictionaries(names | st.text(max_size=12), values, max_size=5))
def test_whatever_is_set_is_taken_or_told(tmp_path_factory, overrides):
    missing = tmp_path_factory.getbasetemp() / "empty.toml"
    missing.touch()
    try:
        got = load(missing, overrides, environment={})
    except ConfigError as error:
        told = error.text.splitlines()[1:]
        assert told
    else:
        for key, value in overrides.items():
            table, _, name = key.partition(".")
            if value is not None and not isinstance(value, str) and not config.is_seconds(types(table)[name]):
                assert getattr(getattr(got, table), name) == value


def types(table):
    return typing.get_type_hints(TABLES[table], include_extras=True)
