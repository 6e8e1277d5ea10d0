"""Finds functions in ELF files without walking their symbol tables.

libtorch_cpu has 75,000 dynamic symbols: decoding them in Python takes two seconds. So: first look for the name's bytes in the string
table, which says no for almost every file at the cost of one read; then ask the file's own hash table (DT_GNU_HASH) for exact names.
Names known by prefix only are listed from the string table first. Static copies have no dynamic names: their .symtab is searched for
the string offsets of the names, a block at a time. Section headers are no loader's business and may be gone or wrong: what the dynamic
symbols say is found without them.

The files belong to whoever mapped them. Every read is checked against the file's size, every chain and list has a limit, and what is
wrong raises ElfError and nothing else. A file that is cut while it is read raises SIGBUS: call this where that may kill, in a child.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_MACHINES = {62: "x86_64", 183: "aarch64"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_PF_X = 1
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH, _DT_VERSYM = 4, 5, 6, 10, 0x6FFFFEF5, 0x6FFFFFF0
_SHT_SYMTAB = 2
_SHN_XINDEX = 0xFFFF
_STT_FUNC = 2
_VERSION_HIDDEN = 0x8000
_FILE_HEADER = struct.Struct("<HHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<QQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_WORD = struct.Struct("<I")
_HALF = struct.Struct("<H")
_SECTIONS_MOST = 100_000
_HASH_STEPS = 400_000
"""Chain entries looked at in one file, all names together: libtorch_cpu's 30 names need 60; a chain that has no end stops here."""
_NAMES_MOST = 32_768
"""Dynamic names, tails of others included, that begin as wanted."""
_PLACES_MOST = 1 << 19
"""Places of wanted names in a string table: an unstripped libnccl has 10,000, most of them inside C++ names."""
_FUNCTIONS_MOST = 4096
_STRINGS_MOST = 1 << 31
"""Bytes of a string table: the largest builds of torch have some hundred MB."""
_PREFIXED = rb"[A-Za-z0-9_]{0,200}"
_BLOCK = 65_536
"""Entries of .symtab decoded at once: 1.5 MiB."""
_VERSION_SPAN = 1 << 28
_VERSION_LENGTH = 31

SymbolEntry = tuple[int, int, int, int, int, int]


class ElfError(ValueError):
    """Raised for a file that cannot be read as what it claims to be; the text is the reason."""


class NotElf(ElfError):
    """Raised for what is no 64-bit little-endian ELF file of a known machine: fonts, archives, 32-bit libraries. No failure."""


class Wanted(NamedTuple):
    """What to look for."""

    backend: str
    markers: tuple[bytes, ...]
    """Any one of these, defined as a function: the file holds this library."""
    exact: tuple[bytes, ...]
    prefixes: tuple[bytes, ...]
    version: bytes
    """A pattern searched in the file's read-only data, first group; empty: none."""
    version_file: tuple[str, bytes] = ("", b"")
    """A file, by its path from the library's folder, that holds the version, and the pattern; read by `search`."""


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


class Section(NamedTuple):
    """One section header, as far as it matters here."""

    name: int
    kind: int
    offset: int
    size: int
    link: int


