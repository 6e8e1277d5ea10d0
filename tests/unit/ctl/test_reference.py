"""docs/singularityctl.md says every command, option and JSON key there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from singularityd.ctl.main import COMMANDS, cli

from .fake import ask

TEXT = (Path(__file__).parents[3] / "docs" / "singularityctl.md").read_text()
SECTIONS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
COMMON = {name for option in cli.params for name in option.opts}
NEED = {
    "inject": [["--rank", "3", "timeout"]],
    "clear": [["f12"]],
    "top": [["--once"]],
    "faults": [[], ["--patterns"]],
    "audit": [["verify", "AUDIT"]],
    "drill": [["list"], ["plan", "-"]],
}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_and_option_is_described(command: click.Command) -> None:
    section = SECTIONS[command.name or ""]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.opts[0] not in COMMON:
            assert f"`{parameter.opts[0]}" in section, parameter.opts[0]
    for name in COMMON - {"--version"}:
        assert name in TEXT


def keys(value: Any) -> Iterator[str]:
    """Keys of the documents; maps whose keys are data (probes, fields, ...) are described by their own."""
    if isinstance(value, list):
        for one in value:
            yield from keys(one)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in ("probes", "dropped", "attach_errors", "fields", "options"):
                yield from keys(inner)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_json_key_is_described(command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("AUDIT").touch()
    name = command.name or ""
    for words in NEED.get(name, [[]]):
        said = ask(name, *words, "-o", "json").stdout
        documents = [json.loads(line) for line in said.splitlines()] if name == "events" else json.loads(said)
        for key in set(keys(documents)):
            where = SECTIONS[name] + (SECTIONS["faults"] if name in ("status", "inject", "clear") else "")
            assert f"`{key}`" in where, f"{name}: {key}"
