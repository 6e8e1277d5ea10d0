"""The daemon's own log: one line a record, on change rather than on every pass, and never more than a person can read.

Messages are constant snake_case names; what varies goes into fields. A SingularityError given as `error=` is written as its code, text
and hint; a traceback is written for anything else, and for a SingularityError only at debug level.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import structlog

from singularityd.errors import SingularityError
from singularityd.observe import journal as journald
from singularityd.observe.settings import Level, LogSettings

Record = MutableMapping[str, Any]

LEVELS: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_FIRST = ("time", "level", "event", "logger")
_KEYS = 1024
"""Most keys that the rate limit and the change logger remember."""


def name_of(number: int) -> Level:
    """The level of a number as the executor sends it; info for one that is none."""
    names: dict[int, Level] = {10: "debug", 20: "info", 30: "warning", 40: "error"}
    return names.get(number, "info")


class LogControl:
    """Holds what can be changed while the daemon runs. Any thread."""

    def __init__(self, settings: LogSettings) -> None:
        self.level: Level = settings.level

    def set_level(self, level: Level) -> None:
        """Write records of this level and above from now on. Raises ValueError for a level that does not exist."""
        if level not in LEVELS:
            raise ValueError(f"log level {level!r} is none of {', '.join(LEVELS)}")
        self.level = level

    def filter(self, _: object, method: str, record: Record) -> Record:
        """The first processor: drops what is below the level."""
        if LEVELS.get(method, 20) < LEVELS[self.level]:
            raise structlog.DropEvent
        return record


def setup(settings: LogSettings, stream: TextIO | None = None) -> LogControl:
    """Configure structlog, and route the standard library's loggers (asyncio, grpc) into it; once, by app, before anything is logged."""
    stream = stream or sys.stderr
    control = LogControl(settings)
    console = settings.format == "console" or (settings.format == "auto" and stream.isatty())
    journal = journald.is_stream(stream)
    processors: list[Any] = [
        control.filter,
        RateLimit(settings.burst, settings.period),
        _stamp,
        _Errors(control),
        _in_order,
        *([_ToJournal(journald.Journal())] if journal and settings.format == "auto" else []),
        _console(stream) if console else _Json(journal=journal),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=_Logger,
        logger_factory=_Factory(stream),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_FromStandardLibrary()]
    root.setLevel(logging.WARNING)
    return control


class _Logger(structlog.BoundLogger):
    """structlog's plain bound logger: debug, info, warning, error."""

    def exception(self, event: str, **fields: Any) -> Any:
        """An error record of the exception that is being handled."""
        return self._proxy_to_logger("error", event, **{"exc_info": True, **fields})


