"""The settings: typed, documented where they are defined, read from TOML, the environment and flags.

Later wins: defaults < config.toml < conf.d/*.toml beside it, by name < SINGULARITYD_RUNTIME_DIR and SINGULARITYD_STATE_DIR < flags.
Every wrong key and value of all of these is told at once. A setting of type float is a number of seconds and may be written as a text
with its unit: "500ms", "10s", "2m". `python -m singularityd.config` prints the default file.

Imported by the process that becomes the executor: nothing heavier than msgspec is loaded.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from singularityd.errors import BadOption, ConfigError
from singularityd.faults import quantity
from singularityd.model import FaultMode
from singularityd.observe.settings import LogSettings, MetricsSettings, OtelSettings

DEFAULT_PATH = Path("/etc/singularityd/config.toml")
PATH_VARIABLE = "SINGULARITYD_CONFIG"
VARIABLES = {"SINGULARITYD_RUNTIME_DIR": "daemon.runtime_dir", "SINGULARITYD_STATE_DIR": "daemon.state_dir"}
"""Environment variable -> the setting it sets. An empty value counts as not set."""
FRONT_SETTINGS = "_SINGULARITYD_SETTINGS"
"""Environment variable by which the front gets all settings from the process that read them; not for users."""

_LONGEST_RUNTIME_DIR = 107 - len("/control.sock")  # a unix socket's path has 108 bytes, a NUL included
_ABSOLUTE = r"^/[^\x00\n]*\Z"
_USER = r"^[a-z_][a-z0-9_-]{0,30}\Z"

Group = Annotated[str, msgspec.Meta(pattern=_USER)]
Directory = Annotated[str, msgspec.Meta(pattern=_ABSOLUTE, max_length=4000)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of the file."""


class DaemonSettings(_Table, frozen=True, kw_only=True):
    """Where the daemon lives and as whom."""

    runtime_dir: Directory = "/run/singularityd"
    """Directory of the sockets control.sock (root, or who has a role), agent.sock and token.sock (everyone). Absolute, short enough for a
    socket's path."""
    state_dir: Directory = "/var/lib/singularityd"
    """Directory of what is kept over a restart: the journal of faults, what is known of ranks, prepared kernel headers. Absolute."""
    user: Annotated[str, msgspec.Meta(pattern=_USER)] = "singularityd"
    """User of the front, the half that serves the API without privileges. The unit's sysusers file makes it."""
    nice: Annotated[int, msgspec.Meta(ge=-20, le=19)] = -10
    """Scheduling priority of the daemon, as of nice(1)."""

    def __post_init__(self) -> None:
        """Raise ValueError where a socket could not be bound in the runtime directory."""
        if (length := len(os.fsencode(self.runtime_dir))) > _LONGEST_RUNTIME_DIR:
            raise ValueError(f"runtime_dir has {length} bytes; with more than {_LONGEST_RUNTIME_DIR} a socket's path is too long")


