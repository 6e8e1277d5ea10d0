"""The unit, applied by hand (sandbox.py): with exactly its capabilities, system calls and file system the daemon does all it is for."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import sandbox
from conftest import ROOT, Daemon, threads_run, until
from workshop import Workshop

UNIT = ROOT / "systemd/singularityd.service"
pytestmark = [
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the sandbox knows x86-64"),
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze expands the unit's groups of system calls"),
    pytest.mark.skipif(not sandbox.NAMES.exists(), reason="no numbers of system calls: install linux-libc-dev"),
]


class Sandboxed(Daemon):
    """A daemon that can do what the unit lets it do; its code lies where the front's user cannot read."""

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"PYTHONPATH": str(self.place / "code/daemon")}

    @property
    def command(self) -> list[str]:
        for folder in ("daemon", "bpf"):
            shutil.copytree(ROOT / folder, self.place / "code" / folder, dirs_exist_ok=True)
        (self.place / "code").chmod(0o700)
        return [sys.executable, str(Path(sandbox.__file__)), str(UNIT), str(self.place), *super().command]


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(tempfile, "tempdir", "/run")  # /tmp is another one for the daemon
    running = Sandboxed()
    monkeypatch.undo()
    try:
        yield running.start()
    finally:
        print(running.log.read_text() if running.log.exists() else "")  # shown where the test fails
        running.stop()


def test_the_daemon_does_all_its_work_with_what_the_unit_gives_it(daemon: Daemon) -> None:
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines() if ":\t" in line)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    dropped = {"CAP_SYS_MODULE": 16, "CAP_SYS_BOOT": 22, "CAP_NET_ADMIN": 12, "CAP_SYS_RAWIO": 17, "CAP_MKNOD": 27}
    assert not any(int(status["CapBnd"], 16) >> number & 1 for number in dropped.values())
    until(lambda: "yes      privileges" in daemon.ctl("doctor").stdout, 20)
    assert "\nno       ptrace" not in daemon.ctl("doctor").stdout
    assert (daemon.runtime / "agent.sock").stat().st_mode & 0o777 == 0o666
    assert (daemon.runtime / "control.sock").stat().st_mode & 0o777 == 0o600

    # A rank whose library lies in a /tmp that is not the daemon's, in a directory of its owner only.
    place = Path(tempfile.mkdtemp())
    place.chmod(0o700)
    shutil.chown(place, "nobody")
    shop = Workshop(place, daemon)
    try:
        started = shop.call(shop.library(), 1_000_000, pause=0.005)
        shop.begin(started)
        rank = ("--job", started.job, "--rank", "0")
        assert daemon.ctl("inject", *rank, "timeout", "--for", "400ms", "--wait").returncode == 0
        assert daemon.metric("singularity_collective_calls_total", job_id=started.job) > 0

        assert daemon.ctl("inject", *rank, "timeout", "--for", "50s").returncode == 0
        os.kill(daemon.front, signal.SIGKILL)
        until(lambda: threads_run(started.pid), 5)
        until(lambda: daemon.ctl("status").returncode == 0, 30)
        until(lambda: daemon.ctl("inject", *rank, "timeout", "--for", "300ms", "--wait").returncode == 0, 20)

        front = daemon.front
        os.kill(daemon.pid, signal.SIGHUP)  # the same settings: nothing to do, read all the same
        until(lambda: "none that a reload changes" in daemon.log.read_text(), 20)
        assert daemon.front == front
    finally:
        shop.end()
        shutil.rmtree(place)
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.port}/metrics", timeout=5) as page:
        assert page.status == 200
    assert daemon.process is not None
    daemon.process.terminate()
    assert daemon.process.wait(20) == 0
    log = daemon.log.read_text()
    assert "Traceback" not in log
    assert "EPERM" not in log
