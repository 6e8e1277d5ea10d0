"""The holder against a real process: it holds what was hit, nothing else notices, and whoever dies, nobody stays stopped."""

from __future__ import annotations

import contextlib
import ctypes as c
import mmap
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from singularityd.kernel import abi
from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import calls, holder, registers

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
PROCFS = ProcFs()
ORDERS = [
    "READY",
    "WOKEN",
    "USR1",
    "RT_COUNT",
    "RT_VALUE",
    "RT_CODE",
    "RT_SENDER",
    "URG",
    "CHURN",
    "CHURNED",
    "FORK",
    "FORKED",
    "EXEC",
    "LEAVE",
    "SPAWN",
    "SPAWNED",
    "CLONE",
    "ROUNDS",
    "CALLED",
    "RETURNED",
    "CALL",
    "LOW",
]
"""As in holder_target.c."""
SLOTS = 1024
PATIENCE = 10.0
_libc = c.CDLL(None, use_errno=True)
_TGKILL = 131 if os.uname().machine == "aarch64" else 234


def until(true: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """What `true` said when it first was; fails when it never is."""
    end = time.monotonic() + patience
    while not (value := true()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
    return value


class Target:
    """The process that is traced, and its shared memory."""

    def __init__(self, program: Path, directory: Path, threads: int, *words: str) -> None:
        path = directory / f"shared{time.monotonic_ns()}"
        path.write_bytes(bytes(64 * 8 + SLOTS * 16))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)
        self.process = subprocess.Popen([str(program), str(path), str(threads), *words])
        self.pid = self.process.pid
        until(lambda: self["READY"], 30)
        self.start_time = PROCFS.start_time(self.pid) or 0

    def __getitem__(self, order: str) -> int:
        return struct.unpack_from("<Q", self._shared, ORDERS.index(order) * 8)[0]

    def __setitem__(self, order: str, value: int) -> None:
        struct.pack_into("<Q", self._shared, ORDERS.index(order) * 8, value)

    def slots(self) -> dict[int, int]:
        """Counting thread -> its count."""
        found = {}
        for slot in range(SLOTS):
            count, tid = struct.unpack_from("<QQ", self._shared, 64 * 8 + slot * 16)
            if tid:
                found[tid] = count
        return found

    def workers(self) -> list[int]:
        return [tid for tid in self.slots() if tid != self.pid]

    def moves(self, tid: int) -> bool:
        before = self.slots()[tid]
        return bool(until(lambda: self.slots()[tid] > before))

    def stands(self, tid: int) -> bool:
        before = self.slots()[tid]
        time.sleep(0.1)
        return self.slots()[tid] == before

    def all_move(self) -> bool:
        before = self.slots()
        with contextlib.suppress(AssertionError):
            return bool(until(lambda: all(self.slots()[tid] > count for tid, count in before.items()), 5))
        return False

    def statuses(self) -> list[tuple[str, int]]:
        """State and tracer of every thread."""
        found = [PROCFS.status(self.pid, tid) for tid in PROCFS.threads(self.pid) or []]
        return [(status.state, status.tracer) for status in found if status is not None]

    def is_free(self) -> bool:
        return not any(state in "tT" or tracer for state, tracer in self.statuses())

    def stopped(self) -> bool:
        return all(state in "tT" for state, _ in self.statuses())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        if self["FORKED"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self["FORKED"], signal.SIGKILL)
        self._shared.close()


class Trial:
    """One holder, and the hits it is to recognise."""

    def __init__(
        self,
        target: Target,
        *,
        milliseconds: int = 0,
        plan: holder.Plan | None = None,
        procfs: ProcFs = PROCFS,
        start_time: int | None = None,
    ) -> None:
        self.target = target
        self.marks = mmap.mmap(-1, 1 << 22)
        order = holder.HoldOrder(
            fault=7,
            pid=target.pid,
            start_time=target.start_time if start_time is None else start_time,
            plan=plan or holder.Plan(milliseconds=milliseconds),
            ours=self.take,
        )
        self.holder = holder.start(order, procfs=procfs)
        self.reports: list[holder.Report] = []

    def take(self, tid: int) -> holder.Hit | None:
        if not self.marks[tid]:
            return None
        self.marks[tid] = 0
        return holder.Hit(fault=7, at_ns=time.monotonic_ns(), ip=0, sp=0)

    def await_report(self, kind: type, *, count: int = 1, patience: float = PATIENCE) -> Any:
        def arrived() -> list[holder.Report]:
            self.reports += self.holder.read()
            found = [report for report in self.reports if isinstance(report, kind)]
            return found if len(found) >= count else []

        try:
            return until(arrived, patience)[count - 1]
        except AssertionError:
            pytest.fail(f"no {kind.__name__} but {self.reports}")

    def arm(self, seconds: float = 60) -> holder.Armed:
        self.armed: holder.Armed = self.await_report(holder.Armed, patience=20)
        self.begin_ns = time.monotonic_ns()
        self.end_ns = self.begin_ns + int(seconds * 1e9)
        self.holder.begin(self.begin_ns, self.end_ns)
        return self.armed

    def hit(self, tid: int) -> None:
        self.marks[tid] = 1
        send(self.target.pid, tid, self.armed.signal)

    def hold(self, tid: int, count: int = 1) -> None:
        self.hit(tid)
        self.await_report(holder.Held, count=count)

    def release(self) -> str:
        self.holder.release("cleared")
        return self.ended()

    def ended(self) -> str:
        ended: holder.Ended = self.await_report(holder.Ended)
        return ended.reason

    def refused(self) -> holder.Refused:
        refused: holder.Refused = self.await_report(holder.Refused)
        return refused

    def close(self) -> None:
        self.holder.kill()
        self.holder.reap()


def send(pid: int, tid: int, number: int) -> None:
    if _libc.syscall(c.c_long(_TGKILL), c.c_int(pid), c.c_int(tid), c.c_int(number)):
        raise OSError(c.get_errno(), "tgkill")


def queue(pid: int, number: int, value: int) -> None:
    _libc.sigqueue.argtypes = (c.c_int, c.c_int, c.c_void_p)
    assert _libc.sigqueue(pid, number, value) == 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target"
    subprocess.run(["gcc", "-O1", "-pthread", "-o", path, Path(__file__).with_name("holder_target.c")], check=True)
    return path


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Iterator[Callable[..., Target]]:
    targets: list[Target] = []

    def start(threads: int = 3, *words: str) -> Target:
        targets.append(Target(program, tmp_path, threads, *words))
        return targets[-1]

    yield start
    for target in targets:
        target.end()


@pytest.fixture
def trial() -> Iterator[Callable[..., Trial]]:
    trials: list[Trial] = []

    def start(target: Target, **options: Any) -> Trial:
        trials.append(Trial(target, **options))
        return trials[-1]

    yield start
    for one in trials:
        one.close()


@pytest.fixture
def armed(run: Callable[..., Target], trial: Callable[..., Trial]) -> Trial:
    """Three counting threads and a leader, all traced."""
    one = trial(run())
    one.arm()
    return one


# --- holding and letting go


def test_a_hit_thread_stands_and_only_it_until_it_is_cleared(armed: Trial) -> None:
    target = armed.target
    first, second, _ = target.workers()
    assert (armed.armed.threads, armed.armed.signal) == (4, signal.SIGURG)
    armed.hold(first)
    assert target.stands(first)
    assert target.moves(second)
    assert target.moves(target.pid)
    assert armed.release() == "cleared"
    assert armed.await_report(holder.Released).tid == first
    armed.close()
    assert target.is_free()
    assert target.all_move()


def test_every_thread_can_be_held_at_once(armed: Trial) -> None:
    for tid in armed.target.slots():
        armed.hit(tid)
    armed.await_report(holder.Held, count=4)
    assert armed.target.stopped()
    assert armed.release() == "cleared"
    armed.close()
    assert armed.target.all_move()


def test_milliseconds_let_each_thread_go_after_its_own_time_and_the_fault_goes_on(
    run: Callable[..., Target], trial: Callable[..., Trial]
) -> None:
    one = trial(run(), milliseconds=300)
    one.arm()
    first, second, _ = one.target.workers()
    one.hold(first)
    time.sleep(0.1)
    one.hold(second, count=2)
    for count, tid in ((1, first), (2, second)):
        released = one.await_report(holder.Released, count=count)
        assert released.tid == tid
        assert 300e6 <= released.held_ns < 1000e6
    assert one.target.moves(first)
    one.hold(first, count=3)
    assert one.await_report(holder.Released, count=3).tid == first
    assert one.target.all_move()


def test_the_deadline_is_kept_to_the_millisecond(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    late = []
    target = run()
    for _ in range(3):
        one = trial(target)
        one.arm(0.25)
        one.hold(target.workers()[0])
        select.select([one.holder], [], [], 5)
        late.append(time.monotonic_ns() - one.end_ns)
        assert one.ended() == "deadline"
        one.close()
        assert target.all_move()
    assert min(late) >= 0
    assert min(late) < 50e6, late


def test_a_holder_that_is_never_told_to_begin_gives_up(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Target], trial: Callable[..., Trial]
) -> None:
    monkeypatch.setattr(holder, "_IDLE", 0.3)
    one = trial(run())
    one.await_report(holder.Armed)
    assert one.ended() == "executor silent"
    one.close()
    assert one.target.is_free()


def test_a_holder_lets_go_in_time_though_nobody_reads_its_reports(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    one = trial(run(100, "tick=20000"), milliseconds=1)
    one.arm(4)
    workers = one.target.workers()
    while time.monotonic_ns() < one.end_ns - 1_000_000_000:
        for tid in workers:
            one.hit(tid)
        time.sleep(0.01)
    time.sleep(0.3)
    assert one.target.all_move()
    until(one.target.is_free)
    assert one.ended()


# --- what is not ours


def test_other_signals_arrive_unchanged(armed: Trial) -> None:
    target = armed.target
    for sent in range(1, 6):
        os.kill(target.pid, signal.SIGUSR1)
        queue(target.pid, signal.SIGRTMIN + 3, 1000 + sent)
        until(lambda sent=sent: (target["USR1"], target["RT_COUNT"]) == (sent, sent))
        assert target["RT_VALUE"] == 1000 + sent
        assert c.c_int64(target["RT_CODE"]).value == -1  # SI_QUEUE
        assert target["RT_SENDER"] == os.getpid()


def test_a_queue_of_real_time_signals_loses_none(armed: Trial) -> None:
    for value in range(200):
        queue(armed.target.pid, signal.SIGRTMIN + 3, value)
    until(lambda: armed.target["RT_COUNT"] == 200)


def test_a_signal_for_a_held_thread_waits_until_it_goes_on(armed: Trial) -> None:
    target = armed.target
    tid = target.workers()[0]
    armed.hold(tid)
    send(target.pid, tid, signal.SIGUSR1)
    time.sleep(0.1)
    assert target["USR1"] == 0
    armed.release()
    until(lambda: target["USR1"] == 1)


def test_a_genuine_urgent_signal_holds_nobody(armed: Trial) -> None:
    for tid in armed.target.slots():
        send(armed.target.pid, tid, signal.SIGURG)
    os.kill(armed.target.pid, signal.SIGURG)
    assert armed.target.all_move()
    assert armed.release() == "cleared"
    assert not [report for report in armed.reports if isinstance(report, holder.Held)]


def test_waits_in_the_kernel_are_not_disturbed(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(1, "waiters")
    until(lambda: target["ROUNDS"] == 4)
    for end in ("cleared", "deadline", "holder died"):
        one = trial(target)
        one.arm(0.3 if end == "deadline" else 60)
        one.hold(target.workers()[0])
        if end == "cleared":
            one.holder.release("")
        elif end == "holder died":
            one.holder.kill()
        assert one.ended() == end
        one.close()
    assert target.all_move()
    assert target["WOKEN"] == 0
    assert target["ROUNDS"] == 4


# --- group stops


def stop(target: Target) -> None:
    os.kill(target.pid, signal.SIGSTOP)
    until(target.stopped)
    before = target.slots()
    time.sleep(0.1)
    assert target.slots() == before


def go_on(target: Target) -> None:
    os.kill(target.pid, signal.SIGCONT)
    assert target.all_move()


def test_stop_and_continue_while_armed(armed: Trial) -> None:
    for _ in range(5):
        stop(armed.target)
        go_on(armed.target)


def test_a_stopped_rank_stays_stopped_through_arming_and_the_end(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run()
    stop(target)
    one = trial(target)
    one.arm()
    time.sleep(0.1)
    assert target.stopped()
    assert one.release() == "cleared"
    one.close()
    until(lambda: [state for state, _ in target.statuses()] == ["T"] * 4)
    go_on(target)


@pytest.mark.parametrize("kill", [False, True], ids=["cleared", "killed"])
def test_a_stop_during_a_hold_outlives_the_hold(armed: Trial, kill: bool) -> None:
    target = armed.target
    armed.hold(target.workers()[0])
    stop(target)
    if kill:
        armed.holder.kill()
    else:
        armed.release()
    armed.close()
    until(lambda: set(target.statuses()) == {("T", 0)})
    go_on(target)


def test_stop_and_continue_during_a_hold_leave_the_held_thread_held(armed: Trial) -> None:
    target = armed.target
    first, second, _ = target.workers()
    armed.hold(first)
    stop(target)
    os.kill(target.pid, signal.SIGCONT)
    assert target.moves(second)
    assert target.stands(first)
    armed.release()
    armed.close()
    assert target.all_move()


# --- threads come and go


def test_new_threads_are_traced_and_can_be_held(armed: Trial) -> None:
    target = armed.target
    old = set(target.slots())
    target["SPAWN"] = 1
    new = until(lambda: set(target.slots()) - old).pop()
    assert target.moves(new)
    armed.hold(new)
    assert target.stands(new)
    armed.release()
    armed.close()
    assert target.all_move()


def test_threads_that_come_and_go_all_the_time(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(3, "churn")
    for _ in range(10):
        one = trial(target)
        one.arm()
        first, second, _ = target.workers()
        churned = target["CHURNED"]
        one.hold(first)
        assert target.stands(first)
        assert target.moves(second)
        until(lambda churned=churned: target["CHURNED"] > churned + 20)
        assert one.release() == "cleared"
        one.close()
        assert target.is_free()
        assert target.all_move()


def test_the_leader_may_leave_first(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run()
    target["LEAVE"] = 1
    until(lambda: PROCFS.state(target.pid) == "Z")
    one = trial(target)
    one.arm()
    workers = target.workers()
    one.hold(workers[0])
    assert target.stands(workers[0])
    assert target.moves(workers[1])
    assert one.release() == "cleared"
    one.close()
    assert target.moves(workers[0])


def test_the_leader_may_leave_while_armed(armed: Trial) -> None:
    target = armed.target
    target["LEAVE"] = 1
    until(lambda: PROCFS.state(target.pid) == "Z")
    armed.hold(target.workers()[0])
    assert target.moves(target.workers()[1])
    target.process.kill()
    assert armed.ended() == "rank exited"


@pytest.mark.parametrize("order", ["FORK", "CLONE"])
def test_child_processes_are_not_traced(armed: Trial, order: str) -> None:
    armed.target[order] = 1
    child = until(lambda: armed.target["FORKED"])
    until(lambda: (status := PROCFS.status(child)) and status.tracer == 0 and status.state == "S")
    os.kill(armed.target.pid, signal.SIGKILL)
    assert armed.ended() == "rank exited"
    assert PROCFS.state(child) == "S"


@pytest.mark.parametrize("by", [1, 2], ids=["leader", "another thread"])
@pytest.mark.parametrize("held", ["nobody", "a worker"])
def test_exec_ends_the_fault(armed: Trial, by: int, held: str) -> None:
    target = armed.target
    if held == "a worker":
        armed.hold(target.workers()[0])
    target["EXEC"] = by
    assert armed.ended() == "rank exec'd"
    armed.close()
    until(lambda: (status := PROCFS.status(target.pid)) and (status.name, status.state, status.tracer) == ("sleep", "S", 0))


def test_the_rank_is_killed_while_held(armed: Trial) -> None:
    armed.hold(armed.target.workers()[0])
    armed.target.process.kill()
    assert armed.ended() == "rank exited"
    assert armed.target.process.wait(5) == -signal.SIGKILL


def longest_pause(target: Target, slot: int, going_on: Callable[[], bool]) -> int:
    """Nanoseconds during which a counter stood still."""
    longest, last, seen = 0, time.monotonic_ns(), -1
    while going_on():
        count = struct.unpack_from("<Q", target._shared, 64 * 8 + slot * 16)[0]
        now = time.monotonic_ns()
        longest = max(longest, now - last)
        if count != seen:
            last, seen = now, count
    return longest


def test_five_hundred_threads_are_armed_without_a_stall(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(500, "spin", "tick=50000")
    spinning = max(target.slots().items(), key=lambda item: item[1])[0]
    one = trial(target)
    slot = list(target.slots()).index(spinning)
    longest = longest_pause(target, slot, lambda: not one.holder.read())
    end = time.monotonic() + 0.3
    usual = longest_pause(target, slot, lambda: time.monotonic() < end)
    print(f"longest pause of a spinning thread: {longest / 1e6:.1f} ms while 502 threads are armed, {usual / 1e6:.1f} ms otherwise")
    assert longest < 500e6
    one.armed = holder.Armed(502, signal.SIGURG, 0)
    one.holder.begin(time.monotonic_ns(), time.monotonic_ns() + 60_000_000_000)
    assert {tracer for _, tracer in target.statuses()} == {one.holder.pid}
    one.hold(target.workers()[333])
    assert one.release() == "cleared"
    one.close()
    assert target.is_free()
    assert target.all_move()


# --- refusals


def test_a_debugger_that_came_first_is_named(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    for name, command in (("gdb", ["gdb", "-q", "-nx", "-p"]), ("strace", ["strace", "-o", "/dev/null", "-f", "-p"])):
        if shutil.which(name) is None:
            continue
        target = run()
        other = subprocess.Popen([*command, str(target.pid)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda target=target: all(tracer for _, tracer in target.statuses()), 30)
            refused = trial(target).refused()
            assert refused.code == "traced_by_another"
            assert f"{name} (pid {other.pid})" in refused.text
            assert name in refused.hint
        finally:
            other.kill()
            other.wait()


def test_one_thread_traced_by_another_is_enough(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    if shutil.which("strace") is None:
        pytest.fail("strace is missing: tools/setup.sh installs it")
    target = run()
    tid = target.workers()[1]
    with subprocess.Popen(["strace", "-qq", "-o", "/dev/null", "-p", str(tid)]) as other:
        until(lambda: PROCFS.status(target.pid, tid).tracer)  # type: ignore[union-attr]
        one = trial(target)
        assert f"strace (pid {other.pid})" in one.refused().text
        one.close()
        assert [tracer for _, tracer in target.statuses() if tracer] == [other.pid]
        assert target.all_move()
        other.kill()


def test_the_second_holder_is_refused_and_the_first_named(armed: Trial, trial: Callable[..., Trial]) -> None:
    refused = trial(armed.target).refused()
    assert refused.code == "traced_by_another"
    assert f"(pid {armed.holder.pid})" in refused.text
    armed.hold(armed.target.workers()[0])


@pytest.mark.parametrize(
    ("words", "chosen"),
    [(("urg",), signal.SIGWINCH), (("winch",), signal.SIGURG), (("blocking",), signal.SIGWINCH), (("signalfd",), signal.SIGWINCH)],
)
def test_the_signal_is_one_that_the_program_leaves_alone(
    run: Callable[..., Target], trial: Callable[..., Trial], words: tuple[str, ...], chosen: int
) -> None:
    one = trial(run(3, *words))
    assert one.arm().signal == chosen
    one.hold(one.target.workers()[0])
    assert one.target["URG"] == 0


def test_both_signals_taken(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    refused = trial(run(3, "urg", "winch")).refused()
    assert refused.code == "cannot_stop"
    assert "SIGURG" in refused.text
    assert "SIGWINCH" in refused.text


def test_yama_three(run: Callable[..., Target], trial: Callable[..., Trial], tmp_path: Path) -> None:
    target = run()
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("3\n")
    (tmp_path / str(target.pid)).symlink_to(f"/proc/{target.pid}")
    refused = trial(target, procfs=ProcFs(str(tmp_path))).refused()
    assert refused.code == "cannot_stop"
    assert "ptrace_scope" in refused.text


def test_another_process_under_the_same_number(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run()
    assert trial(target, start_time=target.start_time + 1).refused().code == "rank_gone"
    assert target.is_free()


def test_a_rank_that_has_ended(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run()
    target.process.kill()
    until(lambda: PROCFS.state(target.pid) == "Z")
    assert trial(target).refused().code == "rank_gone"
    target.process.wait()
    assert trial(target).refused().code == "rank_gone"


def test_ourselves(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run()
    target.pid, pid = os.getpid(), target.pid
    one = trial(target)
    target.pid = pid
    assert one.refused().code == "not_allowed"


# --- death of the holder and of its parent


class Midway(ProcFs):
    """Stops the holder when half of the threads are seized."""

    def threads(self, pid: int) -> list[int] | None:
        found = super().threads(pid) or []
        if any((status := self.status(pid, tid)) and status.tracer == os.getpid() for tid in found):
            time.sleep(600)
        return found


STATES = ("seizing", "armed", "holding")


def bring_to(one: Trial, state: str) -> None:
    target = one.target
    if state == "seizing":
        until(lambda: {tracer for _, tracer in target.statuses()} == {one.holder.pid})
        return
    one.arm()
    if state == "holding":
        for tid in target.slots():
            one.hit(tid)
        one.await_report(holder.Held, count=len(target.slots()))


def procfs_for(state: str) -> ProcFs:
    return Midway() if state == "seizing" else PROCFS


@pytest.mark.parametrize("state", STATES)
def test_kill_9_of_the_holder_lets_everything_go(run: Callable[..., Target], trial: Callable[..., Trial], state: str) -> None:
    target = run(20)
    one = trial(target, procfs=procfs_for(state))
    bring_to(one, state)
    os.kill(one.holder.pid, signal.SIGKILL)
    until(target.is_free, 1)
    assert target.all_move()
    assert one.ended() == "holder died"


@pytest.mark.parametrize("state", STATES)
def test_kill_9_of_its_parent_lets_everything_go(run: Callable[..., Target], state: str) -> None:
    target = run(20)
    reading, writing = os.pipe()
    parent = os.fork()
    if parent == 0:
        status = 1
        try:
            one = Trial(target, procfs=procfs_for(state))
            bring_to(one, state)
            os.write(writing, one.holder.pid.to_bytes(4, "little"))
            time.sleep(600)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    assert select.select([reading], [], [], 20)[0]
    child = int.from_bytes(os.read(reading, 4), "little")
    os.close(reading)
    assert {tracer for _, tracer in target.statuses()} == {child}
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(target.is_free, 1)
    assert target.all_move()
    until(lambda: PROCFS.state(child) in (None, "Z"))


def test_kill_9_of_the_holder_loses_no_signal(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run()
    sent = 0
    for _ in range(20):
        one = trial(target)
        one.arm()
        for number in range(60):
            queue(target.pid, signal.SIGRTMIN + 3, sent)
            sent += 1
            if number == 50:
                one.holder.kill()
        one.close()
    until(lambda: target["RT_COUNT"] == sent)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_terminal_or_a_service_manager_cannot_end_a_fault_by_half(armed: Trial, number: int) -> None:
    armed.hold(armed.target.workers()[0])
    os.kill(armed.holder.pid, number)
    time.sleep(0.05)
    assert armed.release() == "cleared"


# --- what a holder costs


@pytest.mark.parametrize("kernel", ["this", "before 5.9"])
def test_a_holder_keeps_no_descriptor_but_its_own(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Target], trial: Callable[..., Trial], kernel: str
) -> None:
    if kernel != "this":  # which has no close_range
        monkeypatch.setattr(holder, "_close_others", holder._close_listed)
    target = run()
    reading, writing = os.pipe()
    high = os.dup2(writing, 200)
    one = trial(target)
    one.arm()
    links = {int(name): os.readlink(f"/proc/{one.holder.pid}/fd/{name}") for name in os.listdir(f"/proc/{one.holder.pid}/fd")}
    own = [link for number, link in links.items() if number > 2]
    assert len(own) == 4, links  # the channel, twice, and both ends of the wake-up pipe
    assert os.readlink(f"/proc/self/fd/{writing}") not in own
    for number in (writing, high):
        os.close(number)
    assert os.read(reading, 1) == b""  # nobody else keeps it open
    os.close(reading)


def cpu_ticks(pid: int) -> int:
    fields = (PROCFS.read(f"{pid}/stat") or b"").rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_holder_that_holds_uses_no_processor(armed: Trial) -> None:
    for tid in armed.target.workers():
        armed.hit(tid)
    armed.await_report(holder.Held, count=3)
    before = cpu_ticks(armed.holder.pid)
    time.sleep(1)
    assert cpu_ticks(armed.holder.pid) - before <= 1


# --- delays, and all threads at once


@pytest.mark.parametrize("milliseconds", [1, 10, 100])
def test_a_delay_is_counted_from_the_hit(run: Callable[..., Target], trial: Callable[..., Trial], milliseconds: int) -> None:
    one = trial(run(), milliseconds=milliseconds)
    one.arm()
    tid = one.target.workers()[0]
    for number in range(1, 6):
        one.hit(tid)
        assert one.await_report(holder.Released, count=number).held_ns >= milliseconds * 900_000 - 200_000


def test_flap_holds_until_its_phase_ends(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    one = trial(run(), plan=holder.Plan(on=400, off=100))
    one.arm()
    one.hold(one.target.workers()[0])
    at = one.await_report(holder.Held).at_ns
    held = one.await_report(holder.Released).held_ns
    end = one.begin_ns + (at - one.begin_ns) // 500_000_000 * 500_000_000 + 400_000_000
    assert abs(at + held - end) < 100_000_000


FREEZE = holder.Plan(action=abi.ACTION_FREEZE)


def test_a_frozen_process_stands_until_the_deadline_and_goes_on(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    one = trial(run(5), plan=FREEZE)
    one.arm(1.5)
    one.await_report(holder.Held)
    before = one.target.slots()
    time.sleep(0.5)
    assert one.target.slots() == before
    assert one.ended() == "deadline"
    assert one.target.all_move()
    until(one.target.is_free)


def test_a_frozen_process_is_thawed_by_clear_and_by_the_holders_death(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(5)
    for kill in (False, True):
        one = trial(target, plan=FREEZE)
        one.arm()
        one.await_report(holder.Held)
        if kill:
            one.close()
        else:
            assert one.release() == "cleared"
        assert target.all_move()
        until(target.is_free)


def test_a_thread_made_while_freezing_stands_too(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    one = trial(run(6, "churn"), plan=FREEZE)
    one.target["CHURN"] = 1
    one.arm()
    one.await_report(holder.Held)
    assert until(lambda: all(state in "tT" for state, _ in one.target.statuses()))
    one.release()
    assert one.target.all_move()


def test_a_stopped_process_stays_stopped_through_a_freeze(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(4)
    os.kill(target.pid, signal.SIGSTOP)
    until(target.stopped)
    one = trial(target, plan=FREEZE)
    one.arm()
    one.await_report(holder.Held)
    one.release()
    time.sleep(0.2)
    assert all(state == "T" for state, _ in target.statuses())
    os.kill(target.pid, signal.SIGCONT)
    assert target.all_move()


def test_stop_during_a_freeze_outlives_it(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(4)
    one = trial(target, plan=FREEZE)
    one.arm()
    one.await_report(holder.Held)
    os.kill(target.pid, signal.SIGSTOP)
    one.release()
    until(lambda: all(state == "T" for state, _ in target.statuses()))
    os.kill(target.pid, signal.SIGCONT)
    assert target.all_move()
    until(target.is_free)


def test_a_duty_cycle_leaves_its_share(run: Callable[..., Target], trial: Callable[..., Trial]) -> None:
    target = run(2)

    def rate(seconds: float) -> float:
        before = sum(target.slots().values())
        time.sleep(seconds)
        return (sum(target.slots().values()) - before) / seconds

    full = rate(1)
    one = trial(target, plan=holder.Plan(action=abi.ACTION_DUTY, running_ppm=500_000, period=40))
    one.arm()
    until(lambda: not target.is_free())
    slowed = rate(2)
    assert 0.2 < slowed / full < 0.8
    one.holder.release("cleared")
    ended = one.await_report(holder.Ended)
    assert ended.freezes > 10
    assert target.all_move()
    until(target.is_free)


# --- skipping a call


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="breakpoint of x86-64")
@pytest.mark.parametrize("value", [0, 5, 0xFFFFFFFF, -512])
def test_a_call_is_skipped(run: Callable[..., Target], value: int) -> None:
    target = run(0)
    address = target["LOW"]
    calls.ptrace(calls.SEIZE, target.pid)
    calls.ptrace(calls.INTERRUPT, target.pid)
    os.waitpid(target.pid, 0)
    with open(f"/proc/{target.pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        code = memory.read(64)
        memory.seek(address)
        memory.write(b"\xcc")
        target["CALL"] = 1
        calls.resume(target.pid)
        _, status = os.waitpid(target.pid, 0)
        assert os.WSTOPSIG(status) == signal.SIGTRAP
        memory.seek(address)
        memory.write(code[:1])
    table = registers.registers()
    assert isinstance(table, registers.X86Registers)
    calls.get_registers(target.pid, table)
    assert table.rip == address + 1
    assert table.rdi == 41
    gadget = registers.find_ret(code, address)
    assert gadget is not None
    table.skip_call(value, entry_sp=table.rsp, gadget=gadget)
    calls.set_registers(target.pid, table)
    target["RETURNED"] = 12345
    calls.resume(target.pid)
    until(lambda: target["RETURNED"] == value & (1 << 64) - 1)
    assert target["CALLED"] == 0
    target["CALL"] = 1
    until(lambda: target["RETURNED"] == 42)
    assert target["CALLED"] == 1


# --- everything at once


@pytest.mark.parametrize("seed", range(3))
def test_after_any_mixture_nothing_is_stopped(run: Callable[..., Target], trial: Callable[..., Trial], seed: int) -> None:
    chance = random.Random(seed)
    target = run(6, "churn")
    sent = 0
    for _ in range(4):
        one = trial(target, milliseconds=chance.choice([0, 5, 50]))
        one.arm(chance.choice([0.3, 60]))
        for _ in range(60):
            act = chance.choice(["stop", "cont", "usr1", "urg", "hit", "hit", "spawn", "wait"])
            if act == "stop":
                os.kill(target.pid, signal.SIGSTOP)
            elif act == "cont":
                os.kill(target.pid, signal.SIGCONT)
            elif act == "usr1":
                queue(target.pid, signal.SIGRTMIN + 3, sent)
                sent += 1
            elif act == "urg":
                send(target.pid, chance.choice(target.workers()), signal.SIGURG)
            elif act == "hit":
                one.hit(chance.choice(target.workers()))
            elif act == "spawn":
                target["SPAWN"] = 1
            else:
                time.sleep(chance.random() * 0.02)
        if chance.random() < 0.5:
            one.holder.release("")
        else:
            one.holder.kill()
        assert one.ended() in {"cleared", "holder died", "deadline"}
        one.close()
        os.kill(target.pid, signal.SIGCONT)
        until(target.is_free)
        assert target.all_move()
    until(lambda: target["RT_COUNT"] == sent)