class KernelSettings(_Table, frozen=True, kw_only=True):
    """Probes, and what compiles them."""

    system_python: Directory = "/usr/bin/python3"
    """The Python that has the system's bcc module (Debian: python3-bpfcc). A short-lived child of it compiles the programs."""
    headers: Annotated[str, msgspec.Meta(pattern=_ABSOLUTE, max_length=4000)] = "/usr/src"
    """Where kernel headers are searched: absolute directories, separated by colons. Any version will do; nothing is downloaded."""
    slow_call: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 10.0
    """A call that takes longer is told as event slow_call; 0: never."""
    guard: bool = True
    """Detach a probe that is hit more often than `guard_hits`, so that no job pays for being watched; told as event probe_shed."""
    guard_hits: Annotated[int, msgspec.Meta(ge=100, le=10_000_000)] = 20_000
    """Hits a second of one probe site above which the guard detaches it."""
    event_pages: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Memory pages of the ring buffer for calls' events. A power of two. What does not fit is counted and told."""
    process_pages: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    """Memory pages of the ring buffer for processes' events. A power of two."""
    return_probes: bool = True
    """Also probe the return of NCCL's calls. Off: calls are counted, without durations and results."""
    linger: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 60.0
    """Seconds for which a library keeps its probes after the last process that mapped it ended, so that the next job is seen from its
    first call. They hold the library's mount meanwhile."""
    scan_interval: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 1.0
    """Seconds between two looks for new processes and libraries, between those that events ask for."""

    def __post_init__(self) -> None:
        """Raise ValueError for ring buffers that the kernel would refuse and search paths that are not absolute."""
        for name in ("event_pages", "process_pages"):
            if (pages := getattr(self, name)) & (pages - 1):
                raise ValueError(
                    f"{name} = {pages} is not a power of two; write {1 << pages.bit_length() - 1} or {1 << pages.bit_length()}"
                )
        if relative := [part for part in self.headers.split(":") if not part.startswith("/")]:
            raise ValueError(f"headers: {relative[0]!r} is not an absolute directory")


class FaultSettings(_Table, frozen=True, kw_only=True):
    """What may be injected on this host."""

    mode: FaultMode = "admin"
    """Who may inject into what. `off`: nobody, and both halves of the daemon refuse. `admin`: administrators, into every rank. `drill`:
    into jobs that ask for it by SINGULARITY_DRILL=1 in their environment, by administrators and by the job's own user. `open`:
    operators too, into every rank."""
    off_switch: Directory = "/etc/singularityd/no-faults"
    """While this file exists nothing can be armed, and what is armed is ended at once. Absolute."""
    max_duration: Annotated[float, msgspec.Meta(ge=0.001, le=quantity.LONGEST_MS / 1000)] = 60.0
    """Longest life of a fault, from arming to its deadline."""
    max_active: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Most faults of this host that are armed at once."""
    max_ranks_per_job: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Most ranks of one job on this host that have a fault at once."""
    budget: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 86.4
    """Seconds within any day for which faults may disturb one job, from arming to the end of each fault that hit. A job makes its steps at
    a steady pace, so 86.4 seconds, 0.1 percent of a day, are 0.1 percent of its steps."""
    collective_timeout: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0
    """Seconds after which a job's framework is taken to give up a collective, where the job itself does not tell. A hold of more than half
    of it needs --may-kill-job."""
    per_minute: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 60
    """Most injections in any minute."""
    retention: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000
    """So many newest faults are kept in the journal."""


class AccessSettings(_Table, frozen=True, kw_only=True):
    """Who may ask the daemon, beside root. With a group named, control.sock is open to all and a call takes a token; else it is root's."""

    viewer_groups: tuple[Group, ...] = ()
    """Groups whose users may read: ranks, counters, events, faults."""
    operator_groups: tuple[Group, ...] = ()
    """Groups whose users may also inject and clear faults: that is power over every rank of the host, whoever owns it."""
    admin_groups: tuple[Group, ...] = ()
    """Groups whose users may call everything, as root may."""
    token_life: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 60.0
    """A token that was not used is worth nothing after so long."""
    audit_size: Annotated[int, msgspec.Meta(ge=4096, le=1 << 30)] = 16 << 20
    """Bytes after which the audit begins a new file."""
    audit_files: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 16
    """So many full files of the audit are kept."""


class RankSettings(_Table, frozen=True, kw_only=True):
    """Which process is which rank."""

    expire_after: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 300.0
    """A rank that exited, and a fault that ended, is shown for so long."""
    ras: bool = True
    """Ask NCCL's RAS port, where a job has one, which process is which rank."""


class Settings(_Table, frozen=True, kw_only=True):
    """All of them, one field a table of the file."""

    daemon: DaemonSettings = DaemonSettings()
    kernel: KernelSettings = KernelSettings()
    faults: FaultSettings = FaultSettings()
    ranks: RankSettings = RankSettings()
    access: AccessSettings = AccessSettings()
    metrics: MetricsSettings = MetricsSettings()
    otel: OtelSettings = OtelSettings()
    log: LogSettings = LogSettings()


