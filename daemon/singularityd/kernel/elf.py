"""Finds functions in ELF files without walking their symbol tables.

libtorch_cpu has 75,000 dynamic symbols: decoding them in Python takes two seconds. So: first look for the name's bytes in the string
table, which says no for almost every file at the cost of one read; then ask the file's own hash table (DT_GNU_HASH) for exact names.
Names known by prefix only are listed from the string table first. Static copies have no dynamic names: their .symtab is searched the
same way. Everything is read with bounds; a corrupt file raises ElfError, never anything else.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_MACHINES = {62: "x86_64", 183: "aarch64"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH = 4, 5, 6, 10, 0x6FFFFEF5
_SHT_SYMTAB = 2
_SYMBOL = struct.Struct("<IBBHQQ")
_STT_FUNC, _STT_IFUNC = 2, 10
_CHAIN_LIMIT = 1_000_000
_TABLE_LIMIT = 1 << 30


class ElfError(ValueError):
    """Raised for a file that is not a readable 64-bit little-endian ELF; the text is the reason."""


class Wanted(NamedTuple):
    """What to look for."""

    backend: str
    markers: tuple[bytes, ...]
    exact: tuple[bytes, ...]
    prefixes: tuple[bytes, ...]
    version: bytes
    """A pattern searched in the file's read-only data, first group; empty: none."""
    version_file: tuple[str, bytes] = ("", b"")
    """A file beside the library that holds the version, and the pattern; used by discovery."""


class Match(NamedTuple):
    """A library that is in a file."""

    backend: str
    version: str
    symbols: dict[str, int]
    """Function -> offset in the file."""
    origin: str
    """dynsym or symtab."""


class Segment(NamedTuple):
    """A PT_LOAD."""

    offset: int
    address: int
    size: int
    executable: bool


