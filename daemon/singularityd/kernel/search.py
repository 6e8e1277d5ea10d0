"""Searches mapped files in a child process: it opens what other people have put on their file systems, so it may wait, fail or die.

The executor itself never opens or even stats a mapped file: a file system in user space, or one whose server is gone, would stop the
whole daemon. The child has a low priority, a limit for each file, and the executor's death as its own. It answers line by line, in the
order of the jobs; when it dies, the first job without an answer is to blame and the others are given to the next child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import posixpath
import re
import resource
import signal
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from singularityd.kernel import elf

Key = tuple[int, int]
Identity = tuple[int, int]
"""(mtime in ns, size): with device and inode it names one content of a file."""

GONE = "gone"
"""The reason of an answer whose file could not be opened because nobody maps it there any more."""
_LINE_LIMIT = 1 << 20
_VERSION = re.compile(r"[A-Za-z0-9.+_-]{1,31}")
_VERSION_FILE_LIMIT = 1 << 16
_CPU_LIMIT = 60
_PR_SET_PDEATHSIG = 1
_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x02, 0x04, 0x10
_PFN = (1 << 55) - 1
_PRESENT = 1 << 63
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Twin(NamedTuple):
    """A file that is known to hold a library, and a name that opens it while its process lives."""

    key: Key
    identity: Identity
    opens: str


class Job(NamedTuple):
    """One file to search, or to compare with what is known of it."""

    key: Key
    opens: str
    """Its name in some process's map_files."""
    root: str
    """That process's root directory, for the file with the version."""
    path: str
    known: Identity | None
    """What it was when it was searched last; the same again needs no search."""


class Answer(NamedTuple):
    """What came of a job. `identity` is None where the file could not be opened: `reason` says why, `gone` where its process ended."""

    key: Key
    identity: Identity | None
    same: bool
    matches: list[elf.Match]
    twin: Key | None
    """The key under which this very file is known already: containers mount one file several times."""
    reason: str


class SearchChild:
    """The executor's end of one child."""

    def __init__(self, jobs: Sequence[Job], wanted: Sequence[elf.Wanted], twins: Sequence[Twin], now: float) -> None:
        """Forks; OSError where the host allows no more processes. `now` is when the first job began."""
        self._jobs = list(jobs)
        self._data = bytearray()
        self._answered = 0
        self.progress = now
        """When the job it is at was begun."""
        here, there = socket.socketpair()
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            here.close()
            there.close()
            raise
        if self._pid == 0:
            here.close()
            _run(there, jobs, wanted, twins, parent)
        there.close()
        here.setblocking(False)
        self._channel = here
        self.ended = False

    def fileno(self) -> int:
        """Readable when it has said something, or ended."""
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        """Of the child; 0 when it is gone."""
        return self._pid

    @property
    def left(self) -> list[Job]:
        """Jobs without an answer; the first is the one it is, or was, at."""
        return self._jobs[self._answered :]

    def read(self, now: float) -> list[Answer]:
        """The answers that have come; sets `ended` when there will be no more."""
        try:
            data = self._channel.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self._data += data
        *lines, rest = self._data.split(b"\n")
        self._data = bytearray(rest)
        self.ended = not data or len(rest) > _LINE_LIMIT
        answers: list[Answer] = []
        for line in lines:
            answer = _decode(bytes(line), self.left)
            if answer is None:
                self.ended = True
                break
            answers.append(answer)
            self._answered += 1
            self.progress = now
        return answers

    def kill(self) -> None:
        """End it; it may take a while to die where it waits for a file system: see `reaped`."""
        self.ended = True
        self._channel.close()
        if not self.reaped():
            os.kill(self._pid, signal.SIGKILL)

    def reaped(self) -> bool:
        """Whether it is gone for good; never waits."""
        if self._pid == 0:
            return True
        try:
            done, _ = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:
            done = self._pid
        if done:
            self._pid = 0
        return bool(done)


