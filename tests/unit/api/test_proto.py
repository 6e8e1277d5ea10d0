"""The proto: generated code is that of the source, and the surface is frozen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, text_format
from singularityd.api.v1 import node_pb2

ROOT = Path(__file__).parents[3]
GENERATED = ROOT / "daemon/singularityd/api/v1"
GOLDEN = ROOT / "tests/data/api/node.descriptor.golden"


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run([sys.executable, str(ROOT / "tools/proto.py"), str(tmp_path)], check=True, capture_output=True, timeout=120)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"node_pb2.py", "node_pb2_grpc.py", "node_pb2.pyi", "node_pb2_grpc.pyi"} <= made.keys()
    for name, text in made.items():
        assert text == (GENERATED / name).read_text(), f"{name} is not that of node.proto: make proto"


def test_the_descriptor_is_frozen() -> None:
    descriptor = descriptor_pb2.FileDescriptorProto()
    node_pb2.DESCRIPTOR.CopyToProto(descriptor)
    text = text_format.MessageToString(descriptor)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "the API differs; if that is meant, say so in CHANGELOG.md and run with UPDATE_GOLDEN=1"


def test_every_enum_begins_with_unspecified() -> None:
    for name, enum in node_pb2.DESCRIPTOR.enum_types_by_name.items():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED"), name


def test_an_unknown_rank_is_absent() -> None:
    for message, field in (("Rank", "rank"), ("TopRow", "rank"), ("Event", "rank"), ("InjectRequest", "rank")):
        assert node_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name[field].has_presence, (message, field)
