"""Offsets of structure fields: the compiler's own, nothing where there are none, never late."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from singularityd.kernel import dwarf

FIELDS = ("rank", "nRanks", "commHash", "opCount")
NCCL = Path(sys.prefix) / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/nvidia/nccl/lib/libnccl.so.2"
SOURCE = """
#include <stddef.h>
struct ncclComm;
struct other { int rank; };
struct ncclComm {
    char magic[100];
    unsigned long commHash;
    struct { int rank; union { int nRanks; short half; }; };
    struct { int opCount; } inner;
    struct { long opCount; } *pointer;
    unsigned long opCount;
};
int use(struct ncclComm *comm, struct other *other) { return comm->rank + other->rank; }
size_t places[] = { offsetof(struct ncclComm, rank), offsetof(struct ncclComm, nRanks), offsetof(struct ncclComm, commHash),
                    offsetof(struct ncclComm, opCount) };
"""
MAP_NORESERVE = 0x4000
PLACES = {"rank": 112, "nRanks": 116, "commHash": 104, "opCount": 136}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def build(folder: Path, *options: str) -> Path:
    (folder / "x.c").write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "x.so", "x.c", *options], cwd=folder, check=True)
    return folder / "x.so"


@pytest.mark.parametrize("options", ["-g", "-g -gdwarf-2 -gstrict-dwarf", "-g -gdwarf-4", "-g -gdwarf-5 -O2", "-g -gz"])
def test_offsets_are_the_compilers(tmp_path: Path, options: str) -> None:
    with opened(build(tmp_path, *options.split())) as descriptor:
        found = dwarf.struct_offsets(descriptor, "ncclComm", FIELDS, 10)
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0

    assert found == PLACES


def test_fields_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    with opened(build(tmp_path, "-g")) as descriptor:
        assert dwarf.struct_offsets(descriptor, "ncclComm", ("rank", "missing", "half"), 10) == {"rank": 112, "half": 116}
        assert dwarf.struct_offsets(descriptor, "nothing", FIELDS, 10) == {}
        assert dwarf.struct_offsets(descriptor, "use", FIELDS, 10) == {}


@pytest.mark.parametrize("options", [(), ("-g", "-s")])
def test_report_13_no_debug_information(tmp_path: Path, options: tuple[str, ...]) -> None:
    with opened(build(tmp_path, *options)) as descriptor:
        assert dwarf.struct_offsets(descriptor, "ncclComm", FIELDS, 10) == {}


def test_the_real_libnccl() -> None:
    start = time.perf_counter()
    with opened(NCCL) as descriptor:
        found = dwarf.struct_offsets(descriptor, "ncclComm", FIELDS, 10)

    assert found.keys() == set(FIELDS)
    assert found["nRanks"] == found["rank"] + 4
    assert found["commHash"] % 8 == found["opCount"] % 8 == 0
    assert time.perf_counter() - start < 5


def test_a_caller_of_a_large_address_space(tmp_path: Path) -> None:
    """The limit is on what the child adds: a caller with many threads or arenas gets its answer all the same."""
    with mmap.mmap(-1, 4 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), opened(build(tmp_path, "-g")) as descriptor:
        assert dwarf.struct_offsets(descriptor, "ncclComm", FIELDS, 10) == PLACES


def test_late_is_empty_and_leaves_no_child() -> None:
    """`rank` is a word of the file and no structure: all of it would have to be walked."""
    start = time.perf_counter()
    with opened(NCCL) as descriptor:
        assert dwarf.struct_offsets(descriptor, "rank", FIELDS, 0.4) == {}

    assert 0.4 <= time.perf_counter() - start < 2
    deadline = time.monotonic() + 5
    while dwarf._dying and time.monotonic() < deadline:
        dwarf._dying[:] = [pid for pid in dwarf._dying if not dwarf._ended(pid)]
        time.sleep(0.01)
    assert not dwarf._dying


def test_the_caller_never_imports_the_parser(tmp_path: Path) -> None:
    code = (
        "import os, sys; from singularityd.kernel import dwarf\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY); print(dwarf.struct_offsets(fd, 'ncclComm', ('rank',), 10), 'elftools' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, build(tmp_path, "-g")], check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "{'rank': 112} False"


def test_a_child_that_lies_is_not_believed() -> None:
    for said in (b"", b"[]", b"null", b'{"rank": "7"}', b'{"rank": -1}', b'{"rank": true}', b'{"rank": 1e300}', b'{"x": 1}', b"\xff"):
        assert dwarf._decode(said, FIELDS) == {}
    assert dwarf._decode(b'{"rank": 8, "nRanks": 99999999999}', FIELDS) == {"rank": 8}


def test_broken_files_are_empty_or_an_answer(tmp_path: Path) -> None:
    good = build(tmp_path, "-g").read_bytes()
    choose = random.Random(5)
    for number in range(25):
        data = bytearray(good[: choose.randrange(len(good))] if number % 3 == 0 else good)
        for _ in range(choose.choice([1, 20, 400])):
            data[choose.randrange(len(data))] = choose.randrange(256)
        path = tmp_path / "broken"
        path.write_bytes(data)
        with opened(path) as descriptor:
            found = dwarf.struct_offsets(descriptor, "ncclComm", FIELDS, 1)
        assert found.keys() <= set(FIELDS)
