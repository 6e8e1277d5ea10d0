"""Finds the processes that map a collective library, and the library's functions, without costing anything at rest.

Pids are listed once a second. A new process is looked at when it appears and again after 0.3, 1, 2, 4, 8 and 16 seconds, because
imports and dlopen come late. From then on only the size of its address space is read, and its maps only when the size of its mapped
code has changed, which a late dlopen does and an allocation does not. A file is searched once, by a short-lived child of low priority,
however many processes map it; what was found, no as well as yes, is kept by device and inode. A process that comes later costs the
child an open and an fstat of the file: a library that was replaced, or whose inode number was given to another, is searched anew.

Executor only, single thread: `tick` and `on_readable` return what was found and never wait. The executor itself reads /proc and
nothing else; whatever touches a mapped file happens in the child (`search`).
"""

from __future__ import annotations

import array
import collections
import heapq
import itertools
import math
import os
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from singularityd.kernel import elf, maps
from singularityd.kernel.procfs import ProcFs, Stat
from singularityd.kernel.search import GONE, Answer, Identity, Job, Key, SearchChild, Twin

LOOKS = (0.0, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds after a process, or the program it exec'ed, was first seen."""
YOUNG_CHECK, CHECK = 1.0, 2.0
"""Seconds between readings of an address space's size, before and after the last of LOOKS."""
SWEEP = 30.0
"""A process whose address space seems unchanged is looked at again this often."""
FILE_LIMIT = 10.0
"""Seconds a search may take for one file."""
REST, REST_MOST = 30.0, 3600.0
"""Seconds until a file that could not be read is tried again; doubles with each failure."""
RETRY = 5.0
"""Seconds until a search is tried again that the host had no process for."""
TRUST = 1.0
"""Seconds for which a file in which nothing was found needs no second look."""
CACHE = 4096
"""Files remembered."""
TICK_BUDGET = 0.003
"""Seconds of work in one tick; what is left is due at once, after the caller's other events."""
_MAPS_LIMIT = 1 << 23
_BATCH = 64
_QUEUE_MOST = 2 * CACHE
_STUCK_MOST = 2
_TOO_LONG = "the search took too long"
_REAP = 0.05
_NO_MEMORY = (0, 0)


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
    """One pair for one file: the same for all the mounts through which containers see it."""
    path: str
    open_path: str
    """Opens the mapped inode itself, whatever the path names meanwhile and in whichever mount namespace it lies."""
    backend: str
    version: str
    symbols: dict[str, int]
    file_key: tuple[int, int, int, int]
    """(device, inode, mtime in ns, size): another for another content, also where the inode is the same."""


class SearchFailed(NamedTuple):
    """A mapped file that could not be searched; told once a file."""

    path: str
    reason: str


class ProcessGone(NamedTuple):
    """A process that was told of has ended."""

    pid: int
    start_time: int


class ProcessExeced(NamedTuple):
    """A process that was told of runs another program, or has unmapped the library."""

    pid: int
    start_time: int


Found = ProcessSeen | LibraryFound | SearchFailed | ProcessGone | ProcessExeced


class _Process:
    """What is remembered of a process: little, for there are many."""

    __slots__ = (
        "born",
        "code",
        "due",
        "handled",
        "image",
        "libraries",
        "looks",
        "pid",
        "size",
        "skipped",
        "start_time",
        "swept",
        "told",
        "waiting",
    )

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.start_time = 0
        self.image = (0, 0)
        self.size = -1
        self.skipped = False
        self.due = now
        """When it is looked at next."""
        self.reset(now)

    def reset(self, now: float) -> None:
        """A new program."""
        self.born = self.swept = now
        self.looks = 0
        self.code = -1
        self.told = False
        self.handled = array.array("I")
        """Numbers of the files that need no more attention in this process."""
        self.libraries: dict[tuple[Key, str], str] = {}
        """(file, backend) that was told -> the file's name in map_files."""
        self.waiting: dict[Key, maps.MappedFile] = {}


class _File:
    """What a search found; kept while there is room."""

    __slots__ = ("failures", "identity", "key", "matches", "number", "twin", "valid_until")

    def __init__(self, number: int, key: Key) -> None:
        self.number = number
        self.key = key
        self.identity: Identity | None = None
        self.matches: list[elf.Match] = []
        self.valid_until = float("-inf")
        """Until then nobody needs to ask: nothing is in it, or it cannot be read."""
        self.failures = 0
        self.twin: Key | None = None
        """The key under which this very file is told of."""


class Discovery:
    """The scanner."""

    def __init__(self, procfs: ProcFs, wanted: Sequence[elf.Wanted], *, clock: Callable[[], float], interval: float = 1.0) -> None:
        """`interval` is the time between listings of all processes, in seconds of `clock`."""
        self._procfs = procfs
        self._wanted = list(wanted)
        self._clock = clock
        self._interval = interval
        self._next_list = clock()
        self._processes: dict[int, _Process] = {}
        self._due: list[tuple[float, int]] = []
        self._files: collections.OrderedDict[Key, _File] = collections.OrderedDict()
        self._numbered = 0
        # File -> the processes that wait for it, in the order in which the files were first wanted.
        self._queue: dict[Key, list[int]] = {}
        self._child: SearchChild | None = None
        self._dying: list[SearchChild] = []
        self._not_before = float("-inf")
        self._stuck_told = False
        own = procfs.stat(os.getpid()) if procfs.root == "/proc" else None
        self._own_image = own.image if own else None
        # A fixed descriptor for the caller's selector: searches come and go behind it.
        self._poll = select.epoll()
        self.searches = 0
        """Files searched so far; files that were only compared are not counted."""

    # --- the caller's loop -----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when a search has something to say."""
        return self._poll.fileno()

    def next_deadline(self) -> float:
        """When `tick` should be called next, by the clock."""
        deadline = min(self._next_list, self._due[0][0]) if self._due else self._next_list
        if self._child is not None:
            deadline = min(deadline, self._child.progress + FILE_LIMIT)
        if self._dying:
            deadline = min(deadline, self._clock() + _REAP)
        return deadline

    def tick(self, now: float) -> list[Found]:
        """Look for new, changed and vanished processes."""
        started = self._clock()
        found: list[Found] = []
        if now >= self._next_list:
            self._next_list = self._on_grid(now + self._interval)
            found.extend(self._list(now))
        while self._due and self._due[0][0] <= now and self._clock() - started <= TICK_BUDGET:
            due, pid = heapq.heappop(self._due)
            process = self._processes.get(pid)
            # What was planned for a process that has ended is none of the one that has its number now.
            if process is not None and process.due == due:
                found.extend(self._look(process, now))
        if self._child is not None and now - self._child.progress > FILE_LIMIT:
            found.extend(self._give_up())
        self._dying = [child for child in self._dying if not child.reaped()]
        found.extend(self._start_search(now))
        return found

    def on_readable(self) -> list[Found]:
        """Take what a search child says."""
        if self._child is None:
            return []
        now = self._clock()
        found: list[Found] = []
        for answer in self._child.read(now):
            found.extend(self._learn(answer, now))
        if self._child.ended:
            found.extend(self._end_search("the search ended by a crash"))
            found.extend(self._start_search(now))
        return found

    def close(self) -> None:
        """End a search that runs."""
        if self._child is not None:
            self._poll.unregister(self._child.fileno())
            self._child.kill()
            self._child = None
        self._poll.close()

    # --- processes -------------------------------------------------------------------------------------------------------------

    def _list(self, now: float) -> Iterator[Found]:
        try:
            present = set(self._procfs.pids())
        except OSError:
            return  # out of descriptors or memory for a moment: that is not everybody's end
        for pid in [pid for pid in self._processes if pid not in present]:
            yield from self._gone(pid)
        for pid in sorted(present - self._processes.keys()):
            process = self._processes[pid] = _Process(pid, now)
            self._schedule(process, now)

    def _schedule(self, process: _Process, when: float) -> None:
        process.due = when
        heapq.heappush(self._due, (when, process.pid))

    def _gone(self, pid: int) -> Iterator[Found]:
        process = self._processes.pop(pid)
        if process.told:
            yield ProcessGone(pid, process.start_time)

    def _look(self, process: _Process, now: float) -> Iterator[Found]:
        """One look, as deep as its turn asks for; plans the next."""
        begun = self._clock()
        due = False
        while process.looks < len(LOOKS) and now >= process.born + LOOKS[process.looks]:
            process.looks += 1
            due = True
        size = self._procfs.vm_size(process.pid)
        if size is not None and (due or size != process.size or now - process.swept >= SWEEP):
            process.size = size
            yield from self._examine(process, now, always=due)
        if self._processes.get(process.pid) is process:
            # A process with tens of thousands of mappings is looked at less often: at most two percent of the time for any one.
            self._plan(process, now, now + 50 * (self._clock() - begun))

    def _plan(self, process: _Process, now: float, earliest: float) -> None:
        if process.skipped:
            due = self._on_grid(now + SWEEP)
        elif process.looks < len(LOOKS):
            due = min(process.born + LOOKS[process.looks], self._on_grid(now + YOUNG_CHECK))
        else:
            due = self._on_grid(now + CHECK)
        self._schedule(process, max(due, earliest))

    def _on_grid(self, when: float) -> float:
        """The first listing that is not before: a host at rest wakes us once a second and not once a process."""
        return self._next_list + max(0, math.ceil((when - self._next_list) / self._interval)) * self._interval

    def _examine(self, process: _Process, now: float, *, always: bool) -> Iterator[Found]:
        """Is it the same process, the same program, with the same code mapped?"""
        stat = self._procfs.stat(process.pid)
        if stat is None:
            return
        if process.start_time != stat.start_time:
            always = True
            yield from self._replace(process, stat, now)
            process = self._processes[process.pid]
        if stat.kernel_thread or (stat.image == self._own_image and os.getpid() in (process.pid, stat.parent)):
            # Nothing to see in kernel threads, us and our forks; the sweep alone comes by, in case the number is another's by then.
            process.skipped, process.swept = True, now
            return
        if stat.image == _NO_MEMORY:
            return  # a zombie
        if stat.image != process.image:
            process.image = stat.image
            yield from self._on_exec(process, now)
        code = self._procfs.code_size(process.pid)
        if code is None or (code == process.code and not always and now - process.swept < SWEEP):
            return
        process.code, process.swept = code, now
        yield from self._scan(process, now)

    def _replace(self, process: _Process, stat: Stat, now: float) -> Iterator[Found]:
        """The first sight of a process, or of another one that has got the number of an old one."""
        if process.start_time:
            yield from self._gone(process.pid)
            process = self._processes[process.pid] = _Process(process.pid, now)
            process.looks = 1
            self._schedule(process, now + LOOKS[1])
        process.start_time, process.image = stat.start_time, stat.image

    def _on_exec(self, process: _Process, now: float) -> Iterator[Found]:
        if process.told:
            yield ProcessExeced(process.pid, process.start_time)
        process.reset(now)
        process.looks = 1  # this look is the first

    def _scan(self, process: _Process, now: float) -> Iterator[Found]:
        data = self._procfs.read(f"{process.pid}/maps", _MAPS_LIMIT)
        if not data:
            return
        mapped = {(file.device, file.inode): file for file in maps.parse(data)}
        if process.told and not any(key in mapped for key, _ in process.libraries):
            process.told = False
            process.libraries.clear()
            yield ProcessExeced(process.pid, process.start_time)
        process.waiting = {key: mapped[key] for key in process.waiting if key in mapped}
        before = set(process.handled)
        # Only what is still mapped is remembered: a library that is unmapped and mapped again is told again.
        handled = array.array("I")
        process.handled = handled
        for key, file in mapped.items():
            number = self._file(key).number
            if number in before:
                handled.append(number)
            elif key not in process.waiting:
                self._consider(process, key, file, now)

    # --- files -----------------------------------------------------------------------------------------------------------------

    def _file(self, key: Key) -> _File:
        file = self._files.get(key)
        if file is None:
            self._numbered = (self._numbered + 1) & 0xFFFFFFFF
            file = self._files[key] = _File(self._numbered, key)
            if len(self._files) > CACHE:
                self._forget_one()
        self._files.move_to_end(key)
        return file

    def _forget_one(self) -> None:
        """The one that was not asked for the longest; a file that holds a library is kept as long as others can go."""
        for key, file in itertools.islice(self._files.items(), 64):
            if not file.matches:
                del self._files[key]
                return
        self._files.popitem(last=False)

    def _consider(self, process: _Process, key: Key, mapped: maps.MappedFile, now: float) -> None:
        """Nothing, where it was seen a moment ago that nothing is in it; else the child looks, if only whether it is the same file."""
        file = self._file(key)
        if now < file.valid_until:
            if not file.failures:
                process.handled.append(file.number)
        elif len(self._queue) >= _QUEUE_MOST and key not in self._queue:
            process.swept = float("-inf")  # more new files than are remembered: at the next look
        else:
            process.waiting[key] = mapped
            self._queue.setdefault(key, []).append(process.pid)

    def _learn(self, answer: Answer, now: float) -> Iterator[Found]:
        file = self._file(answer.key)
        pids = self._queue.pop(answer.key, [])
        holders = [process for pid in pids if (process := self._processes.get(pid)) and answer.key in process.waiting]
        if answer.identity is None and answer.reason == GONE:
            self._ask_another(answer.key, holders)
            return
        if answer.same and file.identity is None:  # forgotten meanwhile
            self._queue[answer.key] = [process.pid for process in holders]
            return
        if answer.reason and not file.failures and holders:
            yield SearchFailed(holders[0].waiting[answer.key].path, answer.reason)
        self._note(file, answer, now)
        for process in holders:
            mapped = process.waiting.pop(answer.key)
            if answer.identity is not None:
                process.handled.append(file.number)
            if file.matches:
                yield from self._tell(process, mapped, file)

    def _note(self, file: _File, answer: Answer, now: float) -> None:
        if not answer.same:
            file.identity, file.matches, file.twin = answer.identity, answer.matches, answer.twin
            if answer.reason:
                file.valid_until = now + min(REST * 2**file.failures, REST_MOST)
                file.failures = min(file.failures + 1, 16)
                return
            file.failures = 0
        file.valid_until = now + (0.0 if file.matches else TRUST)

    def _ask_another(self, key: Key, holders: list[_Process]) -> None:
        """The process whose name was tried has ended, or its mapping was split; another one may have the file still."""
        if holders:
            holders[0].waiting.pop(key)
            holders[0].swept = float("-inf")
        if len(holders) > 1:
            self._queue[key] = [process.pid for process in holders[1:]]

    def _tell(self, process: _Process, mapped: maps.MappedFile, file: _File) -> Iterator[Found]:
        key = file.twin or file.key
        new = [match for match in file.matches if (file.key, match.backend) not in process.libraries]
        if new and not process.told:
            seen = self._seen(process)
            if seen is None:
                return
            process.told = True
            yield seen
        for match in new:
            process.libraries[file.key, match.backend] = mapped.entry
            path = mapped.path + (" (deleted)" if mapped.deleted else "")
            opens = self._opens(process.pid, mapped.entry)
            file_key = (*key, *(file.identity or (0, 0)))
            yield LibraryFound(process.pid, process.start_time, *key, path, opens, match.backend, match.version, match.symbols, file_key)

    def _seen(self, process: _Process) -> ProcessSeen | None:
        status = self._procfs.status(process.pid)
        if status is None:
            return None
        pids = status.namespace_pids or (process.pid,)
        environ = self._procfs.environ(process.pid)
        if self._procfs.start_time(process.pid) != process.start_time:
            return None  # what was read may be of another process that has its number now
        return ProcessSeen(process.pid, process.start_time, status.parent, status.uid, status.name, pids, environ)

    def _opens(self, pid: int, entry: str) -> str:
        return f"{self._procfs.root}/{pid}/map_files/{entry}"

    # --- searches --------------------------------------------------------------------------------------------------------------

    def _start_search(self, now: float) -> Iterable[Found]:
        if self._child is not None or not self._queue or now < self._not_before:
            return []
        if len(self._dying) > _STUCK_MOST:
            told, self._stuck_told = self._stuck_told, True
            words = f"{len(self._dying)} searches wait for file systems that do not answer: no other is begun until one of them ends"
            return [] if told else [SearchFailed("", words)]
        self._stuck_told = False
        jobs = list(self._jobs())
        if not jobs:
            return []
        try:
            self._child = SearchChild(jobs, self._wanted, list(self._twins()), self._clock())
        except OSError as error:
            self._not_before = now + RETRY
            return [SearchFailed("", f"no process can be started to search with: {error.strerror}")]
        self._poll.register(self._child.fileno(), select.EPOLLIN)
        return []

    def _jobs(self) -> Iterator[Job]:
        """The oldest questions, each with a process that still waits for the answer; what nobody waits for is dropped."""
        count = 0
        for key, pids in list(self._queue.items()):
            holder = next((process for pid in pids if (process := self._processes.get(pid)) and key in process.waiting), None)
            if holder is None:
                del self._queue[key]
                continue
            file = holder.waiting[key]
            known = self._files.get(key)
            self.searches += known is None or known.identity is None
            root = f"{self._procfs.root}/{holder.pid}/root"
            yield Job(key, self._opens(holder.pid, file.entry), root, file.path, known.identity if known else None)
            count += 1
            if count >= _BATCH:
                return

    def _twins(self) -> Iterator[Twin]:
        """Files that hold a library, by a name of a live process."""
        named: set[Key] = set()
        for process in self._processes.values():
            for (key, _), entry in process.libraries.items():
                file = self._files.get(key)
                if key not in named and file is not None and file.twin is None and file.identity is not None:
                    named.add(key)
                    yield Twin(key, file.identity, self._opens(process.pid, entry))

    def _give_up(self) -> Iterator[Found]:
        """The file takes too long. Where its file system does not answer, all that wait for it rest: they would wait in turn."""
        child = self._child
        assert child is not None
        blocked = self._procfs.state(child.pid) in {"D", "S"}
        device = child.left[0].key[0] if child.left else None
        yield from self._end_search(_TOO_LONG)
        if blocked:
            for key in [key for key in self._queue if key[0] == device]:
                self._rest(key)

    def _rest(self, key: Key) -> None:
        """Not the file's own failure: its rest does not grow, so nobody's slow file keeps those of others from being found."""
        file = self._file(key)
        file.failures = max(file.failures, 1)
        file.valid_until = self._clock() + REST
        for pid in self._queue.pop(key):
            process = self._processes.get(pid)
            if process is not None:
                process.waiting.pop(key, None)

    def _end_search(self, why: str) -> Iterator[Found]:
        """The child is done, or done for: then the file it was at is to blame, and the rest is for the next child."""
        child = self._child
        assert child is not None
        self._child = None
        self._poll.unregister(child.fileno())
        child.kill()
        if not child.reaped():
            self._dying.append(child)
        if child.left:
            job = child.left[0]
            yield from self._learn(Answer(job.key, None, False, [], None, why), self._clock())
