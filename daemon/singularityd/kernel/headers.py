"""Kernel headers for bcc: finds what the distribution installed, of any version, and makes one tree of it. Never downloads.

Debian ships a kernel's headers in two packages, `linux-headers-V-common` and `linux-headers-V-FLAVOUR`; bcc finds `kconfig.h` in the one
and `autoconf.h` in the other and compiles with neither alone. The merged tree is symbolic links in the state directory: a directory that
only one package has is one link, so it takes milliseconds and a few kilobytes. The programs read no kernel structure through these headers
(layouts come from the running kernel's BTF), which is why any version serves.

Executor and `doctor` only, single thread. Errors: HeadersError, with the package to install.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from singularityd.kernel.loader import LoadError

_ARCH = {"x86_64": "x86", "aarch64": "arm64"}
_PACKAGE = {"x86_64": "linux-headers-amd64", "aarch64": "linux-headers-arm64"}
_COMMON_FILE = Path("include/linux/kconfig.h")
_FLAVOUR_FILE = Path("include/generated/autoconf.h")
_VERSION_FILE = Path("include/generated/uapi/linux/version.h")
_RELEASE_FILE = Path("include/generated/utsrelease.h")
_LAYOUT = "1"
_STALE = 3600.0


class HeadersError(LoadError):
    """Raised when no usable headers are there, or the merged tree cannot be written; `remedy` names the package or the setting."""


class Roots(NamedTuple):
    """Where distributions put headers."""

    sources: Path = Path("/usr/src")
    modules: Path = Path("/lib/modules")


DISTRIBUTION = Roots()


class Kernel(NamedTuple):
    """The running kernel, as uname gives it."""

    machine: str
    release: str
    version: str
    """uname -v: Debian writes the true version here, since its release says 6.1.0 whatever the stable patch level is."""

    @property
    def numbers(self) -> tuple[int, int, int]:
        """(major, minor, patch); zeros where the text has none."""
        match = re.search(r"Debian (\d+)\.(\d+)(?:\.(\d+))?", self.version) or re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", self.release)
        return _numbers(match) if match else (0, 0, 0)

    @property
    def package(self) -> str:
        """The distribution's package that brings headers of some version."""
        return _PACKAGE.get(self.machine, "linux-headers")


class Source(NamedTuple):
    """Headers that can be used: the parts of one kernel version, lowest first."""

    release: str
    numbers: tuple[int, int, int]
    parts: tuple[Path, ...]
    """One directory that is complete by itself, or (common, flavour)."""


class Tree(NamedTuple):
    """What bcc is given: BCC_KERNEL_SOURCE and BCC_LINUX_VERSION_CODE."""

    path: Path
    version_code: int
    """Of the RUNNING kernel: kernels before 5.0 refuse a kprobe program that declares another; later ones ignore it."""
    release: str
    """Release of the headers, for people."""


def running() -> Kernel:
    """The kernel that runs now."""
    name = os.uname()
    return Kernel(platform.machine(), name.release, name.version)


def version_code(numbers: tuple[int, int, int]) -> int:
    """LINUX_VERSION_CODE as the kernel's own macro computes it; the patch level saturates at 255 (4.14.256 and later)."""
    major, minor, patch = numbers
    return (major << 16) + (minor << 8) + min(patch, 255)


def prepare(setting: Path | str | None, state_dir: Path, *, roots: Roots = DISTRIBUTION, kernel: Kernel | None = None) -> Tree:
    """Find the headers nearest the running kernel and make them one tree under `state_dir`/headers, or reuse the one made before.

    `setting` is a tree, a flavour package's directory or a directory of such; empty means to look where distributions put them.
    """
    kernel = kernel or running()
    source = find(setting, roots=roots, kernel=kernel)
    path = source.parts[0] if len(source.parts) == 1 else _merged(source, Path(state_dir) / "headers")
    return Tree(path, version_code(kernel.numbers), source.release)


