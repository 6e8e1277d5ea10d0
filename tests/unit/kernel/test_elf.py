"""Functions in ELF files: equal to what nm says, from any table, and nothing but ElfError from files that lie."""

from __future__ import annotations

import mmap
import os
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from singularityd.kernel import elf
from singularityd.kernel.elf import ElfError, Match, NotElf, Wanted
from singularityd.kernel.libraries import gloo, nccl

PACKAGES = Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
TORCH = PACKAGES / "torch/lib/libtorch_cpu.so"
NCCL = PACKAGES / "nvidia/nccl/lib/libnccl.so.2"
SOURCE = """
int ncclAllReduce(int a) { return a + 1; }
int ncclBroadcast(int a) { return a + 2; }
int ncclGroupEnd(void) { return 3; }
int pncclAllReduce(int a) __attribute__((alias("ncclAllReduce")));
int ncclData = 7;
int ncclMissing(void);
int other(int a) { return ncclAllReduce(a) + ncclData; }
const char banner[] = "NCCL version 9.8.7 compiled with nothing";
"""
FUNCTIONS = {"ncclAllReduce", "ncclBroadcast", "ncclGroupEnd"}


def wanted(*, exact: Sequence[bytes] = (), prefixes: Sequence[bytes] = (b"nccl",)) -> list[Wanted]:
    return [Wanted("nccl", (b"ncclAllReduce",), tuple(exact), tuple(prefixes), rb"NCCL version (\d+\.\d+\.\d+)")]


def find(path: Path, want: Sequence[Wanted] | None = None) -> list[Match]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return elf.find(descriptor, wanted() if want is None else want)
    finally:
        os.close(descriptor)


def build(folder: Path, *options: str, source: str = SOURCE, name: str = "lib.so") -> Path:
    (folder / "x.c").write_text(source)
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", "-o", name, "x.c", *options], cwd=folder, check=True)
    return folder / name


def by_nm(path: Path, *options: str) -> dict[str, int]:
    """Function -> file offset, from the addresses of nm and the segments of readelf."""
    segments = subprocess.run(["readelf", "-lW", path], check=True, capture_output=True, text=True).stdout
    loads = [tuple(int(part, 16) for part in row) for row in re.findall(r"LOAD +(0x\w+) (0x\w+) 0x\w+ (0x\w+)", segments)]
    offsets = {}
    for row in subprocess.run(["nm", *options, path], check=True, capture_output=True, text=True).stdout.splitlines():
        address, kind, name = row.split(maxsplit=2) if row[0] != " " else ("", "", "")
        if kind in {"T", "t", "W"}:
            place = int(address, 16)
            offsets[name.split("@")[0]] = next(place - start + offset for offset, start, size in loads if start <= place < start + size)
    return offsets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elf")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    return build(folder)


def test_libtorch_cpu_agrees_with_nm() -> None:
    table = gloo.TABLE
    (match,) = find(TORCH, [Wanted(table.backend, table.markers, table.exact, table.prefixes, table.version)])
    nm = by_nm(TORCH, "-D")

    assert match.origin == "dynsym"
    assert match.symbols.keys() == {name.decode() for name in {*table.exact, *table.markers} if name.decode() in nm}
    assert len(match.symbols) >= 12
    assert match.symbols == {name: nm[name] for name in match.symbols}


def test_libnccl_agrees_with_nm() -> None:
    (match,) = find(NCCL)

    assert match.symbols == {name: offset for name, offset in by_nm(NCCL, "-D").items() if name.startswith("nccl")}
    assert len(match.symbols) > 50
    assert re.fullmatch(r"2\.\d+\.\d+", match.version)
    assert nccl.TABLE.markers[0].decode() in match.symbols


def test_libnccl_by_its_symtab_agrees_with_nm() -> None:
    """As where it is a static part of another library: ten thousand C++ names hold `nccl` there."""
    descriptor = os.open(NCCL, os.O_RDONLY)
    image = elf.Image(descriptor)
    try:
        symbols = elf.StaticSymbols.of(image)
        assert symbols is not None
        found = symbols.functions([b"ncclAllReduce"], [b"nccl"])
    finally:
        image.close()
        os.close(descriptor)
    plain = {name: offset for name, offset in by_nm(NCCL).items() if re.fullmatch(r"nccl\w{0,200}", name)}

    assert found.keys() == plain.keys()
    assert {name: found[name] for name in by_nm(NCCL, "-D") if name in found} == {
        name: plain[name] for name in by_nm(NCCL, "-D") if name in found
    }


