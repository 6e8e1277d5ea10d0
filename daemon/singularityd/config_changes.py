"""Settings that change while the daemon runs: which may, what differs, and how they are read a second time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from singularityd import config
from singularityd.config import Settings

RELOADABLE = frozenset({"kernel.linger", "faults", "ranks", "metrics", "otel", "log"})
"""Settings, and whole tables, that SIGHUP changes. All others need a restart: a setting is added here once changing it was thought of."""

FLAGS = "_SINGULARITYD_FLAGS"
"""Environment variable by which SIGHUP finds the flags of the start; not for users. Arguments would be readable to everybody."""


class Flags(NamedTuple):
    """What the command line said about settings."""

    path: str | None
    words: tuple[str, ...]

    def load(self) -> Settings:
        """The settings by these flags. Raises ConfigError that lists every problem."""
        return self.read().settings

    def read(self) -> config.Loaded:
        """The same, with where each setting comes from."""
        return config.read(self.path, dict(config.override(word) for word in self.words))

    def to_environment(self) -> dict[str, str]:
        """As a variable; a relative path is made absolute, so that it names the same file later."""
        path = str(Path(self.path).absolute()) if self.path else None
        return {FLAGS: json.dumps([path, self.words])}

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> Flags:
        """What `to_environment` made; none where there is no such variable."""
        path, words = json.loads(variables.get(FLAGS, "[null, []]"))
        return cls(path, tuple(words))


def is_reloadable(table: str, key: str) -> bool:
    """Whether SIGHUP changes this setting."""
    return table in RELOADABLE or f"{table}.{key}" in RELOADABLE


def differences(before: Settings, after: Settings) -> tuple[list[str], list[str]]:
    """(settings that SIGHUP changes, settings that need a restart) of those whose values differ, as `table.key`."""
    changed: list[str] = []
    restart: list[str] = []
    for table in msgspec.structs.fields(Settings):
        old, new = getattr(before, table.name), getattr(after, table.name)
        for field in msgspec.structs.fields(table.type):
            if getattr(old, field.name) != getattr(new, field.name):
                (changed if is_reloadable(table.name, field.name) else restart).append(f"{table.name}.{field.name}")
    return changed, restart


def with_values(before: Settings, after: Settings, names: Iterable[str]) -> Settings:
    """`before`, with the values that `after` has for these settings."""
    values: dict[str, dict[str, Any]] = {}
    for name in names:
        table, _, key = name.partition(".")
        values.setdefault(table, {})[key] = getattr(getattr(after, table), key)
    tables = {table: msgspec.structs.replace(getattr(before, table), **changes) for table, changes in values.items()}
    return msgspec.structs.replace(before, **tables)