def find(setting: Path | str | None, *, roots: Roots = DISTRIBUTION, kernel: Kernel | None = None) -> Source:
    """The headers that `prepare` would use; writes nothing."""
    kernel = kernel or running()
    chosen = "" if setting is None else str(setting)
    if chosen not in ("", "."):  # Path("") is Path(".")
        return _from_setting(Path(chosen), kernel)
    problems: list[str] = []
    build = roots.modules / kernel.release / "build"
    found = list(_usable([build] if build.exists() or build.is_symlink() else [], kernel, roots.sources, problems))
    if not found:
        found = list(_usable(_directories(roots.sources), kernel, roots.sources, problems))
    return _nearest(found, kernel, problems, f"{roots.sources} and {build}")


def _from_setting(path: Path, kernel: Kernel) -> Source:
    """A person named this place: nothing else is tried, so that a wrong path is told rather than hidden."""
    if not path.is_dir():
        raise HeadersError(f"kernel.headers = {path}: no such directory", "correct the setting, or leave it empty to search /usr/src")
    problems: list[str] = []
    found = list(_usable([path], kernel, path.parent, problems)) or list(_usable(_directories(path), kernel, path, problems))
    return _nearest(found, kernel, problems, str(path))


def _directories(root: Path) -> list[Path]:
    """Header directories of Debian, Ubuntu (linux-headers-*) and RHEL (kernels/*)."""
    return sorted(path for pattern in ("linux-headers-*", "kernels/*") for path in root.glob(pattern))


def _usable(paths: list[Path], kernel: Kernel, siblings: Path, problems: list[str]) -> Iterator[Source]:
    """Those of `paths` that are complete, alone or with their common package; why the others are not goes to `problems`."""
    arch = _ARCH.get(kernel.machine, kernel.machine)
    flavoured: set[str] = set()
    commons: list[Path] = []
    for path in paths:
        if not path.is_dir():
            problems.append(f"{path} is a broken link to {os.readlink(path)}" if path.is_symlink() else f"{path} is not a directory")
            continue
        has_common, has_flavour = (path / _COMMON_FILE).is_file(), (path / _FLAVOUR_FILE).is_file()
        if has_flavour and not (path / "arch" / arch).is_dir():
            problems.append(f"{path} is for another architecture than {kernel.machine}")
        elif has_flavour and has_common:
            yield _source((path.resolve(),))
        elif has_flavour:
            common = _common_of(path.resolve(), siblings)
            flavoured.add(common.name)
            if (common / _COMMON_FILE).is_file():
                yield _source((common, path.resolve()))
            else:
                problems.append(f"{path} is there, but not its other half {common.name}")
        elif has_common:
            commons.append(path)
    problems.extend(
        f"{path} is there, but no package of its version for {kernel.machine}" for path in commons if path.name not in flavoured
    )


def _common_of(flavour: Path, siblings: Path) -> Path:
    """The common package of a flavour: its Makefile names it (the real-time flavour has one of its own), else the name tells."""
    try:
        named = re.search(r"([\w.+~-]+-common[\w-]*)/Makefile", (flavour / "Makefile").read_text(errors="replace"))
    except OSError:
        named = None
    name = named.group(1) if named else re.sub(r"-(?:cloud-|rt-)?[a-z0-9]+$", "-common", flavour.name)
    beside = flavour.parent / name
    return beside if beside.is_dir() else siblings / name


def _source(parts: tuple[Path, ...]) -> Source:
    flavour = parts[-1]
    return Source(_release(flavour), _version(flavour), parts)


def _release(path: Path) -> str:
    match = re.search(r'UTS_RELEASE\s+"([^"]+)"', _text(path / _RELEASE_FILE))
    return match.group(1) if match else path.name.removeprefix("linux-headers-")


