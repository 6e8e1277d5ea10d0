"""Writes docs/metrics.md and docs/events.md from the tables the code uses: python -m singularityd.observe.reference [DIRECTORY]."""

from __future__ import annotations

import sys
from pathlib import Path

from singularityd.observe.families import BOUNDS, FAMILIES, Family
from singularityd.observe.kinds import KINDS

_MARK = "<!-- made by `python -m singularityd.observe.reference`; do not edit -->\n"

_METRICS_HEAD = """# Metrics

`singularityd` shows these on `http://127.0.0.1:10610/metrics` (settings `metrics.host`, `metrics.port`), as Prometheus text or, when the
client asks for it, OpenMetrics. The same names, labels and values go out over OTLP: see [opentelemetry.md](opentelemetry.md).

Labels that many of them share:

| label | meaning |
|---|---|
| `job_id` | the job as the environment, a probe or the agent names it; `unknown` where nothing does |
| `rank` | global rank in the job; `unknown` for all processes that are not identified, added up: never one series a process |
| `comm` | first 8 hex digits of a hash of NCCL's unique id; the group's ordinal in its process for gloo; `unknown` where not seen |
| `backend` | `nccl` or `gloo` |
| `op` | `allreduce`, `broadcast`, ... and the calls of a communicator's life, such as `comm_init` |

* A value that comes from a user's environment is cut at `metrics.label_length` characters; what cannot be printed is replaced. A value
  that was changed ends in `~` and a hash of the original, so that two of them stay apart.
* Counters of a rank do not fall while they are shown: what a process had counted stays when it exits or is replaced under the same rank.
  A rank that has exited is shown until it expires.
* Nothing carries a pid. `singularityctl ranks` names the process of a rank.
* There are at most `metrics.series` series on a page; what is left out is counted.
"""

_EVENTS_HEAD = """# Events

What `singularityctl events` and the stream `Events.Follow` tell. The newest 10,000 are kept; each has a number, and a client that was cut
off resumes after the last one it saw by its token `INCARNATION:NUMBER`. A token of an earlier start of the daemon, or of events that are
no longer kept, is refused (`resume_lost`). A reader that is too slow loses its oldest events and is told in their place how many.

| kind | severity | meaning |
|---|---|---|
"""


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    bounds = ", ".join(f"{bound:g}" for bound in BOUNDS)
    tail = f"\n## Buckets\n\nUpper bounds of the histograms in seconds: {bounds}, +Inf. The kernel counts exactly, by powers of two.\n"
    return _MARK + _METRICS_HEAD + "\n## All of them\n" + "".join(map(_section, FAMILIES)) + tail


def _section(family: Family) -> str:
    labels = ", ".join(f"`{name}`" for name in family.labels) or "none"
    note = f" {family.note}" if family.note else ""
    return f"\n### {family.name}\n\n{family.kind.capitalize()}. {family.help}.{note}\n\nLabels: {labels}.\n"


def events_page() -> str:
    """The text of docs/events.md."""
    return _MARK + _EVENTS_HEAD + "".join(f"| `{kind.name}` | {kind.severity} | {kind.help} |\n" for kind in KINDS)


PAGES = {"metrics.md": metrics_page, "events.md": events_page}


def main(arguments: list[str]) -> None:
    """Write the pages into a directory, docs/ of the checkout by default."""
    directory = Path(arguments[0] if arguments else "docs")
    for name, text in PAGES.items():
        (directory / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
