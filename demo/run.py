"""The demonstration: watch a training job that knows nothing of us, hold one rank's collective, and see the job go on.

    .venv/bin/python demo/run.py          (`make demo`; root, about two minutes)

Starts a daemon of its own with temporary directories and a free port, so it neither needs nor disturbs one that already runs. Everything
it starts is ended by pid. The exit code is 0 only if every step of the summary happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import reading
from processes import Process, Processes, until
from reading import Outcome, Page, Step

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CONTROL = str(BIN / "singularityctl")
RANKS = 4
HELD_RANK = 3
HOLD = 8.0
NCCL_HOLD = 5.0
SLOW_RANK, SLOW_SECONDS, SLOW_SHARE = 1, 6, 25
JOB_SECONDS = 70
SHARE = 0.6
"""A hold counts as seen when at least this share of it shows: the readings are half a second apart and begin after arming."""


class Missed(RuntimeError):
    """Raised when a step did not happen and those after it have nothing to stand on."""


class Demo:
    """The story, step by step; `outcomes` is what the summary shows."""

    def __init__(self, processes: Processes, port: int) -> None:
        self._processes, self._port = processes, port
        self.outcomes: list[Outcome] = []

    # --- telling ---------------------------------------------------------------------------------------------------------------

    def head(self, text: str) -> None:
        """A section."""
        bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
        print(f"\n{bold}{text}{plain}", flush=True)

    def show(self, text: str) -> None:
        """Indented lines."""
        for line in text.rstrip().splitlines():
            print(f"  {line}", flush=True)

    def note(self, step: str, expected: str, seen: str, ok: bool) -> bool:
        """A row of the summary."""
        self.outcomes.append(Outcome(step, expected, seen, ok))
        return ok

    def need(self, step: str, expected: str, seen: str, ok: bool) -> None:
        """A row without which the rest makes no sense."""
        if not self.note(step, expected, seen, ok):
            raise Missed(step)

    def control(self, *arguments: str, seconds: float = 30.0, shown: bool = True) -> subprocess.CompletedProcess[str]:
        """Run singularityctl and show it as a person would see it."""
        if shown:
            self.show(f"$ singularityctl {' '.join(arguments)}")
        done = self._processes.run([CONTROL, *arguments], seconds)
        if shown:
            self.show(done.stdout + done.stderr)
        return done

    def page(self) -> Page:
        """The metrics page now; an empty one while it cannot be had."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
                return Page(answer.read().decode())
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return Page("")

    # --- the steps -------------------------------------------------------------------------------------------------------------

    def start_daemon(self) -> Process:
        """The daemon, in the foreground of a background process."""
        self.head("1. The daemon")
        begun = time.monotonic()
        daemon = self._processes.start("singularityd", [str(BIN / "singularityd")])
        ready = until(30, lambda: daemon.code is not None or self.control("status", shown=False).returncode == 0)
        took = time.monotonic() - begun
        if not ready or daemon.code is not None:
            self.show(daemon.tail())
        self.need("daemon ready", "within 30 s", f"{took:.1f} s", bool(ready) and daemon.code is None)
        self.control("status")
        return daemon

    def start_job(self) -> tuple[Process, str]:
        """An ordinary job; returns it and the name that the daemon gives it."""
        self.head(f"2. An ordinary job: {RANKS} ranks under torchrun, gloo, no word about us in its script")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=demo"]
        script = [str(ROOT / "demo/train.py"), "--json", f"--seconds={JOB_SECONDS}"]
        self.show(f"$ torchrun --nproc-per-node {RANKS} demo/train.py")
        job = self._processes.start("train", [*launcher, f"--nproc-per-node={RANKS}", *script], OMP_NUM_THREADS="1")
        training = until(90, lambda: job.code is not None or reading.steps(job.text))
        if not training or job.code is not None:
            self.show(job.tail())
        self.need(
            "job trains", "a first step", "a step" if job.code is None and training else "no step", bool(training) and job.code is None
        )
        begun = time.monotonic()
        name = until(20, lambda: self.find_job(job, range(RANKS))) or ""
        self.control("ranks")
        wanted = f"ranks 0-{RANKS - 1}"
        self.need("ranks listed", wanted, f"{wanted} of job {name}, {time.monotonic() - begun:.1f} s" if name else "not all", bool(name))
        return job, name

    def find_job(self, process: Process, wanted: range) -> str:
        """The job, as the daemon names it, of a process that was started here; empty while not all its ranks are known."""
        done = self.control("ranks", "-o", "json", shown=False)
        return reading.job_with_ranks(reading.ranks(done.stdout), wanted, [member.pid for member in process.family()])

    def look(self, job: str) -> None:
        """The metrics page and the live table."""
        self.head("3. What is seen of it")
        first = self.page().by_rank(reading.CALLS, job, op="allreduce")
        until(15, lambda: _all_greater(self.page().by_rank(reading.CALLS, job, op="allreduce"), first))
        page = self.page()
        counts = page.by_rank(reading.CALLS, job, op="allreduce")
        self.show(f"$ curl -s http://127.0.0.1:{self._port}/metrics | grep allreduce")
        self.show("\n".join(line for line in page.excerpt(reading.CALLS, job, 50) if 'op="allreduce"' in line))
        rising = _all_greater(counts, first)
        seen = "calls " + ", ".join(f"{value:.0f}" for _, value in sorted(counts.items()))
        self.note("collectives counted", f"rising on {RANKS} ranks", seen, rising and len(counts) == RANKS)
        top = self.control("top", "--once")
        self.note("top", "a live table", "shown" if top.returncode == 0 else f"exit code {top.returncode}", top.returncode == 0)

    def hold(self, job: Process, name: str) -> None:
        """Hold rank 3's next collective and see who waits."""
        self.head(f"4. singularityctl inject: rank {HELD_RANK} times out for {HOLD:.0f} s")
        before = reading.steps(job.text)
        rows = reading.ranks(self.control("ranks", "-o", "json", shown=False).stdout)
        only = {str(row.get("job", "")) for row in rows} == {name}
        arguments = ("inject", "--rank", str(HELD_RANK), *(() if only else ("--job", name)), "timeout", "--for", f"{HOLD:.0f}s", "--wait")
        waited, code = self.inject(arguments, HOLD, lambda page: page.by_rank(reading.OLDEST, name))
        hits = self.page().by_rank(reading.HITS, name).get(HELD_RANK, 0.0)
        self.note(
            "fault hit",
            "exit code 0, at least 1 hit",
            f"exit code {code}, {hits:.0f} {'hit' if hits == 1 else 'hits'}",
            code == 0 and hits >= 1,
        )
        self.head("   Who waited for whom (oldest call in flight, from the metrics page while the hold lasted)")
        for rank in range(RANKS):
            role = "held" if rank == HELD_RANK else f"waits for rank {HELD_RANK}"
            self.show(f"rank {rank}   {waited.get(rank, 0.0):5.1f} s   {role}")
        others = [waited.get(rank, 0.0) for rank in range(RANKS) if rank != HELD_RANK]
        expected = f"the others wait > {HOLD * SHARE:.1f} s"
        self.note("peers waited", expected, f"{min(others):.1f} to {max(others):.1f} s", min(others) > HOLD * SHARE)
        self.after(job, name, before)

    def inject(
        self, arguments: tuple[str, ...], hold: float, look: Callable[[Page], dict[int, float]]
    ) -> tuple[dict[int, float], int | None]:
        """Run `inject --wait` and keep the reading, taken meanwhile, in which the ranks have waited longest."""
        self.show(f"$ singularityctl {' '.join(arguments)}")
        command = self._processes.start("inject", [CONTROL, *arguments], NO_COLOR="1", COLUMNS="100")
        best: dict[int, float] = {}
        deadline = time.monotonic() + hold + 30
        while command.code is None and time.monotonic() < deadline:
            now = look(self.page())
            if len(now) >= len(best) and sum(now.values()) > sum(best.values()):
                best = now
            time.sleep(0.5)
        self.show(command.text)
        return best, command.wait(1)

    def after(self, job: Process, name: str, before: list[Step]) -> None:
        """The job goes on: one long step, then ordinary ones, and the loss falls."""
        self.head("5. After the deadline")
        released = len(reading.steps(job.text))
        until(30, lambda: len(reading.steps(job.text)) >= released + 10 or job.code is not None)
        history = reading.steps(job.text)
        long = reading.longest(before, history)
        if long is not None:
            place = next(index for index, step in enumerate(history) if step == long)
            for step in history[max(0, place - 2) : place + 6]:
                self.show(
                    f"step {step.number:4d}   loss {step.loss:6.3f}   {step.seconds * 1000:6.0f} ms{'   <- held' if step == long else ''}"
                )
        held = long is not None and long.seconds > HOLD * SHARE
        self.note("one long step", f"> {HOLD * SHARE:.1f} s", f"{long.seconds:.1f} s" if long else "none", held)
        went_on = len(history) - released
        self.note("training went on", "10 steps or more", f"{went_on} steps", went_on >= 10)
        skew = self.page().by_rank(reading.SKEW, name)
        if skew:
            late = ", ".join(f"rank {rank}: {value * 1000:.1f} ms" for rank, value in sorted(skew.items()))
            self.show(f"arrival skew of the newest collective: {late}")

    def slow(self, job: Process, name: str) -> None:
        """One rank becomes a straggler, and all the ranks' steps with it."""
        self.head(f"6. A straggler: rank {SLOW_RANK} runs at {SLOW_SHARE} % of its speed for {SLOW_SECONDS} s")
        until(10, lambda: len(reading.steps(job.text)) >= 5)
        before = [step.seconds for step in reading.steps(job.text)[-20:]]
        first = len(reading.steps(job.text))
        done = self.control(
            *("inject", "--rank", str(SLOW_RANK), "--job", name, "slow", f"percent={SLOW_SHARE}%", "--for", f"{SLOW_SECONDS}s", "--wait"),
            seconds=SLOW_SECONDS + 30,
        )
        during = [step.seconds for step in reading.steps(job.text)[first:]]
        if done.returncode or not before or not during:
            self.note("straggler", "longer steps", f"exit code {done.returncode}, {len(during)} steps", False)
            return
        usual, slowed = statistics.median(before), statistics.median(during)
        seen = f"{usual * 1000:.0f} ms, then {slowed * 1000:.0f} ms"
        self.note("straggler", "steps 1.5 times as long", seen, slowed > 1.5 * usual)

    def kill(self) -> None:
        """A rank dies silently in the middle of a collective, of a job that is there to be lost."""
        self.head(f"9. A rank dies in its collective: kill, on rank {HELD_RANK} of a second job")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=lost"]
        script = [str(ROOT / "demo/train.py"), "--json", "--seconds=600"]
        job = self._processes.start("lost", [*launcher, f"--nproc-per-node={RANKS}", *script], OMP_NUM_THREADS="1")
        until(90, lambda: job.code is not None or len(reading.steps(job.text)) >= 5)
        name = until(20, lambda: self.find_job(job, range(RANKS))) or ""
        if not name:
            self.note("rank killed", "a second job", "its ranks were not listed", False)
            return
        self.control("inject", "--rank", str(HELD_RANK), "--job", name, "kill", "point=allreduce", "after=20", "--for", "20s", "--wait")
        code = job.wait(60)
        told = self.control("events", "--kind", "rank_exited", "-o", "json", shown=False).stdout
        deaths = [line for line in reading.json_lines(told) if line.get("job") == name and line.get("rank") == HELD_RANK]
        text = str(deaths[0].get("text", "")) if deaths else "no event"
        self.show(text)
        ok = "SIGKILL" in text and code not in (None, 0)
        self.note("rank killed", "SIGKILL in call 21, job ends", f"{'SIGKILL' if 'SIGKILL' in text else 'not seen'}, exit code {code}", ok)

    def finish(self, job: Process) -> None:
        """The job ends by itself, unharmed."""
        self.show("waiting for the job to end by itself ...")
        code = job.wait(JOB_SECONDS + 30)
        history = reading.steps(job.text)
        self.note("job unharmed", "ends with exit code 0", f"exit code {code}", code == 0)
        ends = f"{history[0].loss:.2f} to {history[-1].loss:.2f}" if history else "no steps"
        self.note("loss falls", "last fifth below first", ends, reading.loss_falls(history))

    def nccl(self) -> None:
        """The same on the real NCCL."""
        self.head("7. The same on the real libnccl.so.2 (no GPU: ncclAllReduce answers 4, invalid argument)")
        command = [sys.executable, str(ROOT / "demo/nccl_caller.py"), "--json", "--seconds=60"]
        self.show("$ RANK=0 WORLD_SIZE=1 python demo/nccl_caller.py")
        address = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        caller = self._processes.start("nccl", command, **address)
        name = until(20, lambda: self.find_job(caller, range(1))) or ""
        self.note("NCCL rank listed", "rank 0", f"rank 0 of job {name}" if name else "not listed", bool(name))
        if not name:
            self.show(caller.tail())
            return
        self.show(caller.text.splitlines()[0])
        before = len(reading.calls(caller.text))
        arguments = ("inject", "--rank", "0", "--job", name, "timeout", "--for", f"{NCCL_HOLD:.0f}s", "--wait")
        _, code = self.inject(arguments, NCCL_HOLD, lambda page: page.by_rank(reading.OLDEST, name))
        until(10, lambda: len(reading.calls(caller.text)) > before + 5)
        made = reading.calls(caller.text)[before:]
        late = max(made, key=lambda call: call.seconds, default=None)
        for call in made[:6]:
            self.show(f"call {call.number:4d}   result {call.result}   {call.seconds * 1000:9.2f} ms{'   <- held' if call == late else ''}")
        seen = f"exit code {code}, {late.seconds:.1f} s, result {late.result}" if late else f"exit code {code}, no call"
        ok = code == 0 and late is not None and late.result == 4 and late.seconds > NCCL_HOLD * SHARE
        self.note("NCCL call held", f"> {NCCL_HOLD * SHARE:.1f} s late, result 4", seen, ok)
        self.fail(caller, name)

    def fail(self, caller: Process, name: str) -> None:
        """Calls of the real library return what was asked for, and its own answer again afterwards."""
        self.head("8. The real libnccl.so.2 answers 6 (remote error) instead of 4, for 2 s")
        before = len(reading.calls(caller.text))
        done = self.control("inject", "--rank", "0", "--job", name, "error", "code=ncclRemoteError", "--for", "2s", "--wait", seconds=30)
        until(10, lambda: [call.result for call in reading.calls(caller.text)[-3:]] == [4, 4, 4])
        results = [call.result for call in reading.calls(caller.text)[before:]]
        turns = [result for result, last in zip(results, [0, *results], strict=False) if result != last]
        self.show(f"results in order: {turns}, {results.count(6)} calls failed")
        hits = self.page().by_rank(reading.HITS, name).get(0, 0.0)
        told = f"{results.count(6)} calls, exit code {done.returncode}"
        self.note(
            "NCCL error injected", "4, then 6, then 4 again", told, done.returncode == 0 and turns in ([4, 6, 4], [6, 4]) and hits > 1
        )

    def tell(self) -> None:
        """All of it."""
        self.start_daemon()
        job, name = self.start_job()
        self.look(name)
        self.hold(job, name)
        self.slow(job, name)
        self.finish(job)
        self.nccl()
        self.kill()


