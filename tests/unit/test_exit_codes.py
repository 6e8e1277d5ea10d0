"""The daemon's exit codes are a frozen surface: the unit, monitoring and configuration management act on them."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from singularityd.__main__ import EXIT_CODES
from singularityd.ctl.failures import EXIT_CODES as CTL_EXIT_CODES

ROOT = Path(__file__).resolve().parents[2]
root = pytest.mark.skipif(os.geteuid() != 0, reason="starts a daemon as root")


def daemon(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "singularityd", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the front's user gets to."""
    with tempfile.TemporaryDirectory(prefix="singularity-test-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def at(place: Path, *more: str) -> list[str]:
    words = (f"daemon.runtime_dir={place}/run", f"daemon.state_dir={place}/state", "metrics.port=0", *more)
    return [f"--set={word}" for word in words]


def table(page: str, heading: str) -> dict[int, str]:
    part = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {int(code): meaning for code, meaning in re.findall(r"(?m)^\| (\d+) \| (.*) \|$", part)}


def test_the_codes_are_those_that_were_published() -> None:
    assert set(EXIT_CODES) == {0, 64, 69, 70, 77, 78, 130}
    assert set(CTL_EXIT_CODES) == {0, 1, 2, 3, 4, 5, 130}
    assert table("service.md", "Exit codes") == EXIT_CODES
    assert {code: meaning.replace("`", "") for code, meaning in table("singularityctl.md", "Exit codes").items()} == CTL_EXIT_CODES


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("config", "show"), ("config", "check")])
def test_0_what_was_asked_for_was_answered(words: tuple[str, ...]) -> None:
    assert daemon(*words).returncode == 0


@pytest.mark.parametrize("words", [("--nonsense",), ("nonsense",), ("--config",), ("config",), ("config", "check", "more")])
def test_64_usage(words: tuple[str, ...]) -> None:
    done = daemon(*words)
    assert done.returncode == 64
    assert "Usage" in done.stderr or "Error" in done.stderr


def test_78_settings() -> None:
    for words in (("--set", "x.y=1"), ("--set", "nonsense"), ("--config", "/nowhere/x.toml"), ("--set", "daemon.user=nobody-of-that-name")):
        done = daemon(*words)
        assert done.returncode == 78, done
        assert "Traceback" not in done.stderr


@root
def test_77_not_root_and_a_place_that_cannot_be_made(place: Path) -> None:
    code = "import os; os.setgroups([]); os.setuid(65534); from singularityd.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", f"import singularityd.__main__; {code}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "must be started as root" in done.stderr) == (77, True), done.stderr
    (place / "run").write_text("a file")
    assert daemon(*at(place)).returncode == 77


@root
def test_69_another_daemon_and_probes_that_cannot_be_loaded(place: Path) -> None:
    (place / "state").mkdir()
    with (place / "state/lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = daemon(*at(place))
    assert done.returncode == 69
    assert "another singularityd (pid 4711)" in done.stderr
    done = daemon(*at(place, "kernel.system_python=/nowhere/python3"))
    assert done.returncode == 69
    assert "kernel.system_python" in done.stderr
    assert "Traceback" not in done.stderr


@root
def test_0_ended_on_request_even_while_it_starts(place: Path) -> None:
    for pause in (0.6, 1.5):
        process = subprocess.Popen([sys.executable, "-m", "singularityd", *at(place)], stderr=subprocess.PIPE, text=True)
        lock = place / "state/lock"
        end = time.monotonic() + 30
        while not (lock.exists() and lock.read_text().strip() == str(process.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(pause)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in said) == (0, False), said
