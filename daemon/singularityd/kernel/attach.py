"""Attaches the programs to library files, once for each (device, inode), and detaches what is hit too often or used by nobody.

A probe is inode-wide: it fires in every process that maps the file, now or later, in any container. Two links on one place would
count double, so files are known by device and inode, never by path. A link holds the file's mount, so a file that no process maps
any more is let go after a while: long enough that the next job of a queue is seen from its first call. Executor only, single thread.
"""

from __future__ import annotations

import collections
import ctypes as c
import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from singularityd.kernel import abi, bpf
from singularityd.kernel.changes import Changes
from singularityd.kernel.discovery import LibraryFound
from singularityd.kernel.libraries import SiteSpec, Table


class AttachError(RuntimeError):
    """Raised when the kernel refused; `reason` is a short label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class ShedSite(NamedTuple):
    """A site the guard took away."""

    backend: str
    symbol: str
    path: str
    rate: int


class _Numbers:
    """Free entries of a kernel array, 1 and up; the one freed the longest is taken next."""

    def __init__(self, size: int) -> None:
        self._free = collections.deque(range(1, size))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.popleft()

    def give(self, number: int) -> None:
        self._free.append(number)


class AttachedFile:
    """The links of one file and the sites behind them."""

    def __init__(self, key: tuple[int, int], backend: str, path: str, open_path: str) -> None:
        self.key = key
        self.backend = backend
        self.path = path
        self.open_path = open_path
        self.number = 0
        """The file's entry in map layouts; 0 once the map is full."""
        self.sites: dict[int, SiteSpec] = {}
        self.numbers: list[int] = []
        """Entries of map sites that are this file's, also for sites that were skipped or shed."""
        self.skipped: list[str] = []
        """Symbols whose first instruction the kernel cannot probe."""
        self.shed: list[str] = []
        """Symbols that the guard took away."""
        self.links: list[int] = []
        self.users: set[int] = set()
        """Pids that map it."""
        self.unused_since = 0.0
        """Monotonic seconds; meaningful while there are no users."""
        self.content: tuple[int, ...] = ()
        """Changes with the bytes of the file: (mtime in ns, size)."""
        self.watch = 0
        """The number by which a change is told; 0: it is not."""

    def reaches(self, point: int) -> bool:
        """Whether a call of this kind carries a probe; 0 is any call."""
        return any(spec.site.kind != abi.SITE_END and point in (0, spec.site.op) for spec in self.sites.values())

    def close(self) -> None:
        """Detach; waits for a grace period in the kernel."""
        for descriptor in self.links:
            os.close(descriptor)
        self.links = []