class Image:
    """One file, mapped read-only; close it to give the address space back."""

    def __init__(self, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            if size < 64:
                raise ElfError("too short for an ELF header")
            self.data = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            if isinstance(error, ElfError):
                raise
            raise ElfError(f"cannot be mapped: {error}") from error
        try:
            self._header()
        except struct.error as error:
            self.close()
            raise ElfError("the headers are cut off") from error
        except ElfError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap."""
        self.data.close()

    def _header(self) -> None:
        if self.data[:4] != b"\x7fELF":
            raise ElfError("no ELF file")
        if self.data[4] != 2 or self.data[5] != 1:
            raise ElfError("not a 64-bit little-endian ELF file")
        fields = struct.unpack_from("<HHIQQQIHHHHHH", self.data, 16)
        if fields[1] not in _MACHINES:
            raise ElfError(f"machine {fields[1]} is not one of {', '.join(_MACHINES.values())}")
        self.machine = _MACHINES[fields[1]]
        self._section_table, self._section_size, self._section_count = fields[5], fields[10], fields[11]
        program_table, program_size, program_count = fields[4], fields[8], fields[9]
        self.segments: list[Segment] = []
        self.dynamic = (0, 0)
        for index in range(program_count):
            kind, flags, offset, address, _, size, _, _ = struct.unpack_from("<IIQQQQQQ", self.data, program_table + index * program_size)
            if kind == _PT_LOAD:
                self.segments.append(Segment(offset, address, size, bool(flags & 1)))
            elif kind == _PT_DYNAMIC:
                self.dynamic = (offset, size)

    def file_offset(self, address: int, *, code: bool = False) -> int | None:
        """Where a virtual address lies in the file."""
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.size and (segment.executable or not code):
                return address - segment.address + segment.offset
        return None

    def slice(self, offset: int, size: int, what: str) -> bytes:
        """Bytes of the file, all of them or ElfError."""
        if offset < 0 or size < 0 or size > _TABLE_LIMIT or offset + size > len(self.data):
            raise ElfError(f"{what} lies outside the file")
        return bytes(self.data[offset : offset + size])

    def dynamic_tags(self) -> dict[int, int]:
        """The last value of each tag of the dynamic section."""
        offset, size = self.dynamic
        raw = self.slice(offset, min(size, 1 << 16), "the dynamic section")
        return {tag: value for tag, value in struct.iter_unpack("<QQ", raw[: len(raw) // 16 * 16]) if tag}

    def symtab(self) -> tuple[int, int, int, int] | None:
        """(offset, size, string offset, string size) of .symtab; None where the file is stripped."""
        if not self._section_table or self._section_count > 65000:
            return None
        for index in range(self._section_count):
            start = self._section_table + index * self._section_size
            _, kind, _, _, offset, size, link, _, _, _ = struct.unpack_from("<IIQQQQIIQQ", self.data, start)
            if kind == _SHT_SYMTAB and link < self._section_count:
                start = self._section_table + link * self._section_size
                _, _, _, _, strings, string_size, _, _, _, _ = struct.unpack_from("<IIQQQQIIQQ", self.data, start)
                return offset, size, strings, string_size
        return None


class Symbols:
    """A symbol table and its names."""

    origin = ""

    def __init__(self, image: Image, start: int, size: int) -> None:
        """`start` and `size` of the string table in the file; it is searched in place, not copied (hundreds of MB in a torch job)."""
        if start < 0 or size < 0 or start + size > len(image.data):
            raise ElfError("the string table lies outside the file")
        self.image = image
        self.start = start
        self.end = start + size

    def holds(self, name: bytes) -> bool:
        """Whether the name's bytes are in the string table: cheap, and no for almost every file.

        Linkers share tails: `ncclAllReduce` may be stored as the end of `pncclAllReduce` only.
        """
        return self.image.data.find(name + b"\0", self.start, self.end) >= 0

    def with_prefix(self, prefixes: Sequence[bytes]) -> Iterator[bytes]:
        """Names that begin with one of the prefixes."""
        pattern = re.compile(b"(?:" + b"|".join(re.escape(prefix) for prefix in prefixes) + rb")[^\0]{0,512}(?=\0)")
        for match in pattern.finditer(self.image.data, self.start, self.end):
            yield bytes(match.group())

    def offsets(self, names: Iterable[bytes]) -> dict[str, int]:
        """File offsets of the functions among the names."""
        raise NotImplementedError

    def _code(self, entry: tuple[int, int, int, int, int, int]) -> int | None:
        _, info, _, section, value, _ = entry
        if section == 0 or info & 0xF != _STT_FUNC:
            return None
        return self.image.file_offset(value, code=True)


class DynamicSymbols(Symbols):
    """.dynsym, looked up through the file's own hash table."""

    origin = "dynsym"

    def __init__(self, image: Image) -> None:
        self._tags = image.dynamic_tags()
        strings = image.file_offset(self._tags.get(_DT_STRTAB, -1))
        symbols = image.file_offset(self._tags.get(_DT_SYMTAB, -1))
        if strings is None or symbols is None:
            raise ElfError("no dynamic symbols")
        self._symbols = symbols
        super().__init__(image, strings, self._tags.get(_DT_STRSZ, 0))

    def offsets(self, names: Iterable[bytes]) -> dict[str, int]:
        """By DT_GNU_HASH, by DT_HASH where there is no other."""
        table = self.image.file_offset(self._tags.get(_DT_GNU_HASH, -1))
        if table is not None:
            return self._by_hash(names, GnuHash(self.image.data, table).candidates)
        table = self.image.file_offset(self._tags.get(_DT_HASH, -1))
        if table is not None:
            return self._by_hash(names, SysvHash(self.image.data, table).candidates)
        raise ElfError("dynamic symbols without a hash table")

    def _by_hash(self, names: Iterable[bytes], candidates: object) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in names:
            for index in candidates(name):  # type: ignore[operator]
                entry = _SYMBOL.unpack_from(self.image.data, self._symbols + index * _SYMBOL.size)
                if self._name(entry[0]) != name:
                    continue
                offset = self._code(entry)
                if offset is not None:
                    found[name.decode("utf-8", "replace")] = offset
                    break
        return found

    def _name(self, index: int) -> bytes:
        begin = self.start + index
        end = self.image.data.find(b"\0", begin, min(self.end, begin + 4096))
        return bytes(self.image.data[begin:end]) if end >= 0 else b""


class GnuHash:
    """DT_GNU_HASH."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self._buckets, self._first, bloom, _ = struct.unpack_from("<IIII", data, offset)
        self._bucket_table = offset + 16 + 8 * bloom
        self._chains = self._bucket_table + 4 * self._buckets

    def candidates(self, name: bytes) -> Iterator[int]:
        """Symbols whose hash is the name's."""
        wanted = 5381
        for byte in name:
            wanted = (wanted * 33 + byte) & 0xFFFFFFFF
        if not self._buckets:
            return
        (index,) = struct.unpack_from("<I", self._data, self._bucket_table + 4 * (wanted % self._buckets))
        if index < self._first:
            return
        for _ in range(_CHAIN_LIMIT):
            (value,) = struct.unpack_from("<I", self._data, self._chains + 4 * (index - self._first))
            if value | 1 == wanted | 1:
                yield index
            if value & 1:
                return
            index += 1


class SysvHash:
    """DT_HASH."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self._buckets, self._chains = struct.unpack_from("<II", data, offset)
        self._table = offset + 8

    def candidates(self, name: bytes) -> Iterator[int]:
        """Symbols in the name's bucket."""
        value = 0
        for byte in name:
            value = (value << 4) + byte
            high = value & 0xF0000000
            value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
        if not self._buckets:
            return
        (index,) = struct.unpack_from("<I", self._data, self._table + 4 * (value % self._buckets))
        for _ in range(min(self._chains, _CHAIN_LIMIT)):
            if not index or index >= self._chains:
                return
            yield index
            (index,) = struct.unpack_from("<I", self._data, self._table + 4 * (self._buckets + index))


class StaticSymbols(Symbols):
    """.symtab: no hash, so the entries are looked through for the string offsets of the names found."""

    origin = "symtab"

    def __init__(self, image: Image) -> None:
        place = image.symtab()
        if place is None:
            raise ElfError("no .symtab")
        self._offset, self._size, strings, string_size = place
        super().__init__(image, strings, string_size)

    def offsets(self, names: Iterable[bytes]) -> dict[str, int]:
        """One pass over the table."""
        wanted: dict[int, bytes] = {}
        data = self.image.data
        for name in names:
            place = data.find(name + b"\0", self.start, self.end)
            while place >= 0:
                wanted[place - self.start] = name
                place = data.find(name + b"\0", place + 1, self.end)
        table = self.image.slice(self._offset, self._size // _SYMBOL.size * _SYMBOL.size, ".symtab")
        found: dict[str, int] = {}
        for entry in _SYMBOL.iter_unpack(table):
            known = wanted.get(entry[0])
            if known is not None and (offset := self._code(entry)) is not None:
                found.setdefault(known.decode("utf-8", "replace"), offset)
        return found


def find(descriptor: int, wanted: Sequence[Wanted]) -> list[Match]:
    """Which of the wanted libraries are defined in this file; ElfError for what is no readable ELF file."""
    image = Image(descriptor)
    try:
        return list(_find(image, wanted))
    except struct.error as error:
        raise ElfError("a table points outside the file") from error
    finally:
        image.close()


def _find(image: Image, wanted: Sequence[Wanted]) -> Iterator[Match]:
    left = list(wanted)
    for kind in (DynamicSymbols, StaticSymbols):
        if not left:
            return
        try:
            symbols = kind(image)
        except ElfError:
            continue
        for want in list(left):
            offsets = _offsets(symbols, want)
            if offsets and any(marker.decode() in offsets for marker in want.markers):
                left.remove(want)
                yield Match(want.backend, _version(image, want.version), offsets, symbols.origin)


def _offsets(symbols: Symbols, want: Wanted) -> dict[str, int]:
    if not any(symbols.holds(marker) for marker in want.markers):
        return {}
    names = {*want.markers, *want.exact}
    if want.prefixes:
        names.update(symbols.with_prefix(want.prefixes))
    return symbols.offsets(sorted(names))


def _version(image: Image, pattern: bytes) -> str:
    if not pattern:
        return ""
    # Read-only data lies before or after the code, in a segment of its own or at the head of the first: the first hit is it.
    match = re.search(pattern, image.data)
    return match.group(1).decode("ascii", "replace") if match else ""


def file_key(descriptor: int) -> tuple[int, int, int, int]:
    """(device, inode, mtime in ns, size): changes when the file is replaced or written."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