def _version(path: Path) -> tuple[int, int, int]:
    match = re.search(r"LINUX_VERSION_CODE\s+(\d+)", _text(path / _VERSION_FILE))
    if match:
        code = int(match.group(1))
        return code >> 16, code >> 8 & 0xFF, code & 0xFF
    named = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", path.name)
    return _numbers(named) if named else (0, 0, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _numbers(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match.group(1)), int(match.group(2)), int(match.group(3) or 0)


def _nearest(found: list[Source], kernel: Kernel, problems: list[str], where: str) -> Source:
    if not found:
        seen = f": {'; '.join(problems)}" if problems else f" in {where}"
        raise HeadersError(f"no usable kernel headers{seen}"[:800], f"apt-get install {kernel.package} (any version serves)")
    wanted = _age(kernel.numbers)
    return min(found, key=lambda source: (source.release != kernel.release, abs(_age(source.numbers) - wanted), -_age(source.numbers)))


def _age(numbers: tuple[int, int, int]) -> float:
    """A version as a number that grows evenly: a major version lasts some 20 minor ones, a minor one hundreds of patch levels."""
    major, minor, patch = numbers
    return major * 20 + minor + min(patch, 999) / 1000


def _merged(source: Source, folder: Path) -> Path:
    """The merged tree of (common, flavour). Its name tells its sources apart, so another source is another tree and never half of one.

    Two daemons may come here at once: each builds its own and renames it; the later one finds the name taken and uses what is there.
    """
    name = "-".join((source.release, _LAYOUT, *map(_stamp, source.parts)))
    tree = folder / name
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        for place in (folder, folder.parent):
            _refuse_foreign(place)
        if _complete(tree):
            return tree
        _sweep(folder)
        scratch = folder / f".{name}.{os.getpid()}.{time.monotonic_ns():x}"
        scratch.mkdir(mode=0o755)
        try:
            _overlay(source.parts, scratch)
            _publish(scratch, tree)
        finally:
            _remove(scratch)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    if not _complete(tree):
        parts = " and ".join(map(str, source.parts))
        raise HeadersError(
            f"the headers in {parts} are incomplete", f"apt-get install --reinstall {' '.join(p.name for p in source.parts)}"
        )
    return tree


def _refuse_foreign(place: Path) -> None:
    """What lies here is compiled into the kernel by root: whoever can replace it, the front's own user included, would be root."""
    status = place.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        text = f"{place} can be written by others than root (owner {status.st_uid}, mode {status.st_mode & 0o7777:o})"
        raise HeadersError(text, f"chown root {place} && chmod 755 {place}; what the front writes belongs in a directory below it")


def _stamp(part: Path) -> str:
    """Which directory this is: an upgraded package has another inode or time."""
    status = part.stat()
    return f"{status.st_dev:x}.{status.st_ino:x}.{status.st_mtime_ns:x}"


def _complete(tree: Path) -> bool:
    return (tree / _COMMON_FILE).is_file() and (tree / _FLAVOUR_FILE).is_file()


def _overlay(parts: tuple[Path, ...], target: Path) -> None:
    """Links in `target` to everything in `parts`, later parts first; only directories that several parts have are made anew."""
    names: dict[str, list[Path]] = {}
    for part in parts:
        for entry in part.iterdir():
            names.setdefault(entry.name, []).append(entry)
    for name, entries in names.items():
        if len(entries) > 1 and all(entry.is_dir() and not entry.is_symlink() for entry in entries):
            (target / name).mkdir(mode=0o755)
            _overlay(tuple(entries), target / name)
        else:
            (target / name).symlink_to(entries[-1])


def _publish(scratch: Path, tree: Path) -> None:
    try:
        scratch.rename(tree)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _complete(tree):
            return
        broken = scratch.with_name(f"{scratch.name}.broken")
        tree.rename(broken)
        scratch.rename(tree)
        _remove(broken)


def _remove(tree: Path) -> None:
    """Remove a tree of links; what another daemon removes meanwhile is fine. (shutil would bring a megabyte of compressors with it.)"""
    for place, folders, files in os.walk(tree, topdown=False):
        for name in folders + files:
            path = Path(place, name)
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with contextlib.suppress(OSError):
        tree.rmdir()


def _sweep(folder: Path) -> None:
    """Remove trees whose sources are gone and what a killed daemon left half-made; a tree that works may be another daemon's."""
    for entry in folder.iterdir():
        half_made = entry.name.startswith(".")
        try:
            stale = time.time() - entry.lstat().st_mtime > _STALE
        except FileNotFoundError:
            continue  # the other daemon's sweep was quicker
        if stale if half_made else not _complete(entry):
            _remove(entry)


def _cannot_write(folder: Path, error: OSError) -> HeadersError:
    text = f"cannot make the tree of kernel headers in {folder}: {error.strerror}"
    if error.errno == errno.ENOSPC:
        return HeadersError(text, f"free some space on the file system of {folder} (64 KiB and 100 inodes are enough)")
    return HeadersError(
        text, "make the state directory writable (state_dir, SINGULARITYD_STATE_DIR), or set kernel.headers to a complete tree"
    )