class Image:
    """One file, mapped read-only; close it to give the address space back."""

    def __init__(self, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            if size < 64:
                raise NotElf("too short for an ELF header")
            self.data = mmap.mmap(descriptor, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ElfError(f"cannot be mapped: {error.strerror}") from error
        except ValueError as error:
            if isinstance(error, ElfError):
                raise
            raise ElfError("was cut while it was read") from error
        self.size = size
        try:
            self._header()
        except ElfError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap."""
        self.data.close()

    def _header(self) -> None:
        if self.data[:4] != b"\x7fELF":
            raise NotElf("no ELF file")
        if self.data[4] != 2 or self.data[5] != 1:
            raise NotElf("not a 64-bit little-endian ELF file")
        _, machine, _, _, programs, sections, _, _, size, count, self._section_size, self._section_count, self._names = self.unpack(
            _FILE_HEADER, 16, "the file header"
        )
        if machine not in _MACHINES:
            raise NotElf(f"machine {machine} is not one of {', '.join(_MACHINES.values())}")
        self.machine = _MACHINES[machine]
        self._section_table = sections
        if count and size < _PROGRAM_HEADER.size:
            raise ElfError(f"program headers of {size} bytes")
        self.segments: list[Segment] = []
        self.dynamic = (0, 0)
        for index in range(count):
            kind, flags, offset, address, _, length, _, _ = self.unpack(_PROGRAM_HEADER, programs + index * size, "a program header")
            if kind == _PT_LOAD:
                self.segments.append(Segment(offset, address, length, bool(flags & _PF_X)))
            elif kind == _PT_DYNAMIC:
                self.dynamic = (offset, length)

    def unpack(self, layout: struct.Struct, offset: int, what: str) -> tuple[int, ...]:
        """One structure, all of it inside the file, or ElfError."""
        if not 0 <= offset <= self.size - layout.size:
            raise ElfError(f"{what} lies outside the file")
        return layout.unpack_from(self.data, offset)

    def span(self, offset: int, size: int, what: str) -> tuple[int, int]:
        """Begin and end of a table that lies inside the file, or ElfError."""
        if not 0 <= offset <= offset + size <= self.size:
            raise ElfError(f"{what} lies outside the file")
        return offset, offset + size

    def file_offset(self, address: int, *, code: bool = False) -> int | None:
        """Where a virtual address lies in the file; None where it lies in no segment, or with `code` in none that is executable."""
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.size and (segment.executable or not code):
                offset = address - segment.address + segment.offset
                return offset if offset < self.size else None
        return None

    def dynamic_tags(self) -> dict[int, int]:
        """The last value of each tag of the dynamic section."""
        begin, end = self.span(self.dynamic[0], min(self.dynamic[1], 1 << 16), "the dynamic section")
        raw = self.data[begin : begin + (end - begin) // 16 * 16]
        tags: dict[int, int] = {}
        for tag, value in _DYNAMIC.iter_unpack(raw):
            if not tag:
                break
            tags[tag] = value
        return tags

    def sections(self) -> Iterator[Section]:
        """All section headers; none where they were removed."""
        if not self._section_table:
            return
        if self._section_size < _SECTION_HEADER.size:
            raise ElfError(f"section headers of {self._section_size} bytes")
        count = self._section_count
        if not count:  # more than 65,279: the first header's size is the number
            count = self.unpack(_SECTION_HEADER, self._section_table, "a section header")[5]
        for index in range(min(count, _SECTIONS_MOST)):
            yield self.section(index)

    def section(self, index: int) -> Section:
        """One section header."""
        place = self._section_table + index * self._section_size
        name, kind, _, _, offset, size, link, _, _, _ = self.unpack(_SECTION_HEADER, place, "a section header")
        return Section(name, kind, offset, size, link)

    def section_name(self, section: Section) -> bytes:
        """Its name; empty where there is none."""
        strings = self.section(self._names if self._names != _SHN_XINDEX else self.section(0).link)
        begin, end = self.span(strings.offset, strings.size, "the section names")
        begin = min(begin + section.name, end)
        stop = self.data.find(b"\0", begin, min(end, begin + 256))
        return self.data[begin:stop] if stop >= 0 else b""


class Symbols:
    """A symbol table and its names."""

    origin = ""
    _end_of_name = rb"\0"
    _looked = 0

    def __init__(self, image: Image, start: int, size: int) -> None:
        """`start` and `size` of the string table in the file; it is searched in place, not copied (hundreds of MB in a torch job)."""
        self.image = image
        self.start, self.end = image.span(start, size, "the string table")
        if size > _STRINGS_MOST:
            raise ElfError(f"a string table of {size} bytes")

    def holds(self, name: bytes) -> bool:
        """Whether the name's bytes are in the string table: cheap, and no for almost every file.

        Linkers share tails: `ncclAllReduce` may be stored as the end of `pncclAllReduce` only.
        """
        return self.image.data.find(name, self.start, self.end) >= 0

    def functions(self, names: Iterable[bytes], prefixes: Sequence[bytes] = ()) -> dict[str, int]:
        """File offsets of the functions that have one of the names or begin with one of the prefixes."""
        raise NotImplementedError

    def _places(self, needle: bytes, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, bytes]]:
        """(offset in the string table, name) wherever `needle` stands and `pattern`, which begins with it, matches.

        All of them, tails of other names too: finditer would not look inside a match, and is slower than this by a factor of five.
        """
        begin = self.start
        while (place := self.image.data.find(needle, begin, self.end)) >= 0:
            begin = place + 1
            self._looked += 1
            if self._looked > _PLACES_MOST:
                raise ElfError(f"{needle.decode('utf-8', 'replace')} stands in the string table too often")
            match = pattern.match(self.image.data, place, self.end)
            if match:
                yield place - self.start, match.group()

    def _places_of(self, names: Iterable[bytes], prefixes: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        end = b"(?=" + self._end_of_name + b")"
        for name in names:
            yield from self._places(name, re.compile(re.escape(name) + end))
        for prefix in prefixes:
            yield from self._places(prefix, re.compile(re.escape(prefix) + _PREFIXED + end))

    def _code(self, entry: SymbolEntry) -> int | None:
        # An indirect function (STT_GNU_IFUNC) is not the code that will run, a section of 0 is another file's symbol.
        _, info, _, section, value, _ = entry
        if section == 0 or info & 0xF != _STT_FUNC:
            return None
        return self.image.file_offset(value, code=True)


class DynamicSymbols(Symbols):
    """.dynsym, looked up through the file's own hash table."""

    origin = "dynsym"

    def __init__(self, image: Image, tags: dict[int, int], strings: int) -> None:
        self._tags = tags
        self._symbols = self._place(image, _DT_SYMTAB)
        self._versions = self._place(image, _DT_VERSYM)
        super().__init__(image, strings, tags.get(_DT_STRSZ, 0))

    @classmethod
    def of(cls, image: Image) -> DynamicSymbols | None:
        """None where the file has none (a static executable); ElfError where it has and they cannot be read."""
        tags = image.dynamic_tags() if image.dynamic[1] else {}
        if _DT_STRTAB not in tags:
            return None
        strings = cls._place_of(image, tags, _DT_STRTAB)
        if strings is None:
            raise ElfError("the dynamic names lie outside the file")
        return cls(image, tags, strings)

    @staticmethod
    def _place_of(image: Image, tags: dict[int, int], tag: int) -> int | None:
        return image.file_offset(tags[tag]) if tag in tags else None

    def _place(self, image: Image, tag: int) -> int | None:
        return self._place_of(image, self._tags, tag)

    def functions(self, names: Iterable[bytes], prefixes: Sequence[bytes] = ()) -> dict[str, int]:
        """By DT_GNU_HASH, by DT_HASH where there is no other."""
        candidates = self._hash()
        found: dict[str, int] = {}
        for name in sorted({*names, *self._listed(prefixes)}):
            offset = self._best(name, candidates(name))
            if offset is not None:
                _add(found, name, offset)
        return found

    def _listed(self, prefixes: Sequence[bytes]) -> set[bytes]:
        """Names that begin with one of the prefixes, among them tails of other names that are no symbols."""
        listed: set[bytes] = set()
        for _, name in self._places_of((), prefixes):
            listed.add(name)
            if len(listed) > _NAMES_MOST:
                raise ElfError(f"more than {_NAMES_MOST} names begin as wanted")
        return listed

    def _hash(self) -> Callable[[bytes], Iterator[int]]:
        for tag, kind in ((_DT_GNU_HASH, GnuHash), (_DT_HASH, SysvHash)):
            table = self._place(self.image, tag)
            if table is not None:
                return kind(self.image, table).candidates
        raise ElfError("dynamic symbols without a hash table")

    def _best(self, name: bytes, candidates: Iterator[int]) -> int | None:
        """The default version (foo@@V2) before one kept for old callers (foo@V1): new callers bind to the default."""
        older: int | None = None
        for index in candidates:
            offset = self._function(index, name)
            if offset is None:
                continue
            if not self._hidden(index):
                return offset
            older = offset if older is None else older
        return older

    def _function(self, index: int, name: bytes) -> int | None:
        if self._symbols is None:
            raise ElfError("dynamic names without symbols")
        entry = self.image.unpack(_SYMBOL, self._symbols + index * _SYMBOL.size, "a symbol")
        begin = self.start + entry[0]
        if self.image.data[begin : min(begin + len(name) + 1, self.end)] != name + b"\0":
            return None
        return self._code(entry)  # type: ignore[arg-type]

    def _hidden(self, index: int) -> bool:
        if self._versions is None:
            return False
        return bool(self.image.unpack(_HALF, self._versions + 2 * index, "a symbol version")[0] & _VERSION_HIDDEN)


class GnuHash:
    """DT_GNU_HASH."""

    _header = struct.Struct("<IIII")

    def __init__(self, image: Image, offset: int) -> None:
        self._image = image
        self._buckets, self._first, bloom, _ = image.unpack(self._header, offset, "the hash table")
        self._bucket_table = offset + 16 + 8 * bloom
        self._chains = self._bucket_table + 4 * self._buckets
        self._steps = _HASH_STEPS

    def candidates(self, name: bytes) -> Iterator[int]:
        """Symbols whose hash is the name's."""
        if not self._buckets:
            return
        wanted = 5381
        for byte in name:
            wanted = (wanted * 33 + byte) & 0xFFFFFFFF
        index = self._word(self._bucket_table + 4 * (wanted % self._buckets))
        while index >= self._first and index:
            value = self._word(self._chains + 4 * (index - self._first))
            if value | 1 == wanted | 1:
                yield index
            if value & 1:
                return
            index += 1

    def _word(self, offset: int) -> int:
        self._steps -= 1
        if self._steps < 0:
            raise ElfError("the hash table's chains do not end")
        return self._image.unpack(_WORD, offset, "the hash table")[0]


class SysvHash:
    """DT_HASH."""

    _header = struct.Struct("<II")

    def __init__(self, image: Image, offset: int) -> None:
        self._image = image
        self._buckets, self._chains = image.unpack(self._header, offset, "the hash table")
        self._table = offset + 8
        self._steps = _HASH_STEPS

    def candidates(self, name: bytes) -> Iterator[int]:
        """Symbols in the name's bucket."""
        if not self._buckets:
            return
        value = 0
        for byte in name:
            value = (value << 4) + byte
            high = value & 0xF0000000
            value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
        index = self._word(value % self._buckets)
        while 0 < index < self._chains:
            yield index
            index = self._word(self._buckets + index)

    def _word(self, number: int) -> int:
        self._steps -= 1
        if self._steps < 0:
            raise ElfError("the hash table's chains do not end")
        return self._image.unpack(_WORD, self._table + 4 * number, "the hash table")[0]


class StaticSymbols(Symbols):
    """.symtab: no hash, so the entries are compared with the string offsets of the names, a block at a time in C."""

    origin = "symtab"
    _end_of_name = rb"(?:\0|@@)"  # the linker writes a default version behind the name here

    def __init__(self, image: Image, table: Section, strings: Section) -> None:
        self._begin, self._stop = image.span(table.offset, table.size // _SYMBOL.size * _SYMBOL.size, ".symtab")
        super().__init__(image, strings.offset, strings.size)

    @classmethod
    def of(cls, image: Image) -> StaticSymbols | None:
        """None where the file is stripped."""
        for section in image.sections():
            if section.kind == _SHT_SYMTAB:
                return cls(image, section, image.section(section.link))
        return None

    def functions(self, names: Iterable[bytes], prefixes: Sequence[bytes] = ()) -> dict[str, int]:
        """One pass over the table. Of several functions of one name (local to their object files) the first counts."""
        wanted = dict(self._places_of(set(names), prefixes))
        found: dict[str, int] = {}
        if not wanted:
            return found
        for begin in range(self._begin, self._stop, _BLOCK * _SYMBOL.size):
            block = self.image.data[begin : min(begin + _BLOCK * _SYMBOL.size, self._stop)]
            # Every sixth 32-bit word is a name; both machines are little-endian, as is the host that maps such files.
            words = memoryview(block).cast("I")[:: _SYMBOL.size // 4].tolist()
            if wanted.keys().isdisjoint(words):
                continue
            for index, place in enumerate(words):
                if place in wanted and (offset := self._code(_SYMBOL.unpack_from(block, index * _SYMBOL.size))) is not None:
                    _add(found, wanted[place], offset)
        return found


def _add(found: dict[str, int], name: bytes, offset: int) -> None:
    found.setdefault(name.decode("utf-8", "replace"), offset)
    if len(found) > _FUNCTIONS_MOST:
        raise ElfError(f"more than {_FUNCTIONS_MOST} functions begin as wanted")


def find(descriptor: int, wanted: Sequence[Wanted]) -> list[Match]:
    """Which of the wanted libraries are defined in this file; NotElf or ElfError for what cannot be read.

    A broken .symtab is no error where the dynamic symbols, which are what the loader goes by, have one of them.
    """
    image = Image(descriptor)
    found: list[Match] = []
    try:
        _find_in(DynamicSymbols.of(image), wanted, found)
        left = [want for want in wanted if all(match.backend != want.backend for match in found)]
        try:
            _find_in(StaticSymbols.of(image) if left else None, left, found)
        except ElfError:
            if not found:
                raise
        return found
    finally:
        image.close()


def _find_in(symbols: Symbols | None, wanted: Sequence[Wanted], found: list[Match]) -> None:
    if symbols is None:
        return
    for want in wanted:
        functions = _functions(symbols, want)
        if functions:
            found.append(Match(want.backend, _version(symbols.image, want.version), functions, symbols.origin))


def _functions(symbols: Symbols, want: Wanted) -> dict[str, int]:
    # A library that is only called from here has its names here too: do not list them all before one is known to be defined.
    markers = [marker for marker in want.markers if symbols.holds(marker)]
    if not markers or not symbols.functions(markers):
        return {}
    return symbols.functions({*want.markers, *want.exact}, want.prefixes)


def _version(image: Image, pattern: bytes) -> str:
    if not pattern:
        return ""
    compiled = re.compile(pattern)
    for begin, end in _read_only(image):
        match = compiled.search(image.data, begin, end)
        if match:
            return match.group(1)[:_VERSION_LENGTH].decode("ascii", "replace")
    return ""


def _read_only(image: Image) -> Iterator[tuple[int, int]]:
    """Where constant strings lie: .rodata, or where sections were removed the loaded segments, code last."""
    try:
        named = [section for section in image.sections() if image.section_name(section).startswith(b".rodata")]
    except ElfError:
        named = []
    spans = [(section.offset, section.size) for section in named]
    if not spans:
        spans = [(segment.offset, segment.size) for segment in sorted(image.segments, key=lambda segment: segment.executable)]
    for offset, size in spans:
        if offset < image.size:
            yield offset, min(offset + min(size, _VERSION_SPAN), image.size)


def code_at(descriptor: int, offset: int, size: int = 16) -> bytes:
    """The instructions at a place, read so that their page is in the page cache before a probe is attached to it; ElfError where none are.

    A probe on a page that is not cached makes the kernel read it inside mmap: ext4 then warns and taints the kernel (5.10 to 6.x).
    """
    try:
        code = os.pread(descriptor, size, offset)
    except (OSError, OverflowError) as error:
        raise ElfError(f"code at {offset:#x} cannot be read: {error}") from error
    if len(code) < size:
        raise ElfError(f"code at {offset:#x} lies outside the file")
    return code


def file_key(descriptor: int) -> tuple[int, int, int, int]:
    """(device, inode, mtime in ns, size): changes when the file is replaced or written."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
