"""The C header and its Python mirror agree, field by field: offsets and sizes as a C compiler lays them out."""

from __future__ import annotations

import ctypes as c
import re
import subprocess

import pytest
from singularityd.kernel import abi, loader

HEADER = loader.program_sources() / "singularity.h"
MIRROR = {
    "site": abi.Site,
    "layout": abi.Layout,
    "stat_key": abi.StatKey,
    "stat": abi.Stat,
    "inflight_key": abi.InflightKey,
    "inflight": abi.Inflight,
    "comm_key": abi.CommKey,
    "arrival": abi.ArrivalSlot,
    "comm": abi.Comm,
    "group_key": abi.GroupKey,
    "fault": abi.FaultEntry,
    "held": abi.Held,
    "event": abi.KernelEvent,
    "settings": abi.Settings,
}


def c_text() -> str:
    return HEADER.read_text().replace("#include <uapi/linux/ptrace.h>", "")


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """`struct` -> size, `struct.field` -> offset, by gcc."""
    place = tmp_path_factory.mktemp("abi")
    types = "".join(
        f"typedef {kind} {name};\n"
        for name, kind in (
            ("u8", "unsigned char"),
            ("u16", "unsigned short"),
            ("u32", "unsigned int"),
            ("u64", "unsigned long long"),
            ("s32", "int"),
        )
    )
    lines = []
    for name, mirror in MIRROR.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field, *_ in mirror._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {field}));')
    source = place / "layout.c"
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n{types}{c_text()}\nint main(void) {{ {' '.join(lines)} return 0; }}\n")
    subprocess.run(["gcc", "-o", str(place / "layout"), str(source)], check=True)
    out = subprocess.run([str(place / "layout")], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


@pytest.mark.parametrize("name", MIRROR)
def test_struct_agrees(layout: dict[str, int], name: str) -> None:
    mirror = MIRROR[name]
    assert layout[name] == c.sizeof(mirror)
    for field, *_ in mirror._fields_:
        assert layout[f"{name}.{field}"] == getattr(mirror, field).offset, field


def test_every_struct_of_the_header_is_mirrored() -> None:
    assert set(re.findall(r"^struct (\w+) \{", c_text(), re.MULTILINE)) == set(MIRROR)


def test_constants_agree() -> None:
    defines = dict(re.findall(r"#define (\w+) (\d+)", c_text()))
    assert (int(defines["SITES"]), int(defines["BUCKETS"]), int(defines["ARRIVALS"])) == (abi.SITES, abi.BUCKETS, abi.ARRIVALS)
    enums = dict(re.findall(r"\b([A-Z][A-Z_]+) = (\d+)", c_text()))
    for name, value in enums.items():
        if isinstance(getattr(abi, name, None), int):
            assert getattr(abi, name) == int(value), name
    counters = re.search(r"enum counter \{([^}]*)\}", c_text())
    assert counters is not None
    names = [name.strip().split(" = ")[0].lower() for name in counters.group(1).split(",")]
    assert tuple(names[:-1]) == abi.COUNTERS
    assert {int(enums["BACKEND_NCCL"]): "nccl", int(enums["BACKEND_GLOO"]): "gloo"} == abi.BACKENDS
    assert int(enums["OP_COMM_DESTROY"]) == abi.OP_CODES["comm_destroy"]
    assert int(enums["OP_COMM_ABORT"]) == abi.OP_CODES["comm_abort"]
