"""SIGHUP: the settings are read again by a short child, for what parses them is not kept in the privileged process.

The child (`singularityd.reread`) answers with settings that are valid as a whole, or with what is wrong with them; the old ones stay in
force until the new ones have proven themselves: a front that does not come up with them is started with the old again.
Executor only, single thread; nothing blocks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from singularityd.kernel import messages, notify

TIME_LIMIT = 20.0
"""Seconds that reading the settings may take."""
START_LIMIT = 25.0
"""Seconds that a front may take with new settings, its predecessor's end included."""
_LARGEST = 1 << 20
FRONT_SETTINGS = "_SINGULARITYD_SETTINGS"
"""As of config.py, which is not imported here: it needs msgspec."""
_WITHOUT_FRONT = frozenset({"log.level", "kernel.linger"})
"""Settings that change without starting the front anew."""
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Answer(NamedTuple):
    """What the child said."""

    error: str
    """Why nothing changes, a problem a line; empty: the rest is valid."""
    changed: list[str]
    """Settings (`table.key`) that are other than before and can be changed while running."""
    restart: list[str]
    """Settings that are other than before and keep their old value until the daemon is restarted."""
    slim: dict[str, Any]
    """The executor's part of the settings in force from now on."""
    front: str
    """All of them, as the front gets them."""


class Loop(Protocol):
    """What the executor offers."""

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back when readable."""

    def forget(self, descriptor: int) -> None:
        """Stop watching."""

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call once, later."""

    def send(self, message: messages.Message) -> None:
        """Tell the front."""

    def log(self, level: str, text: str) -> None:
        """A line for the log."""

    def adopt(self, slim: dict[str, Any]) -> None:
        """Take the executor's part of the settings."""

    def restart_front(self) -> bool:
        """End the front in good order; it is started again. False where none runs: the next is on its way."""

    def replace_front(self, why: str) -> None:
        """End the front at once; another is started."""


class Reload:
    """From SIGHUP to settings in force: ask, validate, apply, and back where the front does not come up.

    `_kept` is what to return to while a front with new settings has not said that it serves.
    """

    def __init__(self, python: str, executor: Loop, slim: dict[str, Any]) -> None:
        """`slim` is the executor's part of the settings in force."""
        self._executor = executor
        self._reader = Reader(python, executor, self._on_answer)
        self._asked = False
        self._slim = slim
        self._kept: tuple[dict[str, Any], str] | None = None
        self._ended = False
        self._said = ""

    @property
    def busy(self) -> bool:
        """Whether the last request is still being carried out."""
        return self._reader.busy or self._kept is not None

    def ask(self) -> None:
        """SIGHUP came; may be called from a signal handler. Requests while one is carried out become one more."""
        self._asked = True

    def turn(self) -> None:
        """Once a turn of the loop: begin what was asked for."""
        if self._asked and not self.busy:
            self._asked = False
            notify.reloading()
            self._reader.start()

    def close(self) -> None:
        """The daemon stops."""
        self._reader.close()

    def _on_answer(self, answer: Answer) -> None:
        if answer.error:
            self._refused(answer.error)
            return
        waiting = f"; {', '.join(answer.restart)} changed too and need a restart" if answer.restart else ""
        if not answer.changed:
            self._finish("info", f"the settings were read again: none that a reload changes is other than before{waiting}")
            return
        said = f"the settings were reloaded: {', '.join(answer.changed)}{waiting}"
        before, self._slim = self._slim, answer.slim
        front, os.environ[FRONT_SETTINGS] = os.environ.get(FRONT_SETTINGS, ""), answer.front
        self._executor.adopt(answer.slim)
        if set(answer.changed) <= _WITHOUT_FRONT:
            self._tell_level(answer)
            self._finish("info", said)
            return
        self._kept, self._said = kept = (before, front), said
        self._executor.log("info", f"{said}: the front starts anew")
        self._ended = not self._executor.restart_front()
        self._executor.after(START_LIMIT, lambda: self._too_late(kept[0]))

    def _tell_level(self, answer: Answer) -> None:
        level = json.loads(answer.front)["log"]["level"]
        self._executor.send(messages.LogLevel(level=_LEVELS[level]))

    def front_ready(self) -> None:
        """A front serves: with the new settings, once the one before has ended."""
        if self._kept is not None and self._ended:
            self._kept = None
            self._finish("info", self._said)

    def front_lost(self) -> None:
        """A front ended: the one that had to, or one that could not live with the new settings."""
        if self._kept is None:
            return
        if not self._ended:
            self._ended = True
            return
        self._slim, os.environ[FRONT_SETTINGS] = self._kept
        self._kept = None
        self._executor.adopt(self._slim)
        self._refused("the front does not start with them; its own words are in the log")

    def _too_late(self, kept: tuple[dict[str, Any], str]) -> None:
        if self._kept is kept:
            self._ended = True
            self._executor.replace_front(f"it did not serve within {START_LIMIT:.0f} s of the reload")

    def _refused(self, why: str) -> None:
        for line in why.splitlines():
            self._executor.log("error", line.strip())
        self._finish("error", "the settings were not reloaded: those before stay in force")

    def _finish(self, level: str, text: str) -> None:
        self._executor.log(level, text)
        notify.ready(f"watching; {text}")


class Reader:
    """Asks a child for the settings; one at a time, and once more when asked meanwhile."""

    def __init__(self, python: str, loop: Loop, done: Callable[[Answer], None]) -> None:
        """`done` is called once for each reading, from the loop."""
        self._command = [python, "-m", "singularityd.reread"]
        self._loop = loop
        self._done = done
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""

    @property
    def busy(self) -> bool:
        """Whether a child reads."""
        return self._process is not None

    def start(self) -> None:
        """Begin; not while busy."""
        assert not self.busy, "one reading at a time"
        try:
            process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as error:
            self._done(_failed(f"{self._command[0]} cannot be started: {error.strerror}"))
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process, self._said = process, b""
        self._loop.watch(process.stdout.fileno(), self._on_readable)
        self._loop.after(TIME_LIMIT, lambda: self._give_up(process))

    def close(self) -> None:
        """End a child that still reads."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._finish()

    def _on_readable(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        self._said += data
        if data and len(self._said) <= _LARGEST:
            return
        if data:
            self._process.send_signal(signal.SIGKILL)
        self._done(parse(self._said, self._finish()))

    def _give_up(self, process: subprocess.Popen[bytes]) -> None:
        if self._process is process:
            process.send_signal(signal.SIGKILL)
            self._finish()
            self._done(_failed(f"reading them took longer than {TIME_LIMIT:.0f} s"))

    def _finish(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        self._loop.forget(self._process.stdout.fileno())
        self._process.stdout.close()
        code, self._process = self._process.wait(), None
        return code


def parse(said: bytes, code: int) -> Answer:
    """The child's words as an answer; whatever else it said is one with an error."""
    if code != 0:
        return _failed(f"what reads them ended with code {code}; the daemon's log has its words")
    try:
        answer = Answer(**json.loads(said))
    except (ValueError, TypeError):
        return _failed("what reads them answered nonsense")
    return answer


def _failed(why: str) -> Answer:
    return Answer(error=why, changed=[], restart=[], slim={}, front="")
