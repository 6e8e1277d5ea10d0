"""The daemon as a service: what its halves may do, what the service manager hears, and settings that are read again."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, threads_run, until
from workshop import Workshop


class Service(Daemon):
    """A daemon under a service manager that writes down what it hears, with a file of settings."""

    def __init__(self, *settings: str) -> None:
        super().__init__(*settings)
        self.file = self.place / "config.toml"
        self.file.write_text("")
        self._heard: list[tuple[float, str]] = []
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(self.place / "notify"))
        self._manager.setblocking(False)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "NOTIFY_SOCKET": str(self.place / "notify"),
            "WATCHDOG_USEC": "30000000",
            "SINGULARITYD_CONFIG": str(self.file),
        }

    @property
    def heard(self) -> list[tuple[float, str]]:
        """(time, datagram) of all there were, oldest first."""
        while True:
            try:
                self._heard.append((time.monotonic(), self._manager.recv(4096).decode()))
            except BlockingIOError:
                return self._heard

    def reload(self, text: str) -> str:
        """Other settings and SIGHUP; returns what the manager is told when it is over."""
        before = len([words for _, words in self.heard if words.startswith("RELOADING=1")])
        self.file.write_text(text)
        os.kill(self.pid, signal.SIGHUP)
        until(lambda: len([words for _, words in self.heard if words.startswith("RELOADING=1")]) > before, 20)
        began = next(at for at, (_, words) in reversed(list(enumerate(self.heard))) if words.startswith("RELOADING=1"))
        words = self.heard[began][1]
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        assert now - 30 < int(words.split("MONOTONIC_USEC=")[1].split()[0]) / 1e6 < now
        return str(until(lambda: next((said for _, said in self.heard[began:] if "READY=1" in said and "settings were" in said), ""), 60))

    def stop(self) -> int:
        try:
            return super().stop()
        finally:
            self._manager.close()


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    try:
        yield running.start()
    finally:
        running.stop()


def answers(host: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as page:
            return b"singularity_" in page.read()
    except OSError:
        return False


def test_the_front_has_no_capability_is_not_root_and_has_a_filter_on_every_thread(service: Service) -> None:
    front = service.front
    assert answers("127.0.0.1", service.port)  # it worked, and its threads are there
    for task in Path(f"/proc/{front}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert "0" not in fields["Uid"].split() + fields["Gid"].split()
        assert fields["Groups"].strip() == ""
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


def test_the_watchdog_is_fed_by_both_halves(service: Service) -> None:
    assert [words for _, words in service.heard if "READY=1" in words] == ["READY=1\nSTATUS=watching"]

    def fed(since: float) -> bool:
        return any(at > since and words == "WATCHDOG=1" for at, words in service.heard)

    until(lambda: fed(time.monotonic() - 2), 10)
    os.kill(service.pid, signal.SIGSTOP)
    try:
        time.sleep(0.5)
        assert service.heard is not None
        stopped = time.monotonic()
        time.sleep(3)
        assert not fed(stopped)
    finally:
        os.kill(service.pid, signal.SIGCONT)
    until(lambda: fed(time.monotonic() - 1), 10)

    silent = service.front
    os.kill(silent, signal.SIGSTOP)
    until(lambda: not Path(f"/proc/{silent}").exists(), 40)
    until(lambda: service.ctl("status").returncode in (0, 1), 30)
    assert service.front != silent
    assert "it has been silent for 15 s" in service.log.read_text()
    until(lambda: fed(time.monotonic() - 1), 10)
    assert service.process is not None
    assert service.process.poll() is None


def test_an_executor_that_stands_still_is_ended_by_the_watchdog_and_the_held_rank_goes_on(service: Service) -> None:
    place = service.place / "shop"
    place.mkdir()
    shop = Workshop(place, service)
    try:
        started = shop.call(shop.library(), 1_000_000, pause=0.005)
        shop.begin(started)
        rank = ("--job", started.job, "--rank", "0")
        assert service.ctl("inject", *rank, "timeout", "--for", "50s").returncode == 0
        until(lambda: service.events("fault_held"), 20)
        front = service.front

        os.kill(service.pid, signal.SIGSTOP)
        time.sleep(0.5)
        assert service.heard is not None
        stopped = time.monotonic()
        time.sleep(2.5)
        assert not any(at > stopped for at, words in service.heard if words == "WATCHDOG=1")
        os.kill(service.pid, signal.SIGKILL)  # what the unit's WatchdogSignal is
        until(lambda: threads_run(started.pid), 1)
        until(lambda: not alive(front), 5)
        assert service.process is not None
        assert service.process.wait(5) == -signal.SIGKILL

        service.start()
        until(lambda: started.job in {row["job"] for row in service.json("ranks")["ranks"]}, 20)
        assert service.json("faults")["faults"] == []
    finally:
        shop.end()


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_log_level_is_reloaded_and_nothing_else_moves(service: Service) -> None:
    front = service.front
    said = service.reload('log.level = "debug"\nkernel.guard_hits = 30000\n')
    assert "the settings were reloaded: log.level; kernel.guard_hits changed too and need a restart" in said
    assert service.front == front
    assert "none that a reload changes" in service.reload('log.level = "debug"\nkernel.guard_hits = 30000\n')


def test_wrong_settings_change_nothing_and_are_all_told(service: Service) -> None:
    front = service.front
    said = service.reload('metrics.host = "127.0.0.2"\nmetrics.prt = 1\nfaults.max_active = 0\n')
    assert said.startswith("READY=1\nSTATUS=watching; the settings were not reloaded")
    for words in ("unknown setting metrics.prt; did you mean port?", "faults.max_active = 0", "2 problems"):
        until(lambda words=words: words in service.log.read_text(), 10)
    assert service.front == front
    assert answers("127.0.0.1", service.port)
    assert not answers("127.0.0.2", service.port)


def test_the_page_moves_to_another_address_and_back_where_the_new_one_cannot_be_had(service: Service) -> None:
    executor, front = service.pid, service.front
    assert "reloaded: metrics.host" in service.reload('metrics.host = "127.0.0.2"')
    until(lambda: answers("127.0.0.2", service.port), 20)
    assert not answers("127.0.0.1", service.port)
    assert service.front != front
    assert service.process is not None
    assert (service.process.poll(), service.pid) == (None, executor)

    assert "not reloaded" in service.reload('metrics.host = "203.0.113.1"')  # an address of nobody
    until(lambda: answers("127.0.0.2", service.port), 20)
    assert "the front does not start with them" in service.log.read_text()
    assert "metrics.host" in service.reload("")
    until(lambda: answers("127.0.0.1", service.port), 20)


def test_switching_faults_off_lets_the_held_rank_go_and_refuses_the_next(service: Service, tmp_path: Path) -> None:
    place = service.place / "shop"
    place.mkdir()
    shop = Workshop(place, service)
    try:
        started = shop.call(shop.library(), 1_000_000, pause=0.005)
        shop.begin(started)
        rank = ("--job", started.job, "--rank", "0")
        assert service.ctl("inject", *rank, "timeout", "--for", "50s").returncode == 0
        until(lambda: service.events("fault_held"), 20)
        assert "faults.mode" in service.reload('faults.mode = "off"')
        until(lambda: threads_run(started.pid), 5)
        until(lambda: service.ctl("status").returncode in (0, 1), 20)
        (fault,) = service.json("faults", "--history")["faults"]
        assert (fault["state"], fault["ending"]) == ("ended", "settings reloaded")
        refused = service.ctl("inject", *rank, "timeout", "--for", "1s")
        assert refused.returncode == 1
        assert "switched off" in refused.stderr
        service.reload("")
        until(lambda: service.ctl("inject", *rank, "timeout", "--for", "200ms").returncode == 0, 20)
    finally:
        shop.end()


def test_a_hangup_of_the_whole_group_is_a_reload_and_ends_nobody(service: Service) -> None:
    front = service.front
    service.file.write_text('log.level = "debug"')
    for pid in (front, service.pid):
        os.kill(pid, signal.SIGHUP)
    until(lambda: any("log.level" in words for _, words in service.heard), 20)
    assert service.front == front


def test_hups_in_a_row_are_one_reload_more(service: Service) -> None:
    service.file.write_text('log.level = "debug"')
    for _ in range(200):
        os.kill(service.pid, signal.SIGHUP)
    until(lambda: any("log.level" in words for _, words in service.heard), 20)
    time.sleep(3)
    assert 1 <= len([words for _, words in service.heard if words.startswith("RELOADING=1")]) <= 3
    assert service.process is not None
    assert service.process.poll() is None


def test_flags_of_the_start_win_after_a_reload_too() -> None:
    running = Service("log.level=warning")
    try:
        running.start()
        assert "none that a reload changes" in running.reload('log.level = "debug"')
    finally:
        running.stop()


def test_the_front_cannot_speak_to_the_manager_in_the_daemons_name(service: Service) -> None:
    environ = Path(f"/proc/{service.front}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environ
    assert b"WATCHDOG_" not in environ
