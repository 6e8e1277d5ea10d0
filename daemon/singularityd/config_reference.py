"""The default file and docs/configuration.md, made from the settings themselves.

python -m singularityd.config prints the file; --write makes systemd/config.toml and docs/configuration.md of a checkout anew.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from singularityd import config, config_changes
from singularityd.faults.quantity import duration_text

_WIDTH = 100

_FILE_HEAD = """\
# Settings of singularityd. Each is shown with its default, commented out: change what you need and leave the rest.
#
# A duration is a number of seconds or a text with its unit: "500ms", "10s", "2m". An unknown key is an error.
# Later wins: this file, conf.d/*.toml beside it by name, SINGULARITYD_RUNTIME_DIR and SINGULARITYD_STATE_DIR, flags.
# Made by `python -m singularityd.config`."""

_DOC_HEAD = """<!-- made by `python -m singularityd.config --write`; do not edit -->
# Configuration

`singularityd` reads `/etc/singularityd/config.toml`, or the file that `--config` or `SINGULARITYD_CONFIG` names. The default file need not
exist; a file that is named must. [systemd/config.toml](../systemd/config.toml) shows every setting with its default.

Later wins:

1. the defaults below
2. `config.toml`
3. `conf.d/*.toml` in the directory of `config.toml`, in the order of their names
4. `SINGULARITYD_RUNTIME_DIR` and `SINGULARITYD_STATE_DIR`, where they are not empty
5. flags

The files are merged setting by setting. A **duration** is a number of seconds or a text with its unit: `"500ms"`, `"1.5s"`, `"2m"`.

An unknown table or key, a value of the wrong type and a value out of range are errors. The daemon does not start then. It lists all of them
at once, each with the file it is in and the nearest name, and exits with 78, which the unit does not restart on.

`singularityd config check` says the same without starting anything. `singularityd config show --origin` prints every setting with its value
in force, where it comes from (`default`, a file, `environment`, `flags`) and how it changes. Both take `--config` and `--set`, and need no
root where the files can be read. The values of `otel.headers` are hidden unless `--secrets` is given.

## Reload

SIGHUP (`systemctl reload singularityd`) reads the settings again, with the flags of the start. They are checked as a whole first: where one
is wrong nothing changes, the log lists every problem, and `systemctl status` says so. In force at once come the settings whose column
"changes by" says `reload`; the log names those that wait for a restart.

A change of `log.level` alone touches nothing else, and one of `kernel.linger` neither. For any other the front is started anew, which takes
about a second: probes stay and counters go on, **armed faults end**, streams of events and agents connect again. Where the front does not
come up with the new settings (a port that is taken, for example) it is started with those before, and the log says so.
"""


class Field(NamedTuple):
    """One setting, as its definition shows it."""

    name: str
    kind: Any
    default: Any
    help: str


def tables() -> Iterator[tuple[str, str, list[Field]]]:
    """(name, documentation, settings) of each table, in the order of `Settings`."""
    for table in msgspec.structs.fields(config.Settings):
        yield table.name, inspect.getdoc(table.type) or "", _fields(table.type)


def default_file() -> str:
    """The text of systemd/config.toml."""
    parts = [_FILE_HEAD]
    for name, about, fields in tables():
        parts.append(f"# {about}\n[{name}]")
        parts.extend(map(_in_file, fields))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The text of docs/configuration.md."""
    parts = [_DOC_HEAD]
    for name, about, fields in tables():
        parts.append(f"\n## [{name}]\n\n{about}\n\n| setting | default | allowed | changes by | meaning |\n|---|---|---|---|---|\n")
        parts.extend(_row(name, field) for field in fields)
    return "".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Print the default file, or write both files into the checkout."""
    given = sys.argv[1:] if arguments is None else arguments
    if given not in ([], ["--write"]):
        sys.exit("usage: python -m singularityd.config [--write]")
    if not given:
        sys.stdout.write(default_file())
        return
    root = Path(__file__).resolve().parents[2]
    for path, text in ((root / "systemd/config.toml", default_file()), (root / "docs/configuration.md", page())):
        path.write_text(text, encoding="utf-8")


def _row(table: str, field: Field) -> str:
    when = "reload" if config_changes.is_reloadable(table, field.name) else "restart"
    return f"| `{field.name}` | `{toml(field.kind, field.default)}` | {allowed(field)} | {when} | {_cell(field.help)} |\n"


def _fields(table: type) -> list[Field]:
    types = typing.get_type_hints(table, include_extras=True)
    texts = _texts(table)
    return [Field(field.name, types[field.name], _default(field), texts[field.name]) for field in msgspec.structs.fields(table)]


def _default(field: Any) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _texts(table: type) -> dict[str, str]:
    """The string that stands under each field of the class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(definition, ast.ClassDef), "a table is a class"
    found: dict[str, str] = {}
    for line, below in zip(definition.body, definition.body[1:], strict=False):
        documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and documented:
            found[line.target.id] = inspect.cleandoc(below.value.value)  # type: ignore[attr-defined]
    return found


def _in_file(field: Field) -> str:
    lines = textwrap.wrap(" ".join(field.help.split()), _WIDTH)
    if range_ := _plain_range(field):
        lines.append(f"Allowed: {range_}.")
    return "\n".join([*(f"# {line}" for line in lines), f"# {field.name} = {toml(field.kind, field.default)}"])


def _plain_range(field: Field) -> str:
    range_ = config.allowed(field.kind)
    return f"{range_} seconds" if range_ and config.is_seconds(field.kind) else range_


def allowed(field: Field) -> str:
    """What a setting may be, in words."""
    if isinstance(field.default, bool):
        return "`true` or `false`"
    if isinstance(field.default, dict):
        return "a table of texts"
    if isinstance(field.default, tuple):
        return "a list of texts"
    return _plain_range(field).replace('"', "`") or "a text"


def toml(kind: Any, value: Any) -> str:
    """A value of a setting of this type, as it is written in the file."""
    if config.is_seconds(kind):
        value_ms = value * 1000
        if value_ms == int(value_ms) and value_ms > 0:
            return f'"{duration_text(int(value_ms))}"'
        return repr(value) if value % 1 else f"{value:.0f}"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_quoted(key)} = {_quoted(text)}" for key, text in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """JSON's quoting is TOML's, but for DEL and for what JSON writes as two halves."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
