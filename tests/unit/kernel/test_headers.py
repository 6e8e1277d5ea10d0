"""Kernel headers: which are taken, what the merged tree holds, and what a person is told when it cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from singularityd.kernel import headers
from singularityd.kernel.headers import HeadersError, Kernel, Roots

HERE = Kernel("x86_64", "6.18.44-vendor", "#1 SMP")


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def common(roots: Roots, name: str) -> Path:
    path = roots.sources / f"linux-headers-{name}"
    write(path / "include/linux/kconfig.h", "common")
    write(path / "include/linux/types.h")
    write(path / "arch/x86/include/asm/ptrace.h")
    write(path / "arch/sparc/include/asm/ptrace.h")
    write(path / "Makefile", "common")
    return path


def flavour(roots: Roots, name: str, version: tuple[int, int, int], *, common_name: str = "", arch: str = "x86") -> Path:
    path = roots.sources / f"linux-headers-{name}"
    major, minor, patch = version
    write(path / "include/generated/autoconf.h", "flavour")
    write(path / "include/generated/uapi/linux/version.h", f"#define LINUX_VERSION_CODE {(major << 16) + (minor << 8) + patch}\n")
    write(path / "include/generated/utsrelease.h", f'#define UTS_RELEASE "{name}"\n')
    write(path / f"arch/{arch}/include/generated/asm/unistd.h")
    write(path / "Makefile", f"include /usr/src/linux-headers-{common_name}/Makefile\n" if common_name else "")
    return path


def pair(roots: Roots, release: str, version: tuple[int, int, int]) -> None:
    stem = release.removesuffix("-amd64")
    common(roots, f"{stem}-common")
    flavour(roots, release, version, common_name=f"{stem}-common")


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    found = Roots(tmp_path / "src", tmp_path / "modules")
    found.sources.mkdir()
    return found


def test_merges_both_packages(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))

    tree = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE)

    for name in (
        "include/linux/kconfig.h",
        "include/linux/types.h",
        "include/generated/autoconf.h",
        "arch/x86/include/asm/ptrace.h",
        "arch/x86/include/generated/asm/unistd.h",
    ):
        assert (tree.path / name).is_file(), name
    assert tree.release == "6.1.0-47-amd64"
    assert (tree.path / "Makefile").read_text().startswith("include"), "the flavour lies over the common files"
    assert (tree.path / "arch/sparc").is_symlink(), "what one package has is one link"


def test_version_code_is_the_running_kernels(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))

    assert headers.prepare("", tmp_path, roots=roots, kernel=HERE).version_code == (6 << 16) + (18 << 8) + 44


@pytest.mark.parametrize(
    ("release", "version", "expected"),
    [
        ("6.1.0-47-amd64", "#1 SMP Debian 6.1.170-3 (2026-05-08)", (6, 1, 170)),
        ("5.15.0-1057-nvidia", "#58-Ubuntu SMP", (5, 15, 0)),
        ("6.18-rc1", "", (6, 18, 0)),
        ("odd", "", (0, 0, 0)),
    ],
)
def test_running_version(release: str, version: str, expected: tuple[int, int, int]) -> None:
    assert Kernel("x86_64", release, version).numbers == expected


def test_patch_level_saturates() -> None:
    assert headers.version_code((4, 14, 300)) == (4 << 16) + (14 << 8) + 255


@pytest.mark.parametrize(
    ("running", "expected"),
    [("5.10.0-9", "5.10.0-30-amd64"), ("6.4.0", "6.1.0-47-amd64"), ("6.18.44", "6.12.9-amd64"), ("7.3.4", "6.12.9-amd64")],
)
def test_nearest_version_is_taken(roots: Roots, tmp_path: Path, running: str, expected: str) -> None:
    for release, version in (("5.10.0-30-amd64", (5, 10, 200)), ("6.1.0-47-amd64", (6, 1, 170)), ("6.12.9-amd64", (6, 12, 9))):
        pair(roots, release, version)

    assert headers.find("", roots=roots, kernel=Kernel("x86_64", running, "")).release == expected


def test_own_build_directory_comes_first(roots: Roots) -> None:
    pair(roots, "6.18.44-vendor-amd64", (6, 18, 44))
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    (roots.modules / HERE.release).mkdir(parents=True)
    (roots.modules / HERE.release / "build").symlink_to(roots.sources / "linux-headers-6.1.0-47-amd64")

    assert headers.find("", roots=roots, kernel=HERE).release == "6.1.0-47-amd64"


def test_broken_build_link_falls_back(roots: Roots) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    (roots.modules / HERE.release).mkdir(parents=True)
    (roots.modules / HERE.release / "build").symlink_to("/gone")

    assert headers.find("", roots=roots, kernel=HERE).release == "6.1.0-47-amd64"


def test_realtime_flavour_finds_its_own_common(roots: Roots) -> None:
    common(roots, "6.1.0-47-common")
    own = common(roots, "6.1.0-47-common-rt")
    flavour(roots, "6.1.0-47-rt-amd64", (6, 1, 170), common_name="6.1.0-47-common-rt")

    assert headers.find("", roots=roots, kernel=HERE).parts[0] == own


def test_cloud_flavour_without_makefile(roots: Roots) -> None:
    shared = common(roots, "6.1.0-47-common")
    flavour(roots, "6.1.0-47-cloud-amd64", (6, 1, 170))

    assert headers.find("", roots=roots, kernel=HERE).parts[0] == shared


def test_complete_directory_is_used_as_it_is(roots: Roots, tmp_path: Path) -> None:
    full = flavour(roots, "5.15.0-generic", (5, 15, 0))
    write(full / "include/linux/kconfig.h")

    assert headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path == full
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("part", ["tree", "flavour", "folder"])
def test_setting_may_name_any_of_them(roots: Roots, tmp_path: Path, part: str) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    elsewhere = Roots(tmp_path / "other", tmp_path / "other")
    elsewhere.sources.mkdir()
    places = {
        "tree": lambda: headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path,
        "flavour": lambda: roots.sources / "linux-headers-6.1.0-47-amd64",
        "folder": lambda: roots.sources,
    }

    tree = headers.prepare(places[part](), tmp_path / "state2", roots=elsewhere, kernel=HERE)

    assert (tree.path / "include/linux/kconfig.h").is_file()
    assert (tree.path / "include/generated/autoconf.h").is_file()


def test_wrong_setting_is_told_not_hidden(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))

    with pytest.raises(HeadersError, match="no such directory") as caught:
        headers.prepare(tmp_path / "typo", tmp_path / "state", roots=roots, kernel=HERE)

    assert "setting" in caught.value.remedy


def test_nothing_installed_names_the_package(roots: Roots, tmp_path: Path) -> None:
    with pytest.raises(HeadersError, match="no usable kernel headers") as caught:
        headers.prepare("", tmp_path, roots=roots, kernel=HERE)

    assert "apt-get install linux-headers-amd64" in caught.value.remedy
    arm = HERE._replace(machine="aarch64")
    with pytest.raises(HeadersError) as caught:
        headers.prepare("", tmp_path, roots=roots, kernel=arm)
    assert "linux-headers-arm64" in caught.value.remedy


def test_only_common_is_told(roots: Roots) -> None:
    common(roots, "6.1.0-47-common")

    with pytest.raises(HeadersError, match=r"6\.1\.0-47-common is there, but no package of its version for x86_64"):
        headers.find("", roots=roots, kernel=HERE)


def test_only_flavour_is_told(roots: Roots) -> None:
    flavour(roots, "6.1.0-47-amd64", (6, 1, 170), common_name="6.1.0-47-common")

    with pytest.raises(HeadersError, match=r"not its other half linux-headers-6\.1\.0-47-common"):
        headers.find("", roots=roots, kernel=HERE)


def test_broken_link_is_told(roots: Roots) -> None:
    (roots.sources / "linux-headers-6.1.0-47-amd64").symlink_to("/gone/headers")

    with pytest.raises(HeadersError, match="broken link to /gone/headers"):
        headers.find("", roots=roots, kernel=HERE)


def test_other_architecture_is_not_taken(roots: Roots) -> None:
    common(roots, "6.1.0-47-common")
    flavour(roots, "6.1.0-47-arm64", (6, 1, 170), common_name="6.1.0-47-common", arch="arm64")

    with pytest.raises(HeadersError, match="another architecture"):
        headers.find("", roots=roots, kernel=HERE)


def test_reused_while_sources_are_the_same(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    first = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path
    inode = first.stat().st_ino

    again = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path

    assert (again, again.stat().st_ino) == (first, inode)


def test_made_anew_after_an_upgrade(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    first = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path
    os.utime(roots.sources / "linux-headers-6.1.0-47-amd64", (1, 1))

    assert headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path != first


def test_damaged_tree_is_repaired(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    tree = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path
    (tree / "include/linux").unlink()

    again = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path

    assert (again / "include/linux/kconfig.h").is_file()
    assert [entry.name for entry in (tmp_path / "state/headers").iterdir()] == [again.name]


def test_tree_of_removed_packages_is_swept(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "5.10.0-30-amd64", (5, 10, 200))
    old = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path
    for path in list(roots.sources.iterdir()):
        path.rename(tmp_path / path.name)
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))

    new = headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path

    assert new.exists()
    assert not old.exists()


@pytest.mark.parametrize("place", ["", "headers"])
def test_state_directory_that_others_can_write_is_refused(roots: Roots, tmp_path: Path, place: str) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE)
    (tmp_path / "state" / place).chmod(0o775)

    with pytest.raises(HeadersError, match="written by others") as caught:
        headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE)

    assert "chmod 755" in caught.value.remedy


def test_state_directory_that_is_a_file(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    (tmp_path / "state").write_text("")

    with pytest.raises(HeadersError, match="cannot make the tree of kernel headers") as caught:
        headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE)

    assert "state_dir" in caught.value.remedy


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="no read-only directory at hand")
def test_read_only_state_directory(roots: Roots) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))

    with pytest.raises(HeadersError, match="cannot make the tree of kernel headers in /proc/sys/headers"):
        headers.prepare("", Path("/proc/sys"), roots=roots, kernel=HERE)


def test_full_disk_says_so(roots: Roots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    with pytest.raises(HeadersError, match="No space left") as caught:
        headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE)

    assert "free some space" in caught.value.remedy
    assert list((tmp_path / "state/headers").iterdir()) == [], "nothing half-made stays"


def test_two_daemons_at_once(roots: Roots, tmp_path: Path) -> None:
    pair(roots, "6.1.0-47-amd64", (6, 1, 170))
    barrier = threading.Barrier(8)
    paths: list[Path] = []

    def start() -> None:
        barrier.wait()
        paths.append(headers.prepare("", tmp_path / "state", roots=roots, kernel=HERE).path)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(paths) == 8
    assert len(set(paths)) == 1
    assert (paths[0] / "include/linux/kconfig.h").is_file()
    assert len(list((tmp_path / "state/headers").iterdir())) == 1


def test_prepares_without_third_party_packages() -> None:
    source = Path(headers.__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(source)!r}); import singularityd.kernel.headers"

    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False, capture_output=True)

    assert done.returncode == 0, done.stderr
