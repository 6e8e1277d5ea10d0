"""What the demonstration reads out of programs' output. Pure functions: text in, values out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

CALLS = "singularity_collective_calls_total"
OLDEST = "singularity_collective_oldest_in_flight_seconds"
SKEW = "singularity_collective_arrival_skew_seconds"
HITS = "singularity_fault_hits_total"
WIDTH = 100


class Step(NamedTuple):
    """One line of the training job."""

    number: int
    loss: float
    seconds: float


class Call(NamedTuple):
    """One line of the NCCL caller."""

    number: int
    result: int
    seconds: float


class Outcome(NamedTuple):
    """One row of the summary."""

    step: str
    expected: str
    seen: str
    ok: bool


class Page:
    """A Prometheus page."""

    def __init__(self, text: str) -> None:
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def by_rank(self, name: str, job: str, **labels: str) -> dict[int, float]:
        """Rank -> the greatest value of the metric among the job's series that have these labels."""
        found: dict[int, float] = {}
        for sample in self.samples:
            mine = sample.labels
            rank = mine.get("rank", "")
            if sample.name != name or mine.get("job_id") != job or not rank.isdigit():
                continue
            if all(mine.get(key) == value for key, value in labels.items()):
                found[int(rank)] = max(found.get(int(rank), -math.inf), sample.value)
        return found

    def excerpt(self, name: str, job: str, limit: int) -> list[str]:
        """Lines of the page about one metric, as a person would grep them."""
        lines = []
        for sample in self.samples:
            if sample.name == name and sample.labels.get("job_id") == job:
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                lines.append(f"{sample.name}{{{labels}}} {sample.value:g}")
        return lines[:limit]


def json_lines(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects; a last line that is still being written is left for the next reading."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def steps(text: str) -> list[Step]:
    """The training job's progress."""
    return [Step(line["step"], line["loss"], line["seconds"]) for line in json_lines(text) if {"step", "loss", "seconds"} <= line.keys()]


def calls(text: str) -> list[Call]:
    """The NCCL caller's progress."""
    return [
        Call(line["call"], line["result"], line["seconds"]) for line in json_lines(text) if {"call", "result", "seconds"} <= line.keys()
    ]


def ranks(text: str) -> list[dict[str, Any]]:
    """The rows of `singularityctl ranks -o json`."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    rows = value.get("ranks", []) if isinstance(value, dict) else value
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def job_with_ranks(rows: Iterable[Mapping[str, Any]], wanted: Iterable[int], pids: Iterable[int]) -> str:
    """The job that has all the wanted ranks among these processes, or an empty string."""
    known, jobs = set(pids), dict[str, set[int]]()
    for row in rows:
        if row.get("pid") in known and isinstance(row.get("rank"), int):
            jobs.setdefault(str(row.get("job", "")), set()).add(row["rank"])
    return next((job for job, found in jobs.items() if found >= set(wanted)), "")


def longest(before: Sequence[Step], after: Sequence[Step]) -> Step | None:
    """The longest step that came after those of `before`."""
    new = after[len(before) :]
    return max(new, key=lambda step: step.seconds) if new else None


def loss_falls(history: Sequence[Step]) -> bool:
    """Whether the mean loss of the last fifth is below that of the first."""
    part = len(history) // 5
    if not part:
        return False
    return sum(step.loss for step in history[-part:]) < sum(step.loss for step in history[:part])


def table(rows: Sequence[Outcome]) -> str:
    """The summary, within 100 columns."""
    heads = ("step", "expected", "seen", "ok")
    cells = [(row.step, row.expected, row.seen, "yes" if row.ok else "NO") for row in rows]
    widths = [max(len(line[column]) for line in [heads, *cells]) for column in range(4)]
    room = WIDTH - 6 - widths[3] - widths[0]
    widths[1] = min(widths[1], max(room // 2, room - widths[2]))
    widths[2] = min(widths[2], room - widths[1])
    rule = tuple("-" * width for width in widths)
    lines = [heads, rule, *cells]
    return "\n".join(
        "  ".join(shorten(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def shorten(text: str, width: int) -> str:
    """At most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
