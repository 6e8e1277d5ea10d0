"""What probes taught about processes that outlive the daemon: a communicator is joined once, and a restarted daemon missed it.

A small JSON file, written whole to a temporary name and renamed. Losing it costs knowledge, never correctness: every failure is one
warning in the log and no more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import structlog

from .evidence import Comm
from .tree import Key

_MOST_BYTES = 4 << 20
_MOST_PROCESSES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Process(msgspec.Struct, frozen=True):
    pid: int
    start_time: int
    comms: tuple[Comm, ...]


class _File(msgspec.Struct, frozen=True):
    boot_id: str
    processes: tuple[_Process, ...]
    version: int = 1


class RankMemory:
    """Communicators by (pid, start time) in this boot. Used from the loop's thread; a save of a whole host takes well under a millisecond.

    `pause` is the least number of seconds between two saves; `close()` writes what is still unsaved.
    """

    def __init__(
        self, path: str | os.PathLike[str], boot_id: str = "", *, pause: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = Path(path)
        self._boot_id = boot_id or _this_boot()
        self._pause = pause
        self._clock = clock
        self._saved_at = float("-inf")
        self._dirty = False
        self._warned = False
        self._log = structlog.get_logger(__name__)
        self._known: dict[Key, frozenset[Comm]] = self._load()

    def recall(self, pid: int, start_time: int) -> frozenset[Comm]:
        """What is known of that process; empty where nothing is."""
        return self._known.get((pid, start_time), frozenset())

    def remember(self, pid: int, start_time: int, comms: Iterable[Comm]) -> None:
        """Keep what a process is, and save unless it was saved just now; `flush()` then catches up."""
        kept = frozenset(comms)
        if not kept or self._known.get((pid, start_time)) == kept:
            return
        self._known.pop((pid, start_time), None)
        self._known[pid, start_time] = kept
        while len(self._known) > _MOST_PROCESSES:
            del self._known[next(iter(self._known))]  # the one learnt longest ago
        self._dirty = True
        self.flush()

    def forget(self, pid: int, start_time: int) -> None:
        """Drop a process that exited; written with the next save."""
        self._dirty |= self._known.pop((pid, start_time), None) is not None

    def flush(self) -> None:
        """Save if something is unsaved and the pause is over. Called with every expiry, so nothing stays unsaved for long."""
        if self._dirty and self._clock() - self._saved_at >= self._pause:
            self._save()

    def close(self) -> None:
        """Save what is unsaved."""
        if self._dirty:
            self._save()

    def _load(self) -> dict[Key, frozenset[Comm]]:
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"larger than {_MOST_BYTES} bytes")
            kept = msgspec.json.decode(data, type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            self._warn("rank_memory_unreadable", error)
            return {}
        if kept.boot_id != self._boot_id:
            return {}  # after a reboot the same pid and start time are another process
        return {(process.pid, process.start_time): frozenset(filter(Comm.possible, process.comms)) for process in kept.processes}

    def _save(self) -> None:
        self._saved_at = self._clock()
        processes = tuple(_Process(pid, start, tuple(sorted(comms, key=repr))) for (pid, start), comms in self._known.items())
        data = msgspec.json.encode(_File(boot_id=self._boot_id, processes=processes))
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            _write_private(temporary, data)
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True) if temporary.parent.is_dir() else None
            self._warn("rank_memory_unwritable", error)
            return
        self._dirty = self._warned = False

    def _warn(self, event: str, error: Exception) -> None:
        """Once until it works again: a full disk is not news every second."""
        if not self._warned:
            self._log.warning(event, path=str(self._path), error=str(error))
        self._warned = True


def _write_private(path: Path, data: bytes) -> None:
    """Write for the owner alone; no fsync: after a power cut the file would be of another boot anyway."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)


def _this_boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
