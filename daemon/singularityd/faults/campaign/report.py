"""The drill report: what was injected, and what was observed by which event and which counter. Pure; the same run, the same text."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from singularityd.faults.campaign.record import Run
from singularityd.model import Fault

VERSION = 1
_SHOWN_HITS = 20
_NOTABLE = ("fault_held", "fault_released", "slow_call", "call_failed")
_METRICS = {
    "calls": "singularity_collective_calls_total",
    "errors": "singularity_collective_calls_total, results that are errors",
    "oldest_in_flight": "singularity_collective_oldest_in_flight_seconds",
}
"""Key of the report -> the metric that shows the same to Prometheus."""


def build(run: Run, faults: Sequence[Fault]) -> dict[str, Any]:
    """Everything the report says, as plain values; times are Unix seconds, what has not happened is null."""
    known = {fault.id: fault for fault in faults}
    outcomes = {outcome.index: outcome for outcome in run.outcomes}
    injected = []
    for planned in run.planned:
        outcome = outcomes.get(planned.index)
        fault = known.get(outcome.fault) if outcome is not None else None
        injected.append(
            {
                "at": planned.at_ms / 1000,
                "rank": planned.spec.rank,
                "pattern": planned.spec.pattern,
                "options": planned.options,
                "duration": planned.spec.duration,
                "reason": planned.spec.reason,
                "outcome": _outcome(outcome is not None, fault, outcome.refused if outcome is not None else ""),
                "refused": (outcome.refused or None) if outcome is not None else None,
                **_facts(fault, run),
            }
        )
    return {
        "version": VERSION,
        "campaign": {
            "id": run.id,
            "name": run.name,
            "job": run.job,
            "seed": run.seed,
            "who": run.who,
            "reason": run.reason or None,
            "state": run.state,
            "started_at": run.started_at,
            "ended_at": run.ended_at or None,
            "ending": run.ending or None,
            "ranks": list(run.ranks),
        },
        "injected": injected,
        "observed": {
            "events": [_event(event) for event in run.events],
            "events_left_out": run.events_left_out,
            "by_kind": dict(sorted(Counter(event.kind for event in run.events).items())),
            "ranks": [
                {
                    "rank": seen.rank,
                    "samples": seen.samples,
                    "calls": seen.calls,
                    "errors": seen.errors,
                    "calls_a_second": seen.calls_a_second,
                    "oldest_in_flight": seen.oldest_in_flight,
                    "longest_standstill": seen.longest_standstill,
                }
                for seen in run.seen
            ],
            "metrics": _METRICS,
        },
    }


def as_json(report: Mapping[str, Any]) -> str:
    """One document, sorted keys, ASCII."""
    return json.dumps(report, indent=2, sort_keys=True) + "\n"


def markdown(report: Mapping[str, Any]) -> str:
    """For people; the JSON has every event, this has those that matter."""
    campaign, observed = report["campaign"], report["observed"]
    lines = [f"# Drill {campaign['id']}: {_line(campaign['name'])}", ""]
    lines += [f"- Job: {_line(campaign['job'])}, ranks {', '.join(map(str, campaign['ranks']))}", f"- Asked by: {_line(campaign['who'])}"]
    lines += [f"- Why: {_line(campaign['reason'] or 'not said')}", f"- Seed: {campaign['seed']}"]
    lines += [f"- Began: {_moment(campaign['started_at'])}"]
    if campaign["ended_at"]:
        lasted = campaign["ended_at"] - campaign["started_at"]
        lines += [f"- Ended: {_moment(campaign['ended_at'])}, after {lasted:.1f} s: {_line(campaign['ending'])}"]
    else:
        lines += ["- Still running"]
    lines += ["", "## Injected", ""]
    lines += ["| after | rank | pattern | options | for | fault | mechanism | hits | seen | outcome |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    lines += [_injected(one) for one in report["injected"]]
    for one in report["injected"]:
        lines += _hits(one)
    lines += ["", "## Observed", "", "### By counters, sampled once a second", ""]
    lines += ["| rank | calls | errors | calls a second | oldest in flight | longest standstill |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {seen['rank']} | {seen['calls']} | {seen['errors']} | {seen['calls_a_second']:.1f} | {seen['oldest_in_flight']:.1f} s "
        f"| {seen['longest_standstill']:.1f} s |"
        for seen in observed["ranks"]
    ]
    lines += ["", *(f"- {key}: `{name.split(',')[0]}`{''.join(name.partition(',')[1:])}" for key, name in observed["metrics"].items())]
    lines += ["", "### By events", "", "| kind | events |", "|---|---|"]
    lines += [f"| `{kind}` | {count} |" for kind, count in observed["by_kind"].items()]
    lines += _timeline(report)
    return "\n".join(lines) + "\n"


def _facts(fault: Fault | None, run: Run) -> dict[str, Any]:
    hits = [event for event in run.events if fault is not None and event.kind == "fault_hit" and event.fault == fault.id]
    return {
        "fault": fault.id if fault is not None else None,
        "who": fault.who if fault is not None else None,
        "pid": fault.pid if fault is not None else None,
        "mechanism": fault.mechanism if fault is not None else None,
        "armed_at": (fault.armed_at or None) if fault is not None else None,
        "ended_at": (fault.ended_at or None) if fault is not None else None,
        "ending": (fault.ending or None) if fault is not None else None,
        "hits": fault.hits if fault is not None else 0,
        "seen": fault.seen if fault is not None else 0,
        "hit_calls": [{"at": hit.at, "op": hit.op, "text": hit.text, "fields": dict(sorted(hit.fields.items()))} for hit in hits],
    }


def _outcome(tried: bool, fault: Fault | None, refused: str) -> str:
    if not tried:
        return "not reached"
    if refused:
        return "refused"
    if fault is None:
        return "no longer journaled"
    return fault.state


def _event(event: Any) -> dict[str, Any]:
    return {
        "at": event.at,
        "kind": event.kind,
        "text": event.text,
        "rank": event.rank,
        "op": event.op or None,
        "fault": event.fault or None,
    }


def _injected(one: Mapping[str, Any]) -> str:
    options = " ".join(f"{key}={value}" for key, value in one["options"].items()) or "-"
    outcome = f"refused: {one['refused']}" if one["refused"] else f"{one['outcome']}{': ' + one['ending'] if one['ending'] else ''}"
    cells = [f"{one['at']:g} s", one["rank"], one["pattern"], options, f"{one['duration']:g} s", one["fault"] or "-"]
    cells += [one["mechanism"] or "-", one["hits"], one["seen"], outcome]
    return f"| {' | '.join(_line(str(cell)) for cell in cells)} |"


def _hits(one: Mapping[str, Any]) -> list[str]:
    if not one["hit_calls"]:
        return []
    lines = ["", f"Hits of {one['fault']}:", ""]
    lines += [f"- {_moment(hit['at'])} {_line(hit['text'])}" for hit in one["hit_calls"][:_SHOWN_HITS]]
    more = len(one["hit_calls"]) - _SHOWN_HITS
    return [*lines, *([f"- and {more} more, in the JSON"] if more > 0 else [])]


def _timeline(report: Mapping[str, Any]) -> list[str]:
    events = [one for one in report["observed"]["events"] if one["kind"] in _NOTABLE or one["kind"].startswith(("rank_", "executor_"))]
    if not events:
        return []
    lines = ["", "What happened to the ranks:", ""]
    lines += [f"- {_moment(one['at'])} `{one['kind']}` {_line(one['text'])}" for one in events[: 5 * _SHOWN_HITS]]
    more = len(events) - 5 * _SHOWN_HITS + report["observed"]["events_left_out"]
    return [*lines, *([f"- and {more} more"] if more > 0 else [])]


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def _line(text: str) -> str:
    """Texts of others cannot end a line, a cell or begin a mark-up."""
    printable = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return printable.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
