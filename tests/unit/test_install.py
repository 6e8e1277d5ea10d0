"""`make install` into a package's root, the manual pages and the completions."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from singularityd.__main__ import command
from singularityd.config_reference import tables
from singularityd.ctl.main import cli

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "usr/local/bin/singularityd",
    "usr/local/bin/singularityctl",
    "etc/systemd/system/singularityd.service",
    "etc/sysusers.d/singularityd.conf",
    "etc/tmpfiles.d/singularityd.conf",
    "etc/singularityd/config.toml",
    "usr/local/share/man/man1/singularityctl.1",
    "usr/local/share/man/man5/singularityd.toml.5",
    "usr/local/share/man/man8/singularityd.8",
    "usr/local/share/bash-completion/completions/singularityd",
    "usr/local/share/bash-completion/completions/singularityctl",
    "usr/local/share/zsh/site-functions/_singularityd",
    "usr/local/share/zsh/site-functions/_singularityctl",
    "usr/local/share/fish/vendor_completions.d/singularityd.fish",
    "usr/local/share/fish/vendor_completions.d/singularityctl.fish",
    "usr/local/share/doc/singularityd/examples/config.toml",
    "usr/local/share/doc/singularityd/examples/metrics-remote.conf",
    "usr/local/share/doc/singularityd/examples/otel-remote.conf",
}


def install(checkout: Path, destination: Path, *words: str) -> None:
    """The part of `make install` that needs no network."""
    command = ["make", "-C", str(checkout), "install-files", f"DESTDIR={destination}", f"INSTALL_PYTHON={sys.executable}", *words]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "daemon"))
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def found(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir() or path.is_symlink()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the installation reads, apart from this checkout: it writes into build/."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("systemd", "tools"):
        shutil.copytree(ROOT / name, place / name)
    shutil.copy(ROOT / "Makefile", place)
    return place


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("root")
    install(checkout, place)
    return place


def test_what_is_installed_and_where(installed: Path) -> None:
    assert found(installed) == FILES
    assert os.readlink(installed / "usr/local/bin/singularityd") == "/opt/singularityd/venv/bin/singularityd"
    for name in FILES:
        path = installed / name
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == 0o644, name
            assert str(installed) not in path.read_text()
    assert (installed / "etc/singularityd/conf.d").is_dir()
    assert (installed / "etc/systemd/system/singularityd.service").read_text() == (ROOT / "systemd/singularityd.service").read_text()


def test_other_places_and_the_administrators_settings_stay(checkout: Path, tmp_path: Path) -> None:
    kept = tmp_path / "etc/singularityd/config.toml"
    kept.parent.mkdir(parents=True)
    kept.write_text("log.level = 'debug'\n")
    install(checkout, tmp_path, "PREFIX=/usr/lib/x", "BINDIR=/usr/bin", "DATADIR=/usr/share", "UNITDIR=/usr/lib/systemd/system")
    assert kept.read_text() == "log.level = 'debug'\n"
    assert os.readlink(tmp_path / "usr/bin/singularityctl") == "/usr/lib/x/venv/bin/singularityctl"
    assert "ExecStart=/usr/lib/x/venv/bin/singularityd\n" in (tmp_path / "usr/lib/systemd/system/singularityd.service").read_text()
    assert (tmp_path / "usr/share/man/man8/singularityd.8").exists()
    assert not (tmp_path / "usr/local").exists()
    before = found(tmp_path)
    install(checkout, tmp_path, "PREFIX=/usr/lib/x", "BINDIR=/usr/bin", "DATADIR=/usr/share", "UNITDIR=/usr/lib/systemd/system")
    assert found(tmp_path) == before


def page(installed: Path, name: str) -> str:
    """A manual page as text without troff's quoting."""
    text = next(installed.glob(f"usr/local/share/man/man?/{name}")).read_text()
    return text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")


def every(group: click.Group, outer: str = "") -> list[tuple[str, click.Command]]:
    found = []
    for name, cmd in group.commands.items():
        found += every(cmd, f"{outer}{name} ") if isinstance(cmd, click.Group) else [(f"{outer}{name}", cmd)]
    return found


@pytest.mark.parametrize(("name", "group"), [("singularityctl.1", cli), ("singularityd.8", command)])
def test_the_pages_have_every_command_and_option(installed: Path, name: str, group: click.Group) -> None:
    text = page(installed, name)
    for words, cmd in every(group):
        part = text.partition(f".SS {words} ")[2].partition("\n.SS ")[0]
        assert part, words
        for param in cmd.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert all(option in part for option in param.opts), (words, param.opts)
    for heading in ("NAME", "SYNOPSIS", "OPTIONS", "COMMANDS", "EXIT STATUS", "ENVIRONMENT", "SEE ALSO"):
        assert f"\n.SH {heading}\n" in text


def test_the_page_of_the_settings_has_every_setting(installed: Path) -> None:
    text = page(installed, "singularityd.toml.5")
    for table, _, fields in tables():
        part = text.partition(f".SH [{table}]")[2].partition("\n.SH ")[0]
        for field in fields:
            assert f"\\fB{field.name} = " in part
    assert "(reload)" in text
    assert "(restart)" in text


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
@pytest.mark.parametrize("name", ["singularityctl.1", "singularityd.8", "singularityd.toml.5"])
def test_troff_has_nothing_to_say_against_the_pages(installed: Path, name: str) -> None:
    path = next(installed.glob(f"usr/local/share/man/man?/{name}"))
    run = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", str(path)], capture_output=True, text=True, timeout=60, check=True)
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("program", "typed", "offered"),
    [("singularityctl", "inj", "inject"), ("singularityd", "conf", "config"), ("singularityd", "config sh", "show")],
)
def test_bash_completes_by_the_installed_script(installed: Path, tmp_path: Path, program: str, typed: str, offered: str) -> None:
    script = installed / f"usr/local/share/bash-completion/completions/{program}"
    (tmp_path / program).symlink_to(Path(sys.executable).parent / program)
    words = [program, *typed.split()]
    typing = f"""
        source {script}
        COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1}
        compopt() {{ :; }}
        _{program}_completion {program}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}")
    run = subprocess.run(["bash", "--norc", "-c", typing], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.split() == [offered], run.stderr


def test_the_installed_settings_change_nothing_and_the_user_is_made(installed: Path) -> None:
    said = tomllib.loads((installed / "etc/singularityd/config.toml").read_text())
    assert set(said) == {name for name, *_ in tables()}
    assert not any(said.values())
    assert re.search(r"(?m)^u +singularityd ", (installed / "etc/sysusers.d/singularityd.conf").read_text())
