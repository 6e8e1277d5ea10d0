"""`singularityd config`: the settings as the daemon would read them, without starting it. Needs no root where the files can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from singularityd import config, config_reference
from singularityd.config_changes import Flags, is_reloadable

_HIDDEN = "(hidden)"
_SECRET = frozenset({"otel.headers"})
"""Settings whose texts may be tokens: shown to nobody who did not ask."""


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--config` and `--set`, as the daemon itself takes them."""
    where = "Settings; without it $SINGULARITYD_CONFIG or /etc/singularityd/config.toml."
    one = "One setting; may be given several times."
    function = click.option("--set", "words", metavar="TABLE.KEY=VALUE", multiple=True, help=one)(function)
    return click.option("--config", "path", metavar="FILE", help=where)(function)


@click.group(name="config")
def group() -> None:
    """Check or show the settings that the daemon would start with."""


@group.command()
@settings_options
@click.pass_obj
def check(outer: Flags | None, path: str | None, words: tuple[str, ...]) -> None:
    """Check the settings: every problem at once, with its place; exits 78 where there is one."""
    joined(outer, path, words).load()
    click.echo("the settings are valid")


@group.command()
@settings_options
@click.option("--origin", is_flag=True, help="Also say where each value comes from, and whether SIGHUP changes it.")
@click.option("--secrets", is_flag=True, help="Show the values of otel.headers too.")
@click.pass_obj
def show(outer: Flags | None, path: str | None, words: tuple[str, ...], origin: bool, secrets: bool) -> None:
    """Print every setting with its value in force, as TOML."""
    for line in lines(joined(outer, path, words).read(), origin=origin, secrets=secrets):
        click.echo(line)


def joined(outer: Flags | None, path: str | None, words: tuple[str, ...]) -> Flags:
    """Options may stand before and after the command's name; the later wins."""
    before = outer or Flags(None, ())
    return Flags(path or before.path, (*before.words, *words))


def lines(loaded: config.Loaded, *, origin: bool, secrets: bool) -> Iterator[str]:
    """A line a setting; what says the origin is a comment, so that all of it is TOML."""
    for number, (table, _, fields) in enumerate(config_reference.tables()):
        if number:
            yield ""
        yield f"[{table}]"
        texts = {field.name: _text(table, field, loaded.settings, secrets=secrets) for field in fields}
        width = min(60, max(map(len, texts.values())))
        for name, text in texts.items():
            source = "".join(letter if letter.isprintable() else "?" for letter in loaded.origins.get(f"{table}.{name}", "default"))
            when = "reload" if is_reloadable(table, name) else "restart"
            yield f"{text:{width}}  # {source}; {when}" if origin else text


def _text(table: str, field: config_reference.Field, settings: config.Settings, *, secrets: bool) -> str:
    value = getattr(getattr(settings, table), field.name)
    if f"{table}.{field.name}" in _SECRET and not secrets:
        value = dict.fromkeys(value, _HIDDEN)
    return f"{field.name} = {config_reference.toml(field.kind, value)}"
