"""Which mapped files are looked into."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel import maps


def line(name: str, *, mode: str = "r-xp", device: str = "fe:01", inode: int = 1234, at: str = "7f0000001000-7f0000002000") -> bytes:
    return f"{at} {mode} 00000000 {device} {inode} ".ljust(73).encode() + name.encode() + b"\n"


def paths(data: bytes) -> list[str]:
    return [file.path for file in maps.parse(data)]


def test_one_line_in_full() -> None:
    (file,) = maps.parse(line("/lib/libnccl.so.2", at="00401000-7f0000002000"))

    assert file == maps.MappedFile(0xFE << 20 | 1, 1234, "/lib/libnccl.so.2", False, "401000-7f0000002000")


@pytest.mark.parametrize("mode", ["r--p", "rw-p", "---p", "rw-s"])
def test_only_code_counts(mode: str) -> None:
    assert maps.parse(line("/lib/x.so", mode=mode)) == []


@pytest.mark.parametrize("mode", ["r-xp", "rwxp", "--xp", "r-xs"])
def test_all_code_counts(mode: str) -> None:
    assert paths(line("/lib/x.so", mode=mode)) == ["/lib/x.so"]


@pytest.mark.parametrize("name", ["[vdso]", "[anon:x]", "/dev/zero (deleted)", "/SYSV00000000 (deleted)", "anon_inode:[perf_event]", ""])
def test_what_is_no_file(name: str) -> None:
    assert maps.parse(line(name)) == []


def test_no_inode_no_file() -> None:
    assert maps.parse(line("/lib/x.so", inode=0)) == []


@pytest.mark.parametrize("name", ["/dev/shm/env/lib/libnccl.so.2", "/SYSVIEW/libnccl.so.2", "/dev/libnccl.so.2", "/dev/zero/x.so"])
def test_a_library_is_found_wherever_it_lies(name: str) -> None:
    """Whole environments are unpacked to /dev/shm; what /dev is, is up to the process's mounts."""
    assert paths(line(name)) == [name]


def test_deleted() -> None:
    (file,) = maps.parse(line("/lib/x.so (deleted)"))

    assert (file.path, file.deleted) == ("/lib/x.so", True)


def test_memfd() -> None:
    (file,) = maps.parse(line("/memfd:libnccl.so.2 (deleted)", device="00:01", inode=77))

    assert (file.device, file.inode, file.path, file.deleted) == (1, 77, "/memfd:libnccl.so.2", True)


def test_spaces_and_newlines_in_names() -> None:
    data = line("/my libs/a\\012b.so") + line("/tab\there.so", inode=2)

    assert paths(data) == ["/my libs/a\nb.so", "/tab\there.so"]


def test_a_file_is_told_once_and_two_of_one_name_twice() -> None:
    data = line("/a.so") + line("/a.so", at="7f1-7f2") + line("/a.so", inode=5) + line("/a.so", device="fe:02")

    assert len(maps.parse(data)) == 3


def test_a_name_of_other_bytes_survives() -> None:
    data = line("/x").replace(b"/x", b"/\xff\xfe.so")

    assert os.fsencode(maps.parse(data)[0].path) == b"/\xff\xfe.so"


def test_a_big_process_is_read_quickly() -> None:
    data = b"".join(line(f"/lib/{number}.so", inode=number + 1) + line("", mode="rw-p", inode=0) * 3 for number in range(500))
    assert data.count(b"\n") == 2000
    took = []
    for _ in range(5):
        start = time.perf_counter()
        found = maps.parse(data)
        took.append(time.perf_counter() - start)

    assert len(found) == 500
    assert min(took) < 0.05


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for file in maps.parse(line("/a.so") + data + b"\n" + line("/b.so")):
        assert file.inode > 0


def test_the_kernel_writes_what_is_parsed(tmp_path: Path) -> None:
    """A name with a newline, deleted: by the real file."""
    path = tmp_path / "a\nb (deleted)"
    path.write_bytes(b"\x90" * 4096)
    descriptor = os.open(path, os.O_RDONLY)
    inode = os.fstat(descriptor).st_ino
    mapping = mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
    path.unlink()
    found = {file.inode: file for file in maps.parse(Path("/proc/self/maps").read_bytes())}
    mapping.close()
    os.close(descriptor)

    assert found[inode].path == str(path)
    assert found[inode].deleted
