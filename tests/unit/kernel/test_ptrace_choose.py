"""Which process may be traced, and by which signal, told from a written /proc."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import choose

PID, START = 700, 4321
URG, WINCH = 1 << (signal.SIGURG - 1), 1 << (signal.SIGWINCH - 1)


class Tree:
    """A /proc with one process, and others by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.procfs = ProcFs(str(root))
        self.process(PID, "python")
        (root / f"{PID}/stat").write_text(f"{PID} (python) S 1 " + " ".join(["0"] * 17) + f" {START} 0\n")
        self.thread(PID)

    def process(self, pid: int, name: str, **lines: object) -> None:
        self._status(self.root / str(pid), name, **lines)

    def thread(self, tid: int, **lines: object) -> None:
        (self.root / f"{PID}/task/{tid}/fd").mkdir(parents=True, exist_ok=True)
        self._status(self.root / f"{PID}/task/{tid}", "python", **lines)

    def descriptor(self, tid: int, number: int, link: str, information: str) -> None:
        (self.root / f"{PID}/task/{tid}/fd/{number}").symlink_to(link)
        (self.root / f"{PID}/task/{tid}/fdinfo").mkdir(exist_ok=True)
        (self.root / f"{PID}/task/{tid}/fdinfo/{number}").write_text(information)

    @staticmethod
    def _status(
        directory: Path, name: str, *, state: str = "S (sleeping)", tracer: int = 0, blocked: int = 0, ignored: int = 0, caught: int = 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / "status.new"
        temporary.write_text(
            f"Name:\t{name}\nState:\t{state}\nPPid:\t1\nTracerPid:\t{tracer}\nUid:\t0\t0\t0\t0\nThreads:\t1\n"
            f"SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
        temporary.rename(directory / "status")

    def refusal(self, pid: int = PID, start_time: int = START) -> choose.Refusal | None:
        return choose.refusal(self.procfs, pid, start_time)

    def choose(self) -> int | choose.Refusal:
        return choose.choose(self.procfs, PID)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_nothing_stands_against_an_ordinary_rank(tree: Tree) -> None:
    assert tree.refusal() is None
    assert tree.choose() == signal.SIGURG


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()])
def test_ourselves(tree: Tree, pid: int) -> None:
    refused = tree.refusal(pid)
    assert refused is not None
    assert refused.code == "not_allowed"


def test_gone(tree: Tree) -> None:
    for refused in (tree.refusal(PID + 1), tree.refusal(start_time=START + 1)):
        assert refused is not None
        assert refused.code == "rank_gone"


def test_a_zombie_is_gone_but_not_while_another_thread_lives(tree: Tree) -> None:
    tree.process(PID, "python", state="Z (zombie)")
    tree.thread(PID, state="Z (zombie)")
    refused = tree.refusal()
    assert refused is not None
    assert refused.code == "rank_gone"
    tree.thread(701)
    assert tree.refusal() is None


def test_the_other_tracer_is_named(tree: Tree) -> None:
    tree.process(PID, "python", tracer=900)
    tree.process(900, "gdb")
    refused = tree.refusal()
    assert refused is not None
    assert refused.code == "traced_by_another"
    assert "gdb (pid 900)" in refused.text


@pytest.mark.parametrize("scope", ["0", "1", "2", "3"])
def test_yama(tree: Tree, scope: str) -> None:
    directory = tree.root / "sys/kernel/yama"
    directory.mkdir(parents=True)
    (directory / "ptrace_scope").write_text(scope + "\n")
    refused = tree.refusal()
    assert (refused is not None) == (scope == "3")
    assert refused is None or (refused.code == "cannot_stop" and "ptrace_scope" in refused.text)


@pytest.mark.parametrize(("caught", "chosen"), [(0, signal.SIGURG), (URG, signal.SIGWINCH), (WINCH, signal.SIGURG)])
def test_a_handled_signal_is_left_to_the_program(tree: Tree, caught: int, chosen: int) -> None:
    tree.process(PID, "python", caught=caught)
    assert tree.choose() == chosen


def test_an_ignored_signal_can_be_used(tree: Tree) -> None:
    tree.process(PID, "python", ignored=URG)
    assert tree.choose() == signal.SIGURG


def test_one_thread_that_blocks_is_enough(tree: Tree) -> None:
    tree.thread(701)
    tree.thread(702, blocked=URG)
    assert tree.choose() == signal.SIGWINCH


def test_a_refusal_says_why_for_each_signal(tree: Tree) -> None:
    tree.process(PID, "python", caught=WINCH)
    tree.thread(702, blocked=URG)
    refused = tree.choose()
    assert isinstance(refused, choose.Refusal)
    assert refused.code == "cannot_stop"
    assert "SIGURG is blocked by thread 702" in refused.text
    assert "SIGWINCH is handled by the program" in refused.text


def test_what_is_handled_is_refused_at_once(tree: Tree) -> None:
    tree.process(PID, "python", caught=URG | WINCH)
    began = time.monotonic()
    assert isinstance(tree.choose(), choose.Refusal)
    assert time.monotonic() - began < 0.2


def test_a_thread_that_ends_and_blocks_everything_counts_for_nothing(tree: Tree) -> None:
    tree.thread(702, blocked=URG | WINCH, state="Z (zombie)")
    assert tree.choose() == signal.SIGURG


def test_a_thread_that_blocks_everything_for_a_moment_is_waited_for(tree: Tree) -> None:
    """As the C library does while it makes a thread."""
    tree.thread(702, blocked=(1 << 64) - 1)
    timer = threading.Timer(0.05, tree.thread, (702,))
    timer.start()
    assert tree.choose() == signal.SIGURG
    timer.join()


@pytest.mark.parametrize("leader", ["S (sleeping)", "Z (zombie)"])
def test_a_signalfd_reads_the_signal(tree: Tree, leader: str) -> None:
    """A zombie leader has no descriptors; those of the process are then seen through another thread."""
    tree.thread(PID, state=leader)
    tree.thread(701)
    for tid in (PID, 701) if leader.startswith("S") else (701,):
        tree.descriptor(tid, 5, "anon_inode:[eventfd]", f"sigmask:\t{WINCH:016x}\n")
        tree.descriptor(tid, 6, "anon_inode:[signalfd]", f"pos:\t0\nsigmask:\t{URG:016x}\n")
    assert tree.choose() == signal.SIGWINCH