class Attacher:
    """All attached files of this host."""

    def __init__(self, programs: Mapping[str, int], maps: Mapping[str, int], *, multi: bool, return_probes: bool, limit: int) -> None:
        """`limit` is hits a second of one site above which it is shed, 0 for never; `return_probes` off leaves begins only."""
        self._programs = programs
        self._sites_map = maps["sites"]
        self._hits_map = maps["site_hits"]
        self._multi = multi
        self._return_probes = return_probes
        self._limit = limit
        self._source = 0 if multi else bpf.uprobe_type()
        self._numbers = _Numbers(abi.SITES)
        self._file_numbers = _Numbers(abi.LAYOUTS)
        self._layouts_map = maps["layouts"]
        self._last_hits: dict[int, int] = {}
        self._last_time = time.monotonic()
        self._changes = Changes()
        self.files: dict[tuple[int, int, str], AttachedFile] = {}

    def fileno(self) -> int:
        """Readable when an attached file was written to; -1 where the kernel cannot tell."""
        return self._changes.fileno()

    def attached(self, backend: str) -> int:
        """Sites of a backend in all files."""
        return sum(len(file.sites) for file in self.files.values() if file.backend == backend)

    def attach(self, table: Table, found: LibraryFound) -> AttachedFile:
        """Attach one library of one file, for one more process. A file attached before stays as it is, unless its bytes are others."""
        key = (found.device, found.inode, table.backend)
        file = self.files.get(key)
        if file is not None and file.content != found.file_key[2:]:
            self.detach(file)
            file = None
        if file is None:
            file = self._attach_file(table, found)
            self.files[key] = file
        file.users.add(found.pid)
        return file

    def _attach_file(self, table: Table, found: LibraryFound) -> AttachedFile:
        wanted = table.sites(found.symbols, found.version)
        if len(wanted) > len(self._numbers):
            self.expire(0.0)
        if len(wanted) > len(self._numbers):
            raise AttachError("too_many_sites", f"more than {abi.SITES} sites: {found.path} is left out")
        file = AttachedFile((found.device, found.inode), table.backend, found.path, found.open_path)
        file.content = found.file_key[2:]
        file.watch = self._changes.add(found.open_path)
        file.number = self._file_numbers.take() if len(self._file_numbers) else 0
        for spec in wanted:
            spec.site.layout = file.number
            number = self._numbers.take()
            bpf.update(self._sites_map, c.c_uint32(number), spec.site)
            file.sites[number] = spec
            file.numbers.append(number)
        try:
            self._read_pages(file)
            self._link(file)
        except (AttachError, OSError):
            self._free(file)
            raise
        return file

    def leave(self, pid: int) -> None:
        """A process is gone, or maps other files now."""
        for file in self.files.values():
            if pid in file.users:
                file.users.remove(pid)
                file.unused_since = time.monotonic()

    def expire(self, linger: float) -> list[AttachedFile]:
        """Detach what nobody has mapped for `linger` seconds."""
        now = time.monotonic()
        late = [file for file in self.files.values() if not file.users and now - file.unused_since >= linger]
        for file in late:
            self.detach(file)
        return late

    def detach_changed(self) -> list[AttachedFile]:
        """Detach what was written to: the next process that maps it must not find breakpoints where other bytes stand."""
        written = self._changes.read()
        changed = [file for file in self.files.values() if file.watch in written or (0 in written and not file.users)]
        for file in changed:
            self.detach(file)
        return changed

    def detach(self, file: AttachedFile) -> None:
        """Take all probes of a file away, and free their numbers."""
        file.close()
        del self.files[(*file.key, file.backend)]
        self._free(file)

    def _free(self, file: AttachedFile) -> None:
        """Of a file that is not, or no longer, among the attached."""
        if all(other.watch != file.watch for other in self.files.values()):
            self._changes.remove(file.watch)
        for number in file.numbers:
            self._numbers.give(number)
        file.numbers.clear()
        file.sites.clear()
        if file.number:
            bpf.update(self._layouts_map, c.c_uint32(file.number), abi.Layout())
            self._file_numbers.give(file.number)
            file.number = 0

    def _read_pages(self, file: AttachedFile) -> None:
        # A probe on a page that is not in the page cache makes the kernel read it inside mmap: ext4 then warns and taints (5.10-6.x).
        descriptor = os.open(file.open_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            state = os.fstat(descriptor)
            if (state.st_mtime_ns, state.st_size) != file.content:
                raise AttachError("changed", f"{file.path} was written to while it was looked at")
            for spec in file.sites.values():
                os.pread(descriptor, 16, spec.offset)
        finally:
            os.close(descriptor)

    def _link(self, file: AttachedFile) -> None:
        # The end of a call must be watched before its beginning, or the first calls would seem to hang for ever.
        groups = [("on_end", True, False), ("on_call", False, False)]
        if file.backend == "nccl" and self._return_probes:
            groups.insert(1, ("on_return", False, True))
        try:
            for program, ends, returns in groups:
                members = [(number, spec) for number, spec in file.sites.items() if (spec.site.kind == abi.SITE_END) is ends]
                if members:
                    self._link_group(file, self._programs[program], members, returns=returns)
        except OSError as error:
            file.close()
            raise AttachError(_reason(error), f"{file.path}: {_words(error)}") from error

    def _link_group(self, file: AttachedFile, program: int, members: list[tuple[int, SiteSpec]], *, returns: bool) -> None:
        try:
            file.links.extend(self._attach(file, program, members, returns=returns))
        except OSError:
            # One instruction that cannot be probed (a lock prefix, for example) refuses all of them: leave it out, keep the rest.
            good = [member for member in members if self._probeable(file, program, member, returns=returns)]
            if not good:
                raise
            kept = {number for number, _ in good}
            for number, spec in members:
                if number not in kept:
                    del file.sites[number]
                    file.skipped.append(spec.symbol)
            file.links.extend(self._attach(file, program, good, returns=returns))

    def _probeable(self, file: AttachedFile, program: int, member: tuple[int, SiteSpec], *, returns: bool) -> bool:
        try:
            for link in self._attach(file, program, [member], returns=returns):
                os.close(link)
        except OSError:
            return False
        return True

    def _attach(self, file: AttachedFile, program: int, members: list[tuple[int, SiteSpec]], *, returns: bool) -> list[int]:
        if self._multi:
            offsets = [spec.offset for _, spec in members]
            return [bpf.attach_uprobes(program, file.open_path, offsets, [number for number, _ in members], returns=returns)]
        made: list[int] = []
        try:
            for number, spec in members:
                made.extend(bpf.attach_uprobe(program, file.open_path, spec.offset, number, returns=returns, source=self._source))
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return made

    def guard(self) -> list[ShedSite]:
        """Compare hit counters with the last reading and shed sites above the limit; called about once a second."""
        now = time.monotonic()
        elapsed, self._last_time = max(now - self._last_time, 0.001), now
        shed: list[ShedSite] = []
        value = c.c_uint64()
        for file in list(self.files.values()):
            hot: dict[int, int] = {}
            for number in file.sites:
                bpf.lookup(self._hits_map, c.c_uint32(number), value)
                rate = int((value.value - self._last_hits.get(number, 0)) / elapsed)
                self._last_hits[number] = value.value
                if self._limit and rate > self._limit:
                    hot[number] = rate
            if hot:
                shed.extend(self._shed(file, hot))
        return shed

    def _shed(self, file: AttachedFile, hot: Mapping[int, int]) -> Iterable[ShedSite]:
        gone = [ShedSite(file.backend, file.sites[number].symbol, file.path, rate) for number, rate in hot.items()]
        ends = any(file.sites[number].site.kind == abi.SITE_END for number in hot)
        for number in hot:
            file.shed.append(file.sites.pop(number).symbol)
        # Begins without their ends would look like calls that never return.
        if ends or not any(spec.site.kind == abi.SITE_CALL for spec in file.sites.values()):
            file.sites.clear()
        file.close()
        if file.sites:
            self._link(file)
        return gone

    def detach_all(self) -> None:
        """Close every link."""
        for file in self.files.values():
            file.close()
        self.files.clear()
        self._changes.close()


_ENOTSUPP = 524
"""The kernel's own errno for an instruction that it cannot probe; libc has no name for it."""


def _reason(error: OSError) -> str:
    return "instruction" if error.errno == _ENOTSUPP else os.strerror(error.errno or 0)[:31]


def _words(error: OSError) -> str:
    return "the kernel cannot probe an instruction" if error.errno == _ENOTSUPP else str(error.strerror)
