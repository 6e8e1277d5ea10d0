"""`singularityctl audit verify`: exit codes and words; no daemon is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from singularityd.api import chain

from .fake import FakeClient, ask


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "front" / "audit.jsonl"
    path.parent.mkdir()
    link, lines = chain.Link(), b""
    for number in range(3):
        line, link = chain.line(link, {"who": "alice", "object": f"f{number}"})
        lines += line
    path.write_bytes(lines)
    return path


def test_a_whole_one_by_name_and_by_default(file: Path) -> None:
    client = FakeClient()
    for words, env in (([str(file)], {}), ([], {"SINGULARITYD_STATE_DIR": str(file.parents[1])})):
        said = ask("audit", "verify", *words, client=client, env=env)
        assert said.exit_code == 0
        assert said.stdout.startswith("the audit is whole: 3 lines, numbers 1 to 3\nlast hash ")
    assert client.asked == []


def test_a_broken_one_names_the_first_broken_line(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"f1"', b'"f7"'))
    said = ask("audit", "verify", str(file))
    assert said.exit_code == 1
    assert f"{file}: line 3: the line before (number 2) is not the one that was written" in said.stderr
    said = ask("audit", "verify", str(file), "-o", "json")
    assert (said.exit_code, json.loads(said.stdout)["line"], json.loads(said.stdout)["whole"]) == (1, 3, False)


def test_one_that_cannot_be_read(tmp_path: Path) -> None:
    said = ask("audit", "verify", str(tmp_path / "none"))
    assert said.exit_code == 1
    assert "cannot be read: No such file" in said.stderr
