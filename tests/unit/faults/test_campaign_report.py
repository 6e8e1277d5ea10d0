"""The drill report is the same text for the same run."""

import json
import os
from pathlib import Path

import pytest
from singularityd.faults.campaign import report
from singularityd.faults.campaign.plan import Planned
from singularityd.faults.campaign.record import Outcome, Run, Seen
from singularityd.model import Event, Fault, FaultSpec

DATA = Path(__file__).parents[2] / "data" / "drill"
SPECS = [
    FaultSpec(pattern="timeout", rank=rank, point="allreduce", milliseconds=200, duration=5.0, seed=9, reason="why") for rank in (1, 3, 2)
]
FAULT = Fault(
    id="f7",
    spec=SPECS[0],
    state="ended",
    job="j",
    pid=42,
    mechanism="ptrace",
    who="uid 0 (campaign c3)",
    created_at=1002.0,
    armed_at=1002.1,
    ended_at=1007.1,
    hits=1,
    seen=90,
    ending="deadline",
    campaign="c3",
)
RUN = Run(
    id="c3",
    name="nightly | <b>`x`</b>",
    job="j",
    seed=7,
    who="uid 0",
    reason="why",
    state="ended",
    text="",
    planned=tuple(
        Planned(index=index, at_ms=at, spec=spec) for index, (at, spec) in enumerate(zip((2000, 9000, 50_000), SPECS, strict=True))
    ),
    ranks=(0, 1, 2, 3),
    started_at=1000.0,
    ended_at=1020.5,
    ending="stopped by uid 0",
    outcomes=(Outcome(index=0, at=1002.0, fault="f7"), Outcome(index=1, at=1009.0, refused="rank 3 exited", code="no_such_rank")),
    events=(
        Event(
            kind="fault_hit", at=1002.5, text="fault f7 hit\nallreduce", job="j", rank=1, op="allreduce", fault="f7", fields={"index": "12"}
        ),
        Event(kind="fault_held", at=1002.5, text="thread 43 is held", job="j", rank=1, fault="f7"),
        Event(kind="rank_exited", at=1008.0, text="rank 3 of job j exited: killed by SIGKILL", job="j", rank=3),
    ),
    seen=(Seen(rank=1, samples=20, calls=900, calls_a_second=45.0, oldest_in_flight=0.2, longest_standstill=1.0),),
)
REPORT = report.build(RUN, [FAULT])


@pytest.mark.parametrize(("name", "text"), [("report.md", report.markdown(REPORT)), ("report.json", report.as_json(REPORT))])
def test_the_text_is_the_golden_one(name, text):
    path = DATA / f"{name}.golden"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; if that is meant, say so in CHANGELOG.md and run with UPDATE_GOLDEN=1"


def test_what_was_refused_or_never_reached_is_told_apart():
    assert [one["outcome"] for one in REPORT["injected"]] == ["ended", "refused", "not reached"]
    assert REPORT["injected"][0]["hit_calls"][0]["op"] == "allreduce"
    assert json.loads(report.as_json(REPORT))["observed"]["by_kind"] == {"fault_held": 1, "fault_hit": 1, "rank_exited": 1}


def test_texts_of_others_make_no_lines_and_no_markup():
    lines = report.markdown(REPORT).splitlines()
    assert lines[0] == "# Drill c3: nightly \\| &lt;b>\\`x\\`&lt;/b>"
    assert not any(line.startswith("allreduce") for line in lines)
