"""What is read of other processes: names that lie, processes that vanish, and no word of an environment that is not on the list."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from singularityd.kernel.procfs import IDENTITY, ProcFs, parse_environ, parse_status

HOSTILE = [b"a) R 1 1 1", b"(((", b")))", b"x y\tz", b"a\nUid:\t0", b"back\\slash", b"\\n", b"\xff\xfe\x80", b")\n(", b"Name:\t1"]


@contextmanager
def named(name: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """A process that calls itself so (PR_SET_NAME)."""
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1])); print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code, name.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.communicate()


def written_stat(root: Path, pid: int, text: bytes) -> ProcFs:
    (root / str(pid)).mkdir(parents=True, exist_ok=True)
    (root / str(pid) / "stat").write_bytes(text)
    return ProcFs(str(root))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_changes_nothing_but_the_name(name: bytes) -> None:
    procfs = ProcFs()
    with named(name) as process:
        stat, status = procfs.stat(process.pid), procfs.status(process.pid)
        assert stat is not None
        assert status is not None
        assert stat.parent == status.parent == os.getpid()
        assert stat.start_time == procfs.start_time(process.pid) > 0  # type: ignore[operator]
        assert not stat.kernel_thread
        assert stat.image[0] > 0
        assert status.uid == os.getuid()
        assert status.name == name.decode("utf-8", "replace").strip()
        assert procfs.state(process.pid) in {"S", "R", "D"}


@given(st.binary(max_size=64))
def test_any_bytes_in_the_parentheses_of_stat(tmp_path_factory: pytest.TempPathFactory, name: bytes) -> None:
    fields = b" ".join(b"%d" % number for number in range(3, 53))
    procfs = written_stat(tmp_path_factory.mktemp("proc"), 7, b"7 (" + name + b") S " + fields.partition(b" ")[2] + b"\n")
    stat = procfs.stat(7)

    assert stat is not None
    assert (stat.parent, stat.start_time, stat.image) == (4, 22, (26, 28))
    assert procfs.start_time(7) == 22
    assert procfs.state(7) == "S"


@pytest.mark.parametrize("text", [b"", b"7", b"7 (x)", b"7 (x) S 1 2 3", b"7 (x) S " + b"y " * 50, b"\0" * 100, b"7 (x S " + b"1 " * 50])
def test_half_a_stat_is_no_answer(tmp_path: Path, text: bytes) -> None:
    assert written_stat(tmp_path, 7, text).stat(7) is None
    assert written_stat(tmp_path, 7, text).start_time(7) is None


def test_a_process_that_vanished_has_no_answers() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    procfs, pid = ProcFs(), process.pid

    assert pid not in procfs.pids()
    assert procfs.read(f"{pid}/maps") is None
    assert procfs.stat(pid) is procfs.status(pid) is procfs.start_time(pid) is procfs.state(pid) is None
    assert procfs.vm_size(pid) is procfs.code_size(pid) is procfs.threads(pid) is None
    assert procfs.environ(pid) == {}


def test_a_zombie_answers_with_what_is_left() -> None:
    process = subprocess.Popen(["/bin/true"])
    procfs = ProcFs()
    deadline = time.monotonic() + 5
    while procfs.state(process.pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stat, status = procfs.stat(process.pid), procfs.status(process.pid)

    assert stat is not None
    assert stat.image == (0, 0)
    assert status is not None
    assert status.state == "Z"
    assert procfs.code_size(process.pid) is None
    assert procfs.environ(process.pid) == {}
    process.wait()


def test_a_secret_never_leaves() -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "hunter2", "RANKED": "hunter2", "rank": "hunter2", "RANK ": "hunter2", "HF_TOKEN": "hunter2"}
    environment = {**secrets, "RANK": "3", "WORLD_SIZE": "8", "MULTI": "x\nLOCAL_RANK=hunter2"}
    process = subprocess.Popen(["/bin/sleep", "30"], env=environment)
    try:
        deadline = time.monotonic() + 5
        while not Path(f"/proc/{process.pid}/environ").read_bytes():  # exec lays it down a moment after Popen returns
            assert time.monotonic() < deadline
        found = ProcFs().environ(process.pid)
    finally:
        process.kill()
        process.wait()

    assert found == {"RANK": "3", "WORLD_SIZE": "8"}


@given(st.lists(st.tuples(st.one_of(st.sampled_from(sorted(IDENTITY)).map(str.encode), st.binary(max_size=12)), st.binary(max_size=2000))))
def test_only_listed_names_and_short_values(entries: list[tuple[bytes, bytes]]) -> None:
    found = parse_environ(b"\0".join(name + b"=" + value for name, value in entries) + b"\0")

    assert found.keys() <= IDENTITY
    assert all(len(value) <= 1024 for value in found.values())


def test_the_first_of_a_name_counts_as_for_getenv() -> None:
    assert parse_environ(b"RANK=1\0RANK=2\0WORLD_SIZE\0LOCAL_RANK=\0") == {"RANK": "1", "LOCAL_RANK": ""}


def test_no_name_on_the_list_is_one_that_holds_secrets() -> None:
    assert not [name for name in IDENTITY for word in ("KEY", "TOKEN", "SECRET", "PASS", "CRED", "AUTH") if word in name]


@given(st.binary(max_size=400))
def test_any_bytes_as_status_are_an_answer_or_none(data: bytes) -> None:
    parse_status(data)
    parse_status(b"Name:\tx\nPPid:\t1\nUid:\t0\t0\nState:\tS\n" + data)


def test_status_of_a_process_in_thousands_of_groups(tmp_path: Path) -> None:
    groups = b" ".join(b"%d" % (2_000_000_000 + number) for number in range(60_000))
    text = b"Name:\tx\nState:\tS (sleeping)\nPPid:\t1\nUid:\t5\t5\nGroups:\t" + groups + b"\nNSpid:\t7\t1\nVmLib:\t 123 kB\nSigBlk:\t1\n"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_bytes(text)
    status = ProcFs(str(tmp_path)).status(7)

    assert status is not None
    assert (status.namespace_pids, status.blocked) == ((7, 1), 1)
    assert ProcFs(str(tmp_path)).code_size(7) == 123


def test_a_file_without_end_is_cut() -> None:
    assert len(ProcFs("/dev").read("zero", 100_000) or b"") == 100_000


def test_threads_and_their_status() -> None:
    procfs = ProcFs()
    threads = procfs.threads(os.getpid())

    assert threads is not None
    assert os.getpid() in threads
    status = procfs.status(os.getpid(), os.getpid())
    assert status is not None
    assert status.threads == len(threads)


def test_kernel_threads_are_known_as_such() -> None:
    procfs = ProcFs()
    found = [stat for pid in procfs.pids() if (stat := procfs.stat(pid)) and stat.kernel_thread]

    assert all(stat.image == (0, 0) for stat in found)
    own = procfs.stat(os.getpid())
    assert own is not None
    assert not own.kernel_thread


def test_boot_id() -> None:
    assert ProcFs().boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