class Loaded(NamedTuple):
    """Settings, and where they come from."""

    settings: Settings
    origins: dict[str, str]
    """`table.key` -> a path, `environment` or `flags`; what is not in it has its default."""


class Layer(NamedTuple):
    """Settings from one place."""

    origin: str
    """For messages: a path, `environment`, `flags`."""
    tables: dict[str, Any]


def load(
    path: Path | str | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of this host. Raises ConfigError that lists every problem; arguments as of `read`."""
    return read(path, overrides, environment=environment).settings


def read(
    path: Path | str | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """The settings of this host with their origins. Raises ConfigError that lists every problem.

    `path` (a flag) must exist, and so must a file that SINGULARITYD_CONFIG names; the default file need not. `overrides` are flags:
    `{"metrics.port": 0}`, where None is a flag that was not given.
    """
    variables = os.environ if environment is None else environment
    named = path or variables.get(PATH_VARIABLE) or None
    problems: list[str] = []
    layers = list(_files(Path(named or DEFAULT_PATH), named is not None, problems))
    layers.append(_dotted("environment", {key: variables[name] for name, key in VARIABLES.items() if variables.get(name)}, problems))
    layers.append(_dotted("flags", {key: value for key, value in (overrides or {}).items() if value is not None}, problems))
    origins: dict[str, str] = {}
    settings = _merged(layers, problems, origins)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        text = "\n".join([f"the settings have {count}:", *(f"  {problem}" for problem in problems)])
        raise ConfigError(text, hint="docs/configuration.md describes every setting; `python -m singularityd.config` prints the defaults")
    assert settings is not None, "without a problem there are settings"
    return Loaded(settings, origins)


def override(text: str) -> tuple[str, object]:
    """The setting and value of a flag `TABLE.KEY=VALUE`, the value as in the file; quotes around a text may be left out.

    Raises ConfigError for a flag without `=`.
    """
    key, mark, value = text.partition("=")
    if not mark:
        raise ConfigError(f"{quantity.shown(text)} sets nothing", hint="write TABLE.KEY=VALUE, for example metrics.port=10610")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return key.strip(), value.strip()


def render_default() -> str:
    """The shipped file: every setting with its documentation, commented out."""
    from singularityd import config_reference

    return config_reference.default_file()


def _files(path: Path, explicit: bool, problems: list[str]) -> Iterator[Layer]:
    yield Layer(str(path), _read(path, problems, may_be_missing=not explicit))
    try:
        more = sorted(path.parent.joinpath("conf.d").glob("*.toml"), key=lambda file: file.name)
    except OSError as error:
        problems.append(f"{path.parent / 'conf.d'}: {error.strerror}")
        return
    for file in more:
        yield Layer(str(file), _read(file, problems))


def _read(path: Path, problems: list[str], *, may_be_missing: bool = False) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if may_be_missing and isinstance(error, FileNotFoundError | NotADirectoryError):
            return {}
        problems.append(f"{path}: {error.strerror or error}")
    except UnicodeDecodeError as error:
        problems.append(f"{path}: not UTF-8 text (byte {error.start})")
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path}: not TOML: {error}")
    except (RecursionError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
    return {}


def _dotted(origin: str, values: Mapping[str, object], problems: list[str]) -> Layer:
    tables: dict[str, Any] = {}
    for key, value in values.items():
        table, mark, name = key.partition(".")
        if not mark:
            problems.append(f"{origin}: {quantity.shown(key)} is not TABLE.KEY")
            continue
        tables.setdefault(table, {})[name] = value
    return Layer(origin, tables)


def _merged(layers: list[Layer], problems: list[str], origins: dict[str, str]) -> Settings | None:
    """One value after the other is checked, so that all wrong ones are told, and with the place each came from."""
    tables = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    values: dict[str, dict[str, Any]] = {name: {} for name in tables}
    last: dict[str, str] = {}
    for layer in layers:
        for name, content in layer.tables.items():
            if name not in tables:
                problems.append(f"{layer.origin}: unknown table [{name[:60]}]{_near(name, tables)}")
            elif not isinstance(content, dict):
                problems.append(f"{layer.origin}: {name} is a table: write [{name}] and its settings below")
            else:
                accepted = _checked(layer.origin, name, tables[name], content, problems)
                values[name] |= accepted
                last |= dict.fromkeys([name] if accepted else [], layer.origin)
                origins |= {f"{name}.{key}": layer.origin for key in accepted}
    made: dict[str, Any] = {}
    for name, kind in tables.items():
        try:
            made[name] = msgspec.convert(values[name], kind)
        except msgspec.ValidationError as error:
            problems.append(f"{last.get(name, 'defaults')}: [{name}] {error}")
    return Settings(**made) if not problems else None


def _checked(origin: str, table: str, kind: type, content: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    types = typing.get_type_hints(kind, include_extras=True)
    accepted: dict[str, Any] = {}
    for key, value in content.items():
        if key not in types:
            problems.append(f"{origin}: unknown setting {table}.{key[:60]}{_near(key, types)}")
            continue
        try:
            accepted[key] = _value(types[key], value)
        except (msgspec.ValidationError, BadOption) as error:
            problems.append(f"{origin}: {table}.{key} = {_shown(value)}: {_explained(error, types[key])}")
    return accepted


def _value(kind: Any, value: object) -> object:
    """The value as its type; a float is seconds and may be a text with a unit."""
    if is_seconds(kind):
        if isinstance(value, str):
            value = quantity.milliseconds("the duration", value) / 1000
        elif isinstance(value, float) and not math.isfinite(value):
            raise msgspec.ValidationError("must be a finite number of seconds")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise msgspec.ValidationError("the number is too large")
    return msgspec.convert(value, kind)


def is_seconds(kind: Any) -> bool:
    """Whether a setting of this type is a duration."""
    return kind is float or (typing.get_origin(kind) is Annotated and typing.get_args(kind)[0] is float)


def allowed(kind: Any) -> str:
    """The range of a type for people, for example `0 to 65535`; empty where its name says it all."""
    base, *notes = typing.get_args(kind) if typing.get_origin(kind) is Annotated else (kind,)
    if typing.get_origin(base) is typing.Literal:
        return ", ".join(f'"{value}"' for value in typing.get_args(base))
    for note in (note for note in notes if isinstance(note, msgspec.Meta)):
        if note.pattern == _ABSOLUTE:
            return "an absolute path"
        low, high = (note.ge, note.le)
        if low is not None and high is not None:
            return f"{_number(low)} to {_number(high)}"
        if note.gt is not None and high is not None:
            return f"more than {_number(note.gt)}, at most {_number(high)}"
        if low is not None:
            return f"at least {_number(low)}"
    return ""


def _number(value: float) -> str:
    return f"{value:,.10g}"


def _explained(error: Exception, kind: Any) -> str:
    """msgspec's or quantity's words, with the range or the remedy."""
    if isinstance(error, BadOption):
        return f"{error.text}; {error.hint}"
    base = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    if base is str and "regex" in str(error):
        return "must be an absolute path" if allowed(kind) else "must be a user's name: small letters, digits, - and _"
    words = str(error).replace("`", "")
    unit = " seconds" if is_seconds(kind) else ""
    return f"{words[:200]}{f' (allowed: {allowed(kind)}{unit})' if allowed(kind) else ''}"


def _shown(value: object) -> str:
    try:
        return quantity.shown(value) if isinstance(value, str) else repr(value)[:60]
    except ValueError:  # an integer of more digits than Python prints
        return "a very large number"


def _near(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else f" (there are: {', '.join(known)})"


if __name__ == "__main__":
    from singularityd.config_reference import main

    main()
