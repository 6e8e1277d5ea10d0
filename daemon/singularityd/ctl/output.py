"""Tables and JSON on stdout, remarks on stderr. The same text whether or not stdout is a terminal; only the header's weight differs."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click

from singularityd.ctl.words import printable, shorten, width

WIDTH = 100
GAP = "  "


class Column(NamedTuple):
    """One column of a table."""

    title: str
    right: bool = False
    """Numbers stand right."""
    least: int = 0
    """It may be shortened to so many columns where the table is too wide; 0: never."""


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, limit: int = WIDTH) -> list[str]:
    """The lines of a table, header first, within `limit` columns as far as the columns may be shortened."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max([width(column.title), *(width(row[place]) for row in cells)]) for place, column in enumerate(columns)]
    _fit(widths, columns, limit)
    titles = [column.title for column in columns]
    return [_line(row, columns, widths) for row in (titles, *cells)]


def _fit(widths: list[int], columns: Sequence[Column], limit: int) -> None:
    """Take columns away, one at a time, from whatever is widest among what may be shortened."""
    while sum(widths) + len(GAP) * (len(widths) - 1) > limit:
        free = [place for place, column in enumerate(columns) if column.least and widths[place] > column.least]
        if not free:
            return
        widths[max(free, key=widths.__getitem__)] -= 1


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for cell, column, size in zip(cells, columns, widths, strict=True):
        text = shorten(cell, size)
        space = " " * (size - width(text))
        padded.append(space + text if column.right else text + space)
    return GAP.join(padded).rstrip()


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; on a terminal its header is bold, unless NO_COLOR is set."""
    header, *lines = table(columns, rows)
    click.echo(click.style(header, bold=True) if styled() else header)
    for line in lines:
        click.echo(line)


def print_json(value: Any) -> None:
    """Print one JSON document: indented, keys sorted, ASCII."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def print_json_line(value: Any) -> None:
    """Print one JSON document in one line, for streams."""
    click.echo(json.dumps(value, sort_keys=True))


def say(text: str) -> None:
    """Print one line of an answer."""
    click.echo(printable(text))


def say_wrapped(head: str, text: str) -> None:
    """Print a head and a text, within the width; the text's further lines stand under its first."""
    first = printable(head)
    lines = textwrap.wrap(
        printable(text), WIDTH, initial_indent=first, subsequent_indent=" " * width(first), break_on_hyphens=False, drop_whitespace=True
    )
    for line in lines or [first.rstrip()]:
        click.echo(line)


def remark(text: str) -> None:
    """Print one line beside the answer, on stderr."""
    click.echo(printable(text), err=True)


def terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def styled() -> bool:
    """Whether weight and colour may be used: https://no-color.org."""
    return terminal() and not os.environ.get("NO_COLOR")
