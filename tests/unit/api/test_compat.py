"""tools/compat.py: what breaks a client of the last release is told, what is added is not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/compat.py"
spec = importlib.util.spec_from_file_location("compat", TOOL)
assert spec is not None
assert spec.loader is not None
compat = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compat)


def released() -> FileDescriptorProto:
    return text_format.Parse(compat.RELEASED.read_text(), descriptor_pb2.FileDescriptorProto())


def message(file: FileDescriptorProto, name: str) -> descriptor_pb2.DescriptorProto:
    return next(item for item in file.message_type if item.name == name)


def field(file: FileDescriptorProto, place: str) -> FieldDescriptorProto:
    owner, name = place.split(".")
    return next(item for item in message(file, owner).field if item.name == name)


def delete(things: list, name: str) -> None:  # type: ignore[type-arg]
    del things[next(number for number, thing in enumerate(things) if thing.name == name)]


BREAKS: list[tuple[Callable[[FileDescriptorProto], object], str]] = [
    (lambda file: setattr(file, "package", "singularity.node.v2"), "package singularity.node.v1 is singularity.node.v2"),
    (lambda file: delete(file.message_type, "Library"), "message Library is gone"),
    (lambda file: delete(message(file, "Rank").field, "pid"), "field Rank.pid is gone"),
    (lambda file: setattr(field(file, "Rank.pid"), "name", "process"), "field Rank.pid is gone"),
    (lambda file: setattr(field(file, "Rank.pid"), "number", 500), "field Rank.pid: its number was 5, is 500"),
    (lambda file: setattr(field(file, "Rank.pid"), "type", 9), "field Rank.pid: was int64, is string"),
    (lambda file: setattr(field(file, "Rank.pid"), "label", 3), "field Rank.pid: was int64, is repeated int64"),
    (lambda file: field(file, "Rank.rank").ClearField("proto3_optional"), "field Rank.rank: was optional int64, is int64 of oneof _rank"),
    (lambda file: setattr(field(file, "ListRanksReply.ranks"), "type_name", ".x.Y"), "is repeated .x.Y"),
    (lambda file: delete(message(file, "StatusReply").nested_type, "ProbesEntry"), "message StatusReply.ProbesEntry is gone"),
    (lambda file: delete(file.enum_type, "RankState"), "enum RankState is gone"),
    (lambda file: file.enum_type[0].value.pop(), " is gone"),
    (lambda file: setattr(file.enum_type[0].value[1], "number", 77), "is 77"),
    (lambda file: file.service.pop(), "service "),
    (lambda file: file.service[0].method.pop(0), "method "),
    (lambda file: setattr(file.service[0].method[0], "output_type", ".x.Y"), "output_type was"),
    (lambda file: setattr(file.service[0].method[0], "client_streaming", True), "client_streaming was False, is True"),
]


@pytest.mark.parametrize(("change", "told"), BREAKS)
def test_each_way_to_break_a_client_is_told(change: Callable[[FileDescriptorProto], object], told: str) -> None:
    new = released()
    change(new)
    found = list(compat.breaks(released(), new))
    assert found
    assert any(told in line for line in found), found


def test_additions_are_fine_and_order_does_not_matter() -> None:
    new = released()
    added = message(new, "Rank").field.add()
    added.name, added.number, added.type, added.label = "colour", 900, 9, 1
    new.message_type.add().name = "More"
    value = new.enum_type[0].value.add()
    value.name, value.number = "RANK_STATE_MORE", 99
    method = new.service[0].method.add()
    method.name, method.input_type, method.output_type = "More", ".a", ".b"
    new.service.add().name = "Others"
    messages = list(new.message_type)
    del new.message_type[:]
    new.message_type.extend(reversed(messages))
    assert list(compat.breaks(released(), new)) == []


def test_the_api_of_this_checkout_keeps_what_was_released() -> None:
    run = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def test_lint_runs_it() -> None:
    assert "tools/compat.py" in (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]


def test_a_broken_api_cannot_be_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "released"
    kept.write_text(compat.RELEASED.read_text())
    monkeypatch.setattr(compat, "RELEASED", kept)
    broken = released()
    delete(broken.message_type, "Library")
    monkeypatch.setattr(compat, "current", lambda: broken)
    assert compat.main(["--release"]) == 1
    assert "Library" in capsys.readouterr().err
    assert "Library" in kept.read_text()
    added = released()
    added.message_type.add().name = "More"
    monkeypatch.setattr(compat, "current", lambda: added)
    assert compat.main(["--release"]) == 0
    assert '"More"' in kept.read_text()
    assert compat.main(["--what"]) == 64
