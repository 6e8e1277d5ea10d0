"""Finds the processes that map a collective library, and the library's functions, without costing anything at rest.

Pids are listed once a second. A new process is looked at when it appears and again after 0.3, 1, 2, 4, 8 and 16 seconds, because
imports and dlopen come late; after that only when its address space has changed size, which a late dlopen does. A file is searched
once, by a short-lived child of low priority, however many processes map it; the answer, no as well as yes, is kept by device, inode,
modification time and size, so a replaced or copied library is searched anew.

Executor only, single thread: `tick` and `on_readable` return what was found and never wait.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import re
import select
import signal
import socket
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from singularityd.kernel import elf, maps
from singularityd.kernel.procfs import ProcFs, Status

LOOKS = (0.0, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds after a process was first seen."""
SWEEP_EVERY = 30.0
"""A process whose address space seems unchanged is looked at again this often."""
SEARCH_LIMIT = 20.0
"""Seconds a search child may take."""
CACHE = 4096
_ANSWER_LIMIT = 1 << 20
_BATCH = 64
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessSeen(NamedTuple):
    """A process that maps a wanted library; told again when it has exec'ed into another that does."""

    pid: int
    start_time: int
    parent: int
    uid: int
    name: str
    namespace_pids: tuple[int, ...]
    environ: dict[str, str]


class LibraryFound(NamedTuple):
    """One wanted library of one process."""

    pid: int
    start_time: int
    device: int
    inode: int
    path: str
    open_path: str
    """Opens the mapped inode itself, whatever the path names meanwhile and in whichever mount namespace it lies."""
    backend: str
    version: str
    symbols: dict[str, int]


class SearchFailed(NamedTuple):
    """A mapped file that could not be searched."""

    path: str
    reason: str


class ProcessGone(NamedTuple):
    """A process that was told of has ended."""

    pid: int
    start_time: int


class ProcessExeced(NamedTuple):
    """A process that was told of runs another program."""

    pid: int
    start_time: int


Found = ProcessSeen | LibraryFound | SearchFailed | ProcessGone | ProcessExeced
Key = tuple[int, int]


class _Process:
    def __init__(self, pid: int, start_time: int, now: float) -> None:
        self.pid = pid
        self.start_time = start_time
        self.born = now
        self.looks = 0
        self.due = now
        self.size = 0
        self.told = False
        self.libraries: set[tuple[int, int, str]] = set()
        self.waiting: dict[Key, maps.MappedFile] = {}


class _Search:
    def __init__(self, child: int, channel: socket.socket, files: list[tuple[Key, str]], started: float) -> None:
        self.child = child
        self.channel = channel
        self.files = files
        self.started = started
        self.data = bytearray()