def test_large_files_take_little_time() -> None:
    everything = [Wanted(table.backend, table.markers, table.exact, table.prefixes, table.version) for table in (nccl.TABLE, gloo.TABLE)]
    for path in (TORCH, NCCL):
        took = []
        for _ in range(3):
            start = time.perf_counter()
            find(path, everything)
            took.append(time.perf_counter() - start)
        assert min(took) < 1.0, (path, took)


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_either_hash_table(tmp_path: Path, style: str) -> None:
    path = build(tmp_path, f"-Wl,--hash-style={style}")
    (match,) = find(path)

    assert match.origin == "dynsym"
    assert match.symbols == {name: by_nm(path, "-D")[name] for name in FUNCTIONS}
    assert match.version == "9.8.7"


def test_names_that_share_their_tail(library: Path) -> None:
    """The linker stores ncclAllReduce as the end of pncclAllReduce."""
    with library.open("rb") as file:
        image = elf.Image(file.fileno())
    symbols = elf.DynamicSymbols.of(image)
    assert symbols is not None
    names = image.data[symbols.start : symbols.end].split(b"\0")
    image.close()
    assert b"pncclAllReduce" in names
    assert b"ncclAllReduce" not in names

    assert find(library)[0].symbols.keys() == FUNCTIONS
    assert find(library, wanted(prefixes=(b"pnccl",)))[0].symbols.keys() == {"ncclAllReduce", "pncclAllReduce"}


def test_data_and_names_of_others_are_no_functions(library: Path) -> None:
    found = find(library, wanted(exact=(b"ncclData", b"ncclMissing", b"nothing"), prefixes=()))

    assert found[0].symbols.keys() == {"ncclAllReduce"}


def test_a_library_that_only_calls_is_no_match(tmp_path: Path) -> None:
    assert find(build(tmp_path, source="int ncclAllReduce(int); int f(void) { return ncclAllReduce(1); }")) == []


@pytest.mark.parametrize("strip", [["strip", "--strip-all"], ["strip", "--strip-debug"], ["objcopy", "--strip-section-headers"]])
def test_report_13_stripped_library(tmp_path: Path, strip: list[str]) -> None:
    path = build(tmp_path)
    nm = by_nm(path, "-D")
    if subprocess.run([*strip, path], check=False, capture_output=True).returncode:
        # An older objcopy: what sstrip does.
        data = bytearray(path.read_bytes())
        data[40:48], data[58:64] = bytes(8), bytes(6)
        path.write_bytes(data)
    (match,) = find(path)

    assert match.symbols == {name: nm[name] for name in FUNCTIONS}
    assert match.version == "9.8.7"


def test_report_13_only_what_is_exported_is_offered(tmp_path: Path) -> None:
    source = SOURCE + '__attribute__((visibility("hidden"))) int ncclInner(int a) { return a * 5; } int (*keep)(int) = ncclInner;'
    stripped = build(tmp_path, "-s", source=source)

    assert find(stripped)[0].symbols.keys() == FUNCTIONS


def test_report_2_nccl_static_inside_another_library(tmp_path: Path) -> None:
    """Hidden by the linker, as conda's libtorch_cuda has it: only .symtab knows."""
    (tmp_path / "nccl.c").write_text(SOURCE)
    subprocess.run(["gcc", "-O1", "-fPIC", "-c", "nccl.c"], cwd=tmp_path, check=True)
    subprocess.run(["ar", "rcs", "libnccl_static.a", "nccl.o"], cwd=tmp_path, check=True)
    outer = "int other(int); int torch_all_reduce(int a) { return other(a); } int ncclMissing(void) { return 0; }"
    path = build(tmp_path, "libnccl_static.a", "-Wl,--exclude-libs,ALL", source=outer, name="libtorch_cuda.so")
    assert "ncclAllReduce" not in by_nm(path, "-D")
    (match,) = find(path, wanted())

    assert match.origin == "symtab"
    assert match.version == "9.8.7"
    assert match.symbols == {name: by_nm(path)[name] for name in (*FUNCTIONS, "ncclMissing")}


