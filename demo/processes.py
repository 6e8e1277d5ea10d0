"""Starts what the demonstration needs and ends all of it by pid, however the demonstration ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

Value = TypeVar("Value")


class Process:
    """A program in the background whose output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.pid = self._popen.pid

    @property
    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._popen.poll()

    def tail(self, lines: int = 12) -> str:
        """Its last words."""
        return "\n".join(self.text.splitlines()[-lines:])

    def family(self) -> list[psutil.Process]:
        """It and its descendants; a descendant in a session of its own (torchrun's workers) is one too."""
        try:
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def wait(self, seconds: float) -> int | None:
        """Its exit code, None if it still runs after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(seconds)
        return None

    def end(self, seconds: float = 15.0) -> None:
        """Ask it to end, wait, then kill what is left of it and its descendants."""
        family = self.family()
        if self.code is None:
            self._popen.terminate()
            self.wait(seconds)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()


class Processes:
    """Everything that was started; ended in reverse order."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, dict(environment)
        self._started: list[Process] = []

    def start(self, name: str, command: Sequence[str], **environment: str) -> Process:
        """Start a program in the background."""
        process = Process(name, command, self._folder / f"{name}.log", {**self._environment, **environment})
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        environment = {**os.environ, **self._environment, "NO_COLOR": "1", "COLUMNS": "100"}
        return subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )

    def end(self) -> None:
        """End all of them."""
        while self._started:
            self._started.pop().end()


def until(seconds: float, look: Callable[[], Value | None], every: float = 0.25) -> Value | None:
    """The first true value of `look`, or None when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        value = look()
        if value or time.monotonic() >= deadline:
            return value or None
        time.sleep(every)
