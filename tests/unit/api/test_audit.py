"""The audit: what is told, that nothing is done untold, and that the chain shows what was done to it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from singularityd.api import chain
from singularityd.api.audit import FILES, REFUSALS_AT_ONCE, Audit
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import AuditUnavailable

from .host import Stubs, failure_of
from .test_identity import INJECT, known, proven, take


async def filled(path: Path, lines: int = 6, **more: int) -> Audit:
    audit = Audit(path, **more)
    for number in range(lines):
        await audit.write({"who": "alice", "object": f"rank={number}"})
    return audit


async def test_a_call_is_told_before_and_after_it_with_who_and_what(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        host.faults.hold = asyncio.Event()
        call = stubs.faults.Inject(INJECT, metadata=proven(await take(host.control)))
        while not host.faults.asked:
            await asyncio.sleep(0.01)
        (before,) = host.lines()
        host.faults.hold.set()
        await call
        before, after = host.lines()
    assert (before["uid"], before["pid"], before["role"], before["method"]) == (0, os.getpid(), "admin", "Faults.Inject")
    assert (before["decision"], before["outcome"], before["dry_run"]) == ("allowed", "begun", False)
    assert before["object"] == "rank=3 pattern=timeout duration=5s reason=drill"
    assert before["exe"] == os.readlink("/proc/self/exe")
    assert before["cgroup"].startswith("/")
    assert (after["decision"], after["outcome"]) == ("allowed", "done: f1")
    assert chain.check([tmp_path / "audit.jsonl"]).problem == ""


async def test_a_dry_run_and_a_failure_and_a_call_that_only_reads(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        dry = pb.InjectRequest(rank=3, pattern="timeout", dry_run=True)
        await stubs.faults.Inject(dry, metadata=proven(await take(host.control)))
        await failure_of(stubs.faults.Clear(pb.ClearRequest(id="f9"), metadata=proven(await take(host.control))))
        await stubs.ranks.List(pb.ListRanksRequest(), metadata=proven(await take(host.control)))
        lines = host.lines()
    assert [line["dry_run"] for line in lines] == [True, True, False, False]
    assert lines[1]["outcome"] == "done: nothing armed"
    assert (lines[3]["decision"], lines[3]["object"]) == ("refused", "id=f9")
    assert lines[3]["outcome"].startswith("no_such_fault: ")


@pytest.mark.parametrize("broken", ["missing", "directory", "garbage"])
async def test_an_audit_that_cannot_be_written_refuses_what_changes_something_and_nothing_else(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "state" / "audit.jsonl"
    if broken != "missing":
        path.parent.mkdir()
    if broken == "directory":
        path.mkdir()
    if broken == "garbage":
        path.write_text("this was no audit\n")
    async with known(tmp_path, audit=path) as host, Stubs(host.control) as stubs:
        status, trailing, text = await failure_of(stubs.faults.Inject(INJECT, metadata=proven(await take(host.control))))
        assert (status, trailing["singularity-code"]) == (grpc.StatusCode.FAILED_PRECONDITION, "audit_unavailable")
        assert "cannot be written" in text
        assert host.faults.asked == []
        assert (await stubs.ranks.List(pb.ListRanksRequest(), metadata=proven(await take(host.control)))).ranks


async def test_a_full_disk_refuses_and_the_chain_goes_on_when_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    audit = await filled(path, 2)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]) if data.startswith(b'{"n"') else write(fd, data))
    with pytest.raises(AuditUnavailable, match="no space left"):
        await audit.write({"who": "bob"})
    monkeypatch.setattr(os, "write", write)
    await audit.write({"who": "carol"})
    audit.close()
    assert chain.check([path]).problem == ""
    assert [json.loads(line).get("who") for line in path.read_text().splitlines()] == ["alice", "alice", None, "carol"]


async def test_a_line_that_a_crash_tore_is_taken_away_and_told(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    (await filled(path, 3)).close()
    path.open("ab").write(b'{"n":4,"prev"')
    assert chain.check([path]).line == 4
    (await filled(path, 1)).close()
    verdict = chain.check([path])
    assert (verdict.problem, verdict.lines) == ("", 5)
    assert "13 bytes was removed" in path.read_text().splitlines()[3]


async def test_rotation_keeps_the_chain_over_files_and_restarts(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for _ in range(3):
        (await filled(path, 20, largest=1000)).close()
    files = chain.family(path)
    assert len(files) > 5
    verdict = chain.check(files)
    assert (verdict.problem, verdict.lines, verdict.first) == ("", 60, 1)
    files[2].unlink()
    assert "were removed" in chain.check(chain.family(path)).problem


async def test_old_files_go_and_the_rest_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    (await filled(path, 100, largest=1000, files=3)).close()
    assert len(chain.family(path)) == 4
    verdict = chain.check(chain.family(path))
    assert verdict.problem == ""
    assert verdict.first > 1
    assert verdict.last.number == 100
    assert FILES > 3


async def test_refusals_do_not_fill_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    for _ in range(REFUSALS_AT_ONCE + 500):
        await audit.refused({"who": "unknown"})
    await audit.write({"who": "alice"})
    audit.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) < REFUSALS_AT_ONCE + 200
    assert len(lines) + sum(line.get("refusals_not_told", 0) for line in lines) == REFUSALS_AT_ONCE + 501


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "changed": (lambda lines: [*lines[:2], lines[2].replace(b"alice", b"mally"), *lines[3:]], 4),
    "removed": (lambda lines: [*lines[:2], *lines[3:]], 3),
    "first removed": (lambda lines: lines[1:], 1),
    "reordered": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3),
    "cut within": (lambda lines: [*lines[:2], lines[2][:30] + b"\n", *lines[3:]], 3),
    "cut at the end": (lambda lines: [*lines[:5], lines[5][:-1]], 6),
    "twice": (lambda lines: [*lines[:2], lines[1], *lines[2:]], 3),
    "no json": (lambda lines: [*lines[:2], b"[" * 60000 + b"\n", *lines[2:]], 3),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_was_done_to_the_file_is_found_at_its_first_line(tmp_path: Path, change: str) -> None:
    path = tmp_path / "audit.jsonl"
    (await filled(path)).close()
    assert chain.check([path]).problem == ""
    how, line = CHANGES[change]
    path.write_bytes(b"".join(how(path.read_bytes().splitlines(keepends=True))))
    verdict = chain.check([path])
    assert (verdict.line, bool(verdict.problem)) == (line, True)


@given(st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_changed_byte_before_the_last_line_stays_unseen(tmp_path: Path, data: st.DataObject) -> None:
    path, link, lines = tmp_path / "audit.jsonl", chain.Link(), b""
    for number in range(5):
        last, link = chain.line(link, {"object": number})
        lines += last
    place = data.draw(st.integers(0, len(lines) - len(last) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda one: one != lines[place]))
    path.write_bytes(lines[:place] + bytes([byte]) + lines[place + 1 :])
    assert chain.check([path]).problem
