"""A drill on a live process: planned, run, journaled, reported, recorded, stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from conftest import Daemon, until

FILE = """
name = "two holds"
job = "{job}"
duration = "8s"
settle = "1s"
seed = 7
reason = "rehearsal"
[[fault]]
at = "1s"
rank = 0
pattern = "timeout"
for = "2s"
options = {{ point = "allreduce", ms = 400, count = 2 }}
[[fault]]
at = "5s"
ranks = "all"
pattern = "timeout"
for = "2500ms"
"""


def test_a_drill_from_its_plan_to_its_report(daemon: Daemon, workshop: Any, tmp_path: Path) -> None:
    caller = workshop.call(workshop.library(), 3000, pause=0.02)
    workshop.begin(caller)
    drill = tmp_path / "drill.toml"
    drill.write_text(FILE.format(job=caller.job))

    planned = daemon.json("drill", "plan", str(drill))
    assert [(one["at"], one["rank"]) for one in planned["planned"]] == [(1.0, 0), (5.0, 0)]
    assert daemon.json("faults", "--history")["faults"] == []

    began = daemon.json("drill", "run", str(drill))
    second = daemon.ctl("drill", "run", str(drill))
    assert second.returncode == 1
    assert began["id"] in second.stderr

    ended = until(lambda: (one := daemon.json("drill", "list")["drills"][0])["state"] == "ended" and one, 40)
    assert ended["ending"] == "done"
    faults = {fault["id"]: fault for fault in daemon.json("faults", "--history")["faults"]}
    mine = [faults[one["fault"]] for one in ended["planned"]]
    assert {fault["campaign"] for fault in mine} == {began["id"]}
    assert mine[0]["hits"] == 2

    report = json.loads(daemon.ctl("drill", "report", began["id"], "-o", "json").stdout)
    first = report["injected"][0]
    assert (first["hits"], first["mechanism"], first["reason"]) == (2, "ptrace", "rehearsal")
    assert len(first["hit_calls"]) == 2
    assert report["observed"]["by_kind"]["fault_held"] >= 3
    (seen,) = report["observed"]["ranks"]
    assert seen["calls"] > 20
    assert seen["oldest_in_flight"] > 0.3
    assert "# Drill" in daemon.ctl("drill", "report", began["id"]).stdout

    again = tmp_path / "again.toml"
    # A record names no job; here others may run beside ours.
    again.write_text(f'job = "{caller.job}"\n' + daemon.ctl("drill", "record", "--campaign", began["id"]).stdout)
    replay = daemon.json("drill", "plan", str(again))
    assert [(one["rank"], one["options"]) for one in replay["planned"]] == [(one["rank"], one["options"]) for one in ended["planned"]]


def test_clear_all_ends_a_drill_and_a_rank_that_disappears_is_an_outcome(daemon: Daemon, workshop: Any, tmp_path: Path) -> None:
    caller = workshop.call(workshop.library(), 3000, pause=0.02)
    workshop.begin(caller)
    drill = tmp_path / "drill.toml"
    drill.write_text(FILE.format(job=caller.job))

    began = daemon.json("drill", "run", str(drill))["id"]
    until(lambda: daemon.json("faults")["faults"], 10)
    assert daemon.ctl("clear", "all").returncode == 0
    ended = daemon.json("drill", "stop", began)
    assert "cleared" in ended["ending"]
    assert daemon.json("faults")["faults"] == []

    gone = FILE.format(job=caller.job) + "[stop]\nwhen = []\n"
    drill.write_text(gone)
    began = daemon.json("drill", "run", str(drill))["id"]
    time.sleep(0.2)
    caller.process.kill()
    ended = until(lambda: (one := daemon.json("drill", "list")["drills"][0])["state"] == "ended" and one, 40)
    assert ended["id"] == began
    assert ended["ending"] == "done"
    assert all("exited" in one["refused"] or one["fault"] for one in ended["planned"])
    assert any(one["refused"] for one in ended["planned"])