def _decode(line: bytes, left: Sequence[Job]) -> Answer | None:
    """None for what no child of ours says: it read files that are others', so its words are looked at before they are believed."""
    try:
        value = json.loads(line)
        if not left or tuple(value["key"]) != left[0].key:
            return None
        identity, twin = value["identity"], value["twin"]
        matches = [elf.Match(backend, version, _symbols(symbols), origin) for backend, version, symbols, origin in value["matches"]]
        texts = [str(value["reason"]), *(str(item) for match in matches for item in (match.backend, match.version, match.origin))]
        if any(len(text) > 1024 for text in texts):
            return None
        return Answer(
            left[0].key,
            (int(identity[0]), int(identity[1])) if identity else None,
            bool(value["same"]),
            matches,
            (int(twin[0]), int(twin[1])) if twin else None,
            texts[0],
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _symbols(value: dict[str, int]) -> dict[str, int]:
    if any(not isinstance(offset, int) or not 0 <= offset < 1 << 63 for offset in value.values()):
        raise ValueError("an offset")
    return dict(value)


# --- in the child --------------------------------------------------------------------------------------------------------------


def _run(channel: socket.socket, jobs: Sequence[Job], wanted: Sequence[elf.Wanted], twins: Sequence[Twin], parent: int) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # A file that is cut while it is read ends this process by SIGBUS: no core file of a root process for that.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_LIMIT, _CPU_LIMIT))
        os.setpriority(os.PRIO_PROCESS, 0, 10)
        if os.getppid() == parent:
            # A child that a file system keeps waiting may outlive the executor: no probe and no fault may live on in it.
            _keep_only(channel.fileno())
            known = list(twins)
            for job in jobs:
                answer = search(job, wanted, known)
                if answer.identity and answer.matches and answer.twin is None:
                    known.append(Twin(job.key, answer.identity, job.opens))
                channel.sendall(json.dumps(answer._asdict()).encode() + b"\n")
            status = 0
    finally:
        os._exit(status)


def _keep_only(descriptor: int) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != descriptor:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(number)


def search(job: Job, wanted: Sequence[elf.Wanted], twins: Sequence[Twin]) -> Answer:
    """What is in a file; says so where it cannot be read."""
    try:
        descriptor, status = open_file(job.opens)
    except OSError as error:
        reason = GONE if isinstance(error, FileNotFoundError) else f"cannot be opened: {error.strerror}"
        return Answer(job.key, None, False, [], None, reason)
    try:
        identity = (status.st_mtime_ns, status.st_size)
        if identity == job.known or not stat.S_ISREG(status.st_mode):
            return Answer(job.key, identity, identity == job.known, [], None, "")
        try:
            matches = elf.find(descriptor, wanted)
        except elf.NotElf:
            matches = []
        except elf.ElfError as error:
            return Answer(job.key, identity, False, [], None, str(error))
        matches = [match._replace(version=_version(job, match, wanted)) for match in matches]
        twin = _twin(descriptor, identity, matches, job, twins) if matches else None
        return Answer(job.key, identity, False, matches, twin, "")
    finally:
        os.close(descriptor)


def open_file(name: str) -> tuple[int, os.stat_result]:
    """A descriptor that reads a regular file, and what it is; of anything else one that only names it. OSError where it is not there.

    Mapped files may be devices, and opening one may set it going: so it is looked at before it is opened.
    """
    named = os.open(name, os.O_PATH | os.O_CLOEXEC)
    status = os.fstat(named)
    if not stat.S_ISREG(status.st_mode):
        return named, status
    try:
        return os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), status
    finally:
        os.close(named)


def _version(job: Job, match: elf.Match, wanted: Sequence[elf.Wanted]) -> str:
    version = match.version
    for want in wanted:
        if not version and want.backend == match.backend and want.version_file[0]:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(job.path), want.version_file[0]))
            version = read_version(job.root, path, want.version_file[1])
    # It will be a label and a table cell: what a file says is no more than a version here.
    clean = _VERSION.match(version)
    return clean.group() if clean else ""


def read_version(root: str, path: str, pattern: bytes) -> str:
    """The version in a small regular file of a process's root; empty where there is none.

    The path is the process's: it is resolved below the root, without following a link anywhere, and nothing is waited for.
    """
    try:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        descriptor = _open_below(top, path)
    finally:
        os.close(top)
    if descriptor < 0:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        match = re.search(pattern, os.read(descriptor, _VERSION_FILE_LIMIT))
        return match.group(1).decode("ascii", "replace") if match else ""
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _open_below(top: int, path: str) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    how = struct.pack("QQQ", flags, 0, _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_IN_ROOT)
    name = path.encode("utf-8", "surrogateescape")
    return int(_libc.syscall(_OPENAT2, ctypes.c_int(top), ctypes.c_char_p(name), ctypes.c_char_p(how), ctypes.c_size_t(len(how))))


def _twin(descriptor: int, identity: Identity, matches: Sequence[elf.Match], job: Job, twins: Sequence[Twin]) -> Key | None:
    """The key of the same file seen through another mount.

    Each overlay mount of a container gives the file a device number of its own, while a probe goes to the one file below: two probes
    there would count every call twice. Loop mounts of one image look just as alike and are two files. What tells them apart is whether
    they share their pages in memory.
    """
    offset = next(iter(matches[0].symbols.values()))
    for twin in twins:
        if twin.key == job.key or twin.identity != identity:
            continue
        try:
            other, _ = open_file(twin.opens)
        except OSError:
            continue
        try:
            if same_page(descriptor, other, offset):
                return twin.key
        finally:
            os.close(other)
    return None


def same_page(first: int, second: int, offset: int) -> bool:
    """Whether two descriptors show the same page of memory at an offset; no where the kernel does not say (CAP_SYS_ADMIN)."""
    frames = list(_frames((first, second), offset // mmap.PAGESIZE * mmap.PAGESIZE))
    return len(frames) == 2 and frames[0] == frames[1] != 0


def _frames(descriptors: Sequence[int], offset: int) -> Iterator[int]:
    """Page frame numbers; all mappings stay until the last was looked at, so that no frame is used again meanwhile."""
    mapped: list[int] = []
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for descriptor in descriptors:
                address = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, offset)
                if address is None or address == ctypes.c_void_p(-1).value:
                    return
                mapped.append(address)
                ctypes.string_at(address, 1)
                (entry,) = struct.unpack("Q", os.pread(pagemap.fileno(), 8, address // mmap.PAGESIZE * 8))
                yield entry & _PFN if entry & _PRESENT else 0
    except (OSError, struct.error):
        return
    finally:
        for address in mapped:
            _libc.munmap(address, mmap.PAGESIZE)