def test_static_names_of_every_length_and_place(tmp_path: Path) -> None:
    """Long string tables, and more symbols than one block decodes."""
    many = "".join(f"void f{number}(void){{}}\n" for number in range(3000))
    path = build(tmp_path, "-fvisibility=hidden", source=many + SOURCE)
    old, elf._BLOCK = elf._BLOCK, 100
    try:
        (match,) = find(path)
    finally:
        elf._BLOCK = old

    assert match.origin == "symtab"
    assert match.symbols == {name: by_nm(path)[name] for name in FUNCTIONS}


def test_the_default_version_is_taken(tmp_path: Path) -> None:
    source = (
        "int one(int a) { return a; } int two(int a) { return a + 5; }\n"
        '__asm__(".symver one,ncclAllReduce@V1"); __asm__(".symver two,ncclAllReduce@@V2");'
    )
    (tmp_path / "v.map").write_text("V1 { global: ncclAllReduce; local: one; two; }; V2 { global: ncclAllReduce; } V1;")
    path = build(tmp_path, "-Wl,--version-script=v.map", source=source)

    assert find(path)[0].symbols == {"ncclAllReduce": by_nm(path)["two"]}


def test_an_indirect_function_is_none(tmp_path: Path) -> None:
    source = (
        "static int real(int a) { return a; } static void *pick(void) { return real; }\n"
        'int ncclAllReduce(int) __attribute__((ifunc("pick")));'
    )

    assert find(build(tmp_path, source=source)) == []


def test_an_executable(tmp_path: Path) -> None:
    (tmp_path / "x.c").write_text(SOURCE.replace("int ncclMissing(void);", "int main(void) { return 0; }"))
    subprocess.run(["gcc", "-static", "-o", "x", "x.c"], cwd=tmp_path, check=True)
    (match,) = find(tmp_path / "x")

    assert match.origin == "symtab"
    assert match.symbols == {name: by_nm(tmp_path / "x")[name] for name in FUNCTIONS}


def patched(library: Path, folder: Path, *changes: tuple[int, bytes]) -> Path:
    data = bytearray(library.read_bytes())
    for place, value in changes:
        data[place : place + len(value)] = value
    path = folder / "patched"
    path.write_bytes(data)
    return path


def test_aarch64_is_read(library: Path, tmp_path: Path) -> None:
    (match,) = find(patched(library, tmp_path, (18, struct.pack("<H", 183))))

    assert match.symbols.keys() == FUNCTIONS


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, b"\x7fELG"), (4, b"\x01"), (5, b"\x02"), (18, struct.pack("<H", 243)), (18, struct.pack("<H", 3))],
    ids=["magic", "ELF32", "big-endian", "riscv", "i386"],
)
def test_what_is_no_elf_of_ours_is_no_failure(library: Path, tmp_path: Path, place: int, value: bytes) -> None:
    with pytest.raises(NotElf):
        find(patched(library, tmp_path, (place, value)))


