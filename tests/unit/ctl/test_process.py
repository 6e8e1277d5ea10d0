"""singularityctl as its own process: signals, pipes, terminals, imports."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

CTL = [sys.executable, "-c", "from singularityd.ctl.main import main; main()"]
UNIT = Path(__file__).parents[1]
FAKED = """
import sys
sys.path.insert(0, {unit!r})
from ctl.fake import FakeClient
from ctl import samples
from singularityd.ctl.main import cli
from singularityd.ctl.session import Session
import time
class Endless(FakeClient):
    def follow(self, **asked):
        while True:
            yield samples.EVENTS[1]
            time.sleep(0.001)
session = Session(client=lambda socket, timeout: Endless())
cli.main({words!r}, obj=session)
"""


def faked(*words: str) -> list[str]:
    return [sys.executable, "-c", FAKED.format(unit=str(UNIT), words=list(words))]


def test_help_loads_neither_grpc_nor_rich_nor_the_daemon() -> None:
    code = (
        "import sys; from singularityd.ctl.main import cli\n"
        "try: cli.main(['inject', '--help'])\n"
        "except SystemExit: pass\n"
        "print([n for n in ('grpc', 'google.protobuf', 'rich', 'msgspec', 'singularityd.model') if n in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines()[-1] == "[]"


def test_a_reader_that_stops_reading_is_no_failure() -> None:
    process = subprocess.Popen(faked("events", "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=30) == 0
    assert errors == ""


def test_an_interrupt_ends_a_stream_with_130_and_the_token() -> None:
    process = subprocess.Popen(faked("events", "--follow"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):  # an interrupt in the instant after an event is printed tells the token of the one before
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "go on with: singularityctl events --since b7:42\n"


def test_an_ascii_terminal_is_no_failure() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(faked("top", "--once", "--interval", "0.01"), capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "allreduce" in done.stdout


def read_until(terminal: int, wanted: bytes, seconds: float = 30) -> bytes:
    seen, end = b"", time.monotonic() + seconds
    while wanted not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen


def test_top_is_live_on_a_terminal_until_interrupted() -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(faked("top", "--interval", "0.05"), stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env)
    os.close(theirs)
    try:
        assert b"CALLS/S" in read_until(ours, b"CALLS/S")
        assert b"allreduce" in read_until(ours, b"allreduce")
        process.send_signal(signal.SIGINT)
        read_until(ours, b"\x1b[?1049l")
        assert process.wait(timeout=30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
        if process.stderr is not None:
            process.stderr.close()


def header_on_terminal(**env: str) -> bytes:
    ours, theirs = pty.openpty()
    clean = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(faked("ranks"), stdout=theirs, stderr=subprocess.DEVNULL, env={**clean, "TERM": "xterm", **env})
    os.close(theirs)
    try:
        return read_until(ours, b"no probes")
    finally:
        process.wait(timeout=30)
        os.close(ours)


def test_no_color_takes_the_weight_from_the_header() -> None:
    assert b"\x1b[1m" in header_on_terminal()
    assert b"\x1b" not in header_on_terminal(NO_COLOR="1")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CTL, *words], capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **env})


def test_no_daemon_is_exit_4_with_the_socket_named_and_a_hint(tmp_path: Path) -> None:
    expected = str(tmp_path / "control.sock")
    for done in (run("ranks", "--socket", expected, "--timeout", "5"), run("status", SINGULARITYD_RUNTIME_DIR=str(tmp_path))):
        assert done.returncode == 4, done.stderr
        assert done.stdout == ""
        first, second = done.stderr.splitlines()
        assert first.startswith("singularityctl: ")
        assert expected in first
        assert second.startswith("hint: ")


def test_a_socket_nobody_listens_on_is_exit_4(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    assert run("inject", "--rank", "3", "timeout", "--socket", str(path)).returncode == 4
    assert run("version", "--socket", str(path)).returncode == 0


def test_usage_needs_no_daemon() -> None:
    done = run("inject", "timeout")
    assert done.returncode == 2
    assert "--rank" in done.stderr


def test_a_full_disk_is_a_failure_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(faked("ranks", "-o", "json"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["singularityctl: the answer cannot be written: No space left on device"]


def test_stderr_that_is_gone_does_not_change_the_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*CTL, "inject", "timeout"], stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 2


def test_words_that_are_no_text_are_a_usage_error() -> None:
    done = subprocess.run([*CTL, "inject", "--rank", "3", b"time\xffout"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("singularityctl: 'time\\udcffout' is not UTF-8")


def test_shell_completion_is_there() -> None:
    done = run(_SINGULARITYCTL_COMPLETE="bash_complete", COMP_WORDS="singularityctl fa", COMP_CWORD="1")
    assert "faults" in done.stdout