def _all_greater(now: dict[int, float], before: dict[int, float]) -> bool:
    return bool(now) and all(value > before.get(rank, 0.0) for rank, value in now.items())


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(folder: Path, port: int) -> dict[str, str]:
    """The environment of a daemon, and of its clients, that shares nothing with another one of this host."""
    for name in ("run", "state"):
        (folder / name).mkdir(mode=0o755)
    (folder / "config.toml").write_text(f"[metrics]\nport = {port}\n")
    return {
        "SINGULARITYD_RUNTIME_DIR": str(folder / "run"),
        "SINGULARITYD_STATE_DIR": str(folder / "state"),
        "SINGULARITYD_CONFIG": str(folder / "config.toml"),
    }


def main() -> int:
    """Tell the story, end everything, print the summary."""
    if os.geteuid() != 0:
        print("The demonstration needs root: it loads eBPF programs and traces processes.", file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="singularity-demo-"))
    folder.chmod(0o755)
    port = free_port()
    processes = Processes(folder, settings(folder, port))
    demo = Demo(processes, port)
    begun, whole = time.monotonic(), False
    try:
        demo.tell()
        whole = True
    except Missed as missed:
        print(f"\nStopped: {missed} did not happen. Logs: {folder}", flush=True)
    except KeyboardInterrupt:
        print("\nInterrupted.", flush=True)
    finally:
        processes.end()
    ok = whole and all(outcome.ok for outcome in demo.outcomes)
    if ok:
        shutil.rmtree(folder, ignore_errors=True)
    demo.head("Summary")
    print(reading.table(demo.outcomes))
    print(f"\n{'Every step happened' if ok else f'NOT every step happened (logs: {folder})'}; {time.monotonic() - begun:.0f} s.")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