class _Factory:
    """Gives each logger its name as a field; all of them write to one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, name: str = "", *_: object) -> structlog.WriteLogger:
        writer = structlog.WriteLogger(self._stream)
        writer.name = name  # type: ignore[attr-defined]
        return writer


def _stamp(logger: object, method: str, record: Record) -> Record:
    record["time"] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now := time.time())) + f".{int(now * 1000) % 1000:03d}Z"
    record["level"] = method
    if name := getattr(logger, "name", ""):
        record.setdefault("logger", name)
    return record


class _Errors:
    """Turns `error=` and `exc_info=` into text."""

    def __init__(self, control: LogControl) -> None:
        self._control = control

    def __call__(self, _: object, __: str, record: Record) -> Record:
        error = record.pop("error", None)
        exc_info = record.pop("exc_info", None)
        if exc_info and not isinstance(error, BaseException):
            error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
        if not isinstance(error, BaseException):
            return record if error is None else {**record, "error": error}
        if isinstance(error, SingularityError):
            record.update(error=error.text, code=error.code, **({"hint": error.hint} if error.hint else {}))
        else:
            record.update(error=f"{type(error).__name__}: {error}")
        if not isinstance(error, SingularityError) or self._control.level == "debug":
            record["traceback"] = "".join(traceback.format_exception(error)).rstrip()
        return record


def _in_order(_: object, __: str, record: Record) -> Record:
    """time, level, event, logger, then the fields by name, the traceback last: the same record always looks the same."""
    last = ("traceback",)
    names = [name for name in _FIRST if name in record]
    names += sorted(name for name in record if name not in (*_FIRST, *last))
    names += [name for name in last if name in record]
    return {name: record[name] for name in names}


class _Json:
    """One JSON object a line; under systemd with the priority in front that the journal strips and files by."""

    def __init__(self, *, journal: bool) -> None:
        self._journal = journal

    def __call__(self, _: object, method: str, record: Record) -> str:
        text = json.dumps(dict(record), default=str, separators=(",", ":"))
        return f"<{journald.PRIORITIES.get(method, 6)}>{text}" if self._journal else text


class _ToJournal:
    """Sends a record to the journal with its fields; one that it does not take goes on to the stream."""

    def __init__(self, connection: journald.Journal) -> None:
        self._journal = connection

    def __call__(self, _: object, method: str, record: Record) -> Record:
        if self._journal.send(method, record):
            raise structlog.DropEvent
        return record


def _console(stream: TextIO) -> Callable[[object, str, Record], str]:
    renderer = structlog.dev.ConsoleRenderer(
        colors=stream.isatty() and "NO_COLOR" not in os.environ, sort_keys=False, timestamp_key="time", pad_event_to=24
    )

    def render(logger: object, method: str, record: Record) -> str:
        trace = record.pop("traceback", "")
        record["event"] = str(record.get("event", "")).replace("\n", "\\n")
        line = str(renderer(logger, method, record)).replace("\n", "\\n")
        text = f"{line}\n{trace}" if trace else line
        # a process name can hold bytes that are no UTF-8; the log must not fail on them
        return text.encode("utf-8", "backslashreplace").decode()

    return render


class RateLimit:
    """A processor: lets `burst` records of one event through in each `period` seconds and counts the others.

    The next record of that event that gets through carries the count as `suppressed`. Any thread: a race can only misjudge one record.
    """

    def __init__(self, burst: int, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._period, self._clock = burst, period, clock
        self._windows: OrderedDict[str, list[float]] = OrderedDict()

    def __call__(self, _: object, __: str, record: Record) -> Record:
        """Let the record through, or raise DropEvent."""
        key = str(record.get("event", ""))
        now = self._clock()
        window = self._windows.setdefault(key, [now, 0, 0])
        self._windows.move_to_end(key)
        if len(self._windows) > _KEYS:
            self._windows.popitem(last=False)
        began, passed, suppressed = window
        if now - began >= self._period:
            began, passed = now, 0
        if passed >= self._burst:
            window[:] = [began, passed, suppressed + 1]
            raise structlog.DropEvent
        window[:] = [began, passed + 1, 0]
        if suppressed:
            record["suppressed"] = int(suppressed)
        return record


class ChangeLogger:
    """Logs what is true of a key only when that changes, so that a check that runs every second writes one line an incident."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._said: OrderedDict[str, object] = OrderedDict()

    def say(self, key: str, value: object, event: str, *, level: Level = "info", **fields: object) -> bool:
        """Log `event` if `value` is not what was said of `key` last; returns whether it was logged. `value` is compared, not written."""
        if key in self._said and self._said[key] == value:
            self._said.move_to_end(key)
            return False
        self._said[key] = value
        self._said.move_to_end(key)
        if len(self._said) > _KEYS:
            self._said.popitem(last=False)
        getattr(self._logger, level)(event, **fields)
        return True

    def forget(self, key: str) -> None:
        """Say it anew next time."""
        self._said.pop(key, None)


class _FromStandardLibrary(logging.Handler):
    """Hands what other packages log to structlog. Their messages are free text, so the logger's name is the event they are limited by."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger()
        level = next((name for name in ("error", "warning", "info") if record.levelno >= LEVELS[name]), "debug")
        error = record.exc_info[1] if record.exc_info else None
        extra = {"error": error} if error is not None else {}
        getattr(logger, level)(record.name, message=record.getMessage(), **extra)