def test_a_real_32_bit_header(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x7fELF\x01\x01\x01" + bytes(9) + struct.pack("<HHI", 3, 3, 1) + bytes(100))
    with pytest.raises(NotElf):
        find(path)


@pytest.mark.parametrize("size", [0, 1, 16, 63])
def test_too_short(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x7fELF"[:size] + bytes(max(0, size - 4)))
    with pytest.raises(NotElf):
        find(path)


def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with pytest.raises(ElfError):
        elf.find(reading, wanted())
    os.close(reading)
    os.close(writing)


def test_cut_between_two_looks(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object, **__: object) -> None:
        raise ValueError("mmap length is greater than file size")

    monkeypatch.setattr(mmap, "mmap", cut)
    with pytest.raises(ElfError, match="cut"):
        find(library)


def test_wrong_section_headers_hide_nothing(library: Path, tmp_path: Path) -> None:
    """Loaders ignore them, so tools that rewrite libraries leave them wrong."""
    for value in (0, 1 << 40, (1 << 64) - 1, 3):
        (match,) = find(patched(library, tmp_path, (40, struct.pack("<Q", value))))
        assert match.symbols.keys() == FUNCTIONS


def test_a_chain_without_end(tmp_path: Path) -> None:
    path = build(tmp_path, "-Wl,--hash-style=sysv", "-s")
    data = path.read_bytes()
    row = re.search(r"HASH +\w+ (\w+) (\w+)", subprocess.run(["readelf", "-SW", path], check=True, capture_output=True, text=True).stdout)
    assert row is not None
    place, size = int(row[1], 16), int(row[2], 16)
    buckets, chains = struct.unpack_from("<II", data, place)
    assert size == 8 + 4 * (buckets + chains)
    loop = struct.pack(f"<{buckets}I", *[1] * buckets) + struct.pack(f"<{chains}I", *[1] * chains)
    with pytest.raises(ElfError, match="do not end"):
        find(patched(path, tmp_path, (place + 8, loop)))


def test_a_sparse_giant_ends_at_once(library: Path, tmp_path: Path) -> None:
    path = tmp_path / "giant"
    path.write_bytes(library.read_bytes())
    os.truncate(path, 1 << 40)
    start = time.perf_counter()

    assert find(path)[0].symbols.keys() == FUNCTIONS
    assert time.perf_counter() - start < 1


SMALL: list[bytes] = []


def small() -> bytes:
    """A small real library, made once."""
    if not SMALL:
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"elf-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        path = build(folder)
        SMALL.append(path.read_bytes())
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return SMALL[0]


def survives(data: bytes) -> None:
    """A result or an ElfError, soon."""
    descriptor = os.memfd_create("mutant")
    try:
        os.write(descriptor, data)
        start = time.perf_counter()
        try:
            for match in elf.find(descriptor, wanted()):
                assert all(0 <= offset < len(data) for offset in match.symbols.values())
        except ElfError:
            pass
        assert time.perf_counter() - start < 2
    finally:
        os.close(descriptor)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=8)), max_size=12))
@example([(40, b"\xff" * 8)])
@example([(54, b"\0\0\xff\xff")])
def test_mutated_anywhere(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(small())
    for place, value in changes:
        place %= len(data)
        data[place : place + len(value)] = value
    survives(bytes(data))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 40))
def test_mutated_where_it_counts(seed: int, number: int) -> None:
    """In headers, the dynamic section and the tables, by values that parsers stumble over."""
    choose = random.Random(seed)
    data = bytearray(small())
    values = [0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1, len(data), len(data) - 1, 24, 64]
    spans = [(16, 64), (64, 0x400), (0, 0x1000), (len(data) - 2048, len(data)), (0, len(data))]
    for _ in range(number):
        begin, end = choose.choice(spans)
        width = choose.choice([1, 2, 4, 8])
        place = choose.randrange(begin, end - 8)
        data[place : place + width] = (choose.choice(values) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    survives(bytes(data))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 20))
def test_truncated(size: int) -> None:
    survives(small()[: size % len(small())])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_an_elf_header_and_anything(rest: bytes) -> None:
    survives(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, 62) + rest)


def test_code_at(library: Path) -> None:
    descriptor = os.open(library, os.O_RDONLY)
    try:
        offset = find(library)[0].symbols["ncclGroupEnd"]
        assert elf.code_at(descriptor, offset) == library.read_bytes()[offset : offset + 16]
        for outside in (library.stat().st_size, library.stat().st_size - 3, 1 << 62, 1 << 70, -1):
            with pytest.raises(ElfError):
                elf.code_at(descriptor, outside)
    finally:
        os.close(descriptor)


def test_file_key_changes_with_the_content(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    keys = []
    for content in (b"one", b"other"):
        path.write_bytes(content)
        with path.open("rb") as file:
            keys.append(elf.file_key(file.fileno()))

    assert keys[0] != keys[1]
    assert keys[0][:2] == keys[1][:2]