class Discovery:
    """The scanner."""

    def __init__(self, procfs: ProcFs, wanted: Sequence[elf.Wanted], *, clock: Callable[[], float], interval: float = 1.0) -> None:
        self._interval = interval
        self._procfs = procfs
        self._wanted = list(wanted)
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._known: collections.OrderedDict[Key, tuple[tuple[int, int], list[elf.Match]]] = collections.OrderedDict()
        self._queue: collections.OrderedDict[Key, tuple[int, maps.MappedFile]] = collections.OrderedDict()
        self._search: _Search | None = None
        self._next_list = clock()
        # A fixed descriptor for the caller's selector: searches come and go behind it.
        self._poll = select.epoll()

    # --- the caller's loop -----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when a search has something to say."""
        return int(self._poll.fileno())

    def next_deadline(self) -> float:
        """When `tick` should be called next, by the clock."""
        dues = [process.due for process in self._processes.values() if process.looks < len(LOOKS)]
        return min([self._next_list, *dues])

    def tick(self, now: float) -> list[Found]:
        """Look for new, changed and vanished processes."""
        found: list[Found] = []
        if now >= self._next_list:
            self._next_list = now + self._interval
            found.extend(self._list(now))
        for process in list(self._processes.values()):
            if now >= process.due:
                found.extend(self._look(process, now))
        if self._search is not None and now - self._search.started > SEARCH_LIMIT:
            found.extend(self._finish("the search took too long"))
        self._start_search()
        return found

    def on_readable(self) -> list[Found]:
        """Take what a search child says."""
        search = self._search
        if search is None:
            return []
        try:
            data = search.channel.recv(1 << 16)
        except BlockingIOError:
            return []
        search.data += data
        if data and len(search.data) <= _ANSWER_LIMIT:
            return []
        found = self._finish("the search child died")
        self._start_search()
        return found

    def close(self) -> None:
        """End a search that runs."""
        if self._search is not None:
            self._end_child()
        self._poll.close()

    # --- processes -------------------------------------------------------------------------------------------------------------

    def _list(self, now: float) -> Iterable[Found]:
        present = set(self._procfs.pids())
        for pid in list(self._processes):
            if pid not in present:
                yield from self._gone(self._processes.pop(pid))
        own = {os.getpid(), 1} if self._procfs.root == "/proc" else set()
        for pid in present:
            known = self._processes.get(pid)
            if known is not None or pid in own:
                continue
            start = self._procfs.start_time(pid)
            if start is not None and not self._procfs.kernel_thread(pid):
                self._processes[pid] = _Process(pid, start, now)

    def _gone(self, process: _Process) -> Iterable[Found]:
        if process.told:
            yield ProcessGone(process.pid, process.start_time)

    def _look(self, process: _Process, now: float) -> Iterable[Found]:
        start = self._procfs.start_time(process.pid)
        if start != process.start_time:
            self._processes.pop(process.pid, None)
            yield from self._gone(process)
            if start is not None:
                self._processes[process.pid] = _Process(process.pid, start, now)
            return
        size = self._procfs.vm_size(process.pid) or 0
        settled = process.looks >= len(LOOKS)
        self._schedule(process, now)
        if settled and size == process.size and now - process.born < SWEEP_EVERY:
            return
        if settled:
            process.born = now
        process.size = size
        yield from self._scan(process)

    def _schedule(self, process: _Process, now: float) -> None:
        process.looks += 1
        process.due = process.born + LOOKS[process.looks] if process.looks < len(LOOKS) else now + 2.0

    def _scan(self, process: _Process) -> Iterable[Found]:
        data = self._procfs.read(f"{process.pid}/maps", 1 << 24)
        mapped = {(file.device, file.inode): file for file in maps.parse(data or b"")}
        backends = {key[:2] for key in process.libraries}
        if process.told and not backends & set(mapped) and mapped:
            process.told = False
            process.libraries.clear()
            yield ProcessExeced(process.pid, process.start_time)
        for key, file in mapped.items():
            yield from self._consider(process, key, file)

    def _consider(self, process: _Process, key: Key, file: maps.MappedFile) -> Iterable[Found]:
        known = self._known.get(key)
        if known is None or known[0] != self._identity(process.pid, file):
            process.waiting[key] = file
            self._queue.setdefault(key, (process.pid, file))
            return
        self._known.move_to_end(key)
        if known[1]:
            yield from self._tell(process, file, known[1])

    def _identity(self, pid: int, file: maps.MappedFile) -> tuple[int, int]:
        try:
            status = os.stat(f"{self._procfs.root}/{pid}/map_files/{file.entry}")
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_size

    def _tell(self, process: _Process, file: maps.MappedFile, matches: list[elf.Match]) -> Iterable[Found]:
        new = [match for match in matches if (file.device, file.inode, match.backend) not in process.libraries]
        if not new:
            return
        if not process.told:
            seen = self._seen(process)
            if seen is None:
                return
            process.told = True
            yield seen
        for match in new:
            process.libraries.add((file.device, file.inode, match.backend))
            path = file.path + (" (deleted)" if file.deleted else "")
            opens = f"{self._procfs.root}/{process.pid}/map_files/{file.entry}"
            version = match.version or self._version_beside(process.pid, file.path, match.backend)
            yield LibraryFound(process.pid, process.start_time, file.device, file.inode, path, opens, match.backend, version, match.symbols)

    def _seen(self, process: _Process) -> ProcessSeen | None:
        status: Status | None = self._procfs.status(process.pid)
        if status is None:
            return None
        environ = self._procfs.environ(process.pid)
        return ProcessSeen(
            process.pid, process.start_time, status.parent, status.uid, status.name, status.namespace_pids or (process.pid,), environ
        )

    def _version_beside(self, pid: int, path: str, backend: str) -> str:
        for want in self._wanted:
            if want.backend == backend and want.version_file[0]:
                place = os.path.normpath(os.path.join(os.path.dirname(path), want.version_file[0]))
                return read_version(f"{self._procfs.root}/{pid}/root{place}", want.version_file[1])
        return ""

    # --- searches --------------------------------------------------------------------------------------------------------------

    def _start_search(self) -> None:
        if self._search is not None or not self._queue:
            return
        files: list[tuple[Key, str]] = []
        while self._queue and len(files) < _BATCH:
            key, (pid, file) = self._queue.popitem(last=False)
            files.append((key, f"{self._procfs.root}/{pid}/map_files/{file.entry}"))
        here, there = socket.socketpair()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            here.close()
            self._child(there, files, parent)
        there.close()
        here.setblocking(False)
        self._search = _Search(child, here, files, self._clock())
        self._poll.register(here.fileno(), select.EPOLLIN)

    def _child(self, channel: socket.socket, files: list[tuple[Key, str]], parent: int) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                os.nice(10)
                channel.sendall(json.dumps([search(path, self._wanted) for _, path in files]).encode())
                status = 0
        finally:
            os._exit(status)

    def _end_child(self) -> None:
        search = self._search
        if search is None:
            return
        self._search = None
        self._poll.unregister(search.channel.fileno())
        search.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(search.child, signal.SIGKILL)
        os.waitpid(search.child, 0)

    def _finish(self, otherwise: str) -> list[Found]:
        search = self._search
        assert search is not None
        self._end_child()
        try:
            answers = json.loads(search.data.decode())
            if len(answers) != len(search.files):
                raise ValueError("another number of answers")
        except ValueError:
            answers = [{"error": otherwise}] * len(search.files)
        found: list[Found] = []
        for (key, _), answer in zip(search.files, answers, strict=True):
            found.extend(self._learn(key, answer))
        return found

    def _learn(self, key: Key, answer: dict[str, object]) -> Iterable[Found]:
        holders = [process for process in self._processes.values() if key in process.waiting]
        error = str(answer.get("error", ""))
        if error:
            # A process that ended while its file was searched leaves a name that does not open: no failure, it is asked for again.
            for process in holders:
                file = process.waiting.pop(key)
                if error != "gone":
                    yield SearchFailed(file.path, error)
            if error == "gone":
                return
        identity = answer.get("identity", [0, 0])
        assert isinstance(identity, list)
        matches = [elf.Match(**match) for match in answer.get("matches", [])]  # type: ignore[attr-defined]
        self._known[key] = ((int(identity[0]), int(identity[1])), matches)
        while len(self._known) > CACHE:
            self._known.popitem(last=False)
        for process in holders:
            if process.waiting and key in process.waiting:
                yield from self._tell(process, process.waiting.pop(key), matches)


def search(path: str, wanted: Sequence[elf.Wanted]) -> dict[str, object]:
    """What is in a file, as plain values. Runs in the child."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        return {"error": "gone" if gone else f"cannot be opened: {error.strerror}"}
    try:
        status = os.fstat(descriptor)
        answer: dict[str, object] = {"identity": [status.st_mtime_ns, status.st_size]}
        if not stat.S_ISREG(status.st_mode):
            return answer
        try:
            answer["matches"] = [match._asdict() for match in elf.find(descriptor, wanted)]
        except elf.ElfError:
            # Fonts, archives and 32-bit libraries are mapped as code too; none of them is a failure of ours.
            answer["matches"] = []
        return answer
    finally:
        os.close(descriptor)


def read_version(path: str, pattern: bytes) -> str:
    """The version in a small regular file; empty where there is none. Never follows a link, never waits for a fifo."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        match = re.search(pattern, os.read(descriptor, 65536))
        return match.group(1).decode("ascii", "replace")[:31] if match else ""
    except OSError:
        return ""
    finally:
        os.close(descriptor)
