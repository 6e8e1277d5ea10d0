"""tools/setup.sh on hosts that this one is not: every command it runs is a fake that writes down how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("sh", "cat", "chmod", "cksum", "dirname", "grep", "mkdir", "mktemp", "rm", "tail", "cp")
PYTHON = """#!/bin/sh
printf 'python %s\\n' "$*" >>"$CALLS"
case "$*" in
*version_info*) exit "${OLD_PYTHON:-0}" ;;
*'import ensurepip'*) exit "${NO_ENSUREPIP:-0}" ;;
--version) echo 'Python 3.11.2' ;;
'-m venv '*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
*'pip freeze'*) echo 'torch==2.13.0+cpu' ;;
*"${BREAK:-never}"*) echo 'no such package' >&2; exit 1 ;;
esac
"""
FAKES = {
    "dpkg-query": 'case " $MISSING " in *" $4 "*) exit 1 ;; esac; printf "ii "',
    "dpkg": "echo amd64",
    "apt-get": 'if [ -e "$SETUP_USR/sbin/policy-rc.d" ]; then echo "policy set" >>"$CALLS"; fi; exit "${APT_FAILS:-0}"',
    "getent": 'exit "${NO_USER:-0}"',
    "useradd": "",
    "systemctl": "",
    "id": 'echo "${AS_UID:-0}"',
    "uname": "echo 6.18.0-none",
}
TOOLS = ("promtool", "bpftrace", "strace", "gdb", "readelf", "ip", "gcc", "systemd-analyze")


class Host:
    """A host made of fakes under one directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls_file = root, root / "calls"
        self.bin = root / "usr/bin"
        self.bin.mkdir(parents=True)
        (root / "usr/sbin").mkdir()
        self.checkout = root / "checkout"
        (self.checkout / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools/setup.sh", self.checkout / "tools/setup.sh")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        for name in PLAIN:
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.write("python3", PYTHON)
        for name, body in FAKES.items():
            self.write(name, f'#!/bin/sh\nprintf "%s %s\\n" {name} "$*" >>"$CALLS"\n{body}\n')
        for name in TOOLS:
            self.write(name, "#!/bin/sh\n")
        (root / "usr/src/linux-headers-6.1.0-47-amd64/include/generated").mkdir(parents=True)
        self.headers = root / "usr/src/linux-headers-6.1.0-47-amd64/include/generated/autoconf.h"
        self.headers.touch()

    def write(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run it; `calls` then holds what it ran."""
        self.calls_file.write_text("")
        variables = {
            "PATH": str(self.bin),
            "SETUP_USR": str(self.root / "usr"),
            "CALLS": str(self.calls_file),
            "TMPDIR": str(self.root),
            **environment,
        }
        command = ["/bin/sh", str(self.checkout / "tools/setup.sh"), *arguments]
        return subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=60)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def called(self, start: str) -> list[str]:
        return [line for line in self.calls if line.startswith(start)]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def pip_calls(host: Host) -> list[str]:
    return [line.removeprefix("python -m pip install --quiet ") for line in host.called("python -m pip install")]


def test_prepared_host_installs_no_package(host: Host) -> None:
    done = host.setup("test")

    assert done.returncode == 0, done.stderr
    assert host.called("apt-get") == []
    assert host.called("useradd") == []


def test_torch_is_installed_first_exact_and_alone_and_then_held(host: Host) -> None:
    host.setup("test")

    first, second, third = pip_calls(host)
    assert first == "torch==2.13.0"
    assert second.startswith("--no-deps nvidia-nccl-cu12==")
    assert third.startswith("--constraint")
    assert third.endswith("[agent,otel,dev]")
    assert (host.checkout / ".venv/constraints.txt").read_text() == "torch==2.13.0+cpu\n"


def test_pins_agree_with_the_project(host: Host) -> None:
    host.setup("test")
    project = (ROOT / "pyproject.toml").read_text()

    for pin in (pip_calls(host)[0], pip_calls(host)[1].removeprefix("--no-deps ")):
        assert f'"{pin}"' in project


def test_second_run_is_nothing(host: Host) -> None:
    host.setup("test")
    done = host.setup("test")

    assert pip_calls(host) == []
    assert host.called("python -m venv") == []
    assert "up to date" in done.stdout


def test_changed_project_is_installed_again(host: Host) -> None:
    host.setup("test")
    with (host.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    host.setup("test")

    assert len(pip_calls(host)) == 3


def test_interrupted_run_is_taken_up_again(host: Host) -> None:
    broken = host.setup("test", BREAK="--editable")
    assert broken.returncode != 0
    done = host.setup("test")

    assert done.returncode == 0
    assert len(pip_calls(host)) == 3


def test_missing_packages_are_installed_quietly_after_an_update(host: Host) -> None:
    host.headers.unlink()
    done = host.setup("demo", MISSING="python3-bpfcc")

    update, install = host.called("apt-get")
    assert update.endswith("update")
    assert "--no-install-recommends" in install
    assert install.split("install --no-install-recommends ")[1].split() == ["python3-bpfcc", "linux-headers-amd64"]
    assert "python3-bpfcc linux-headers-amd64" in done.stdout


def test_only_tests_need_the_test_tools(host: Host) -> None:
    for name in TOOLS:
        (host.bin / name).unlink()

    host.setup("demo")
    assert host.called("apt-get") == []
    host.setup("test")
    assert set(host.called("apt-get")[1].split()) >= {"prometheus", "bpftrace", "strace", "gdb", "binutils", "iproute2", "gcc"}


def test_no_service_is_started_by_a_package(host: Host) -> None:
    (host.bin / "promtool").unlink()
    host.setup("test")

    assert "policy set" in host.calls
    assert not (host.root / "usr/sbin/policy-rc.d").exists(), "the policy is ours for the moment of the installation only"
    assert host.called("systemctl disable prometheus")


def test_own_policy_of_the_host_is_left_alone(host: Host) -> None:
    policy = host.root / "usr/sbin/policy-rc.d"
    policy.write_text("theirs")
    (host.bin / "promtool").unlink()
    host.setup("test")

    assert policy.read_text() == "theirs"


def test_failing_package_names_command_and_remedy_and_takes_the_policy_back(host: Host) -> None:
    done = host.setup("test", MISSING="libbpf1", APT_FAILS="100")

    assert done.returncode == 1
    assert "FAILED: apt-get" in done.stderr
    assert "remedy:" in done.stderr
    assert not (host.root / "usr/sbin/policy-rc.d").exists()


def test_failing_pip_shows_its_words(host: Host) -> None:
    done = host.setup("test", BREAK="torch==")

    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert "pip install --quiet torch==2.13.0" in done.stderr
    assert "remedy:" in done.stderr


def test_not_root_is_told_what_to_run(host: Host) -> None:
    done = host.setup("test", AS_UID="1000", MISSING="python3-bpfcc")

    assert done.returncode == 1
    assert "not root" in done.stderr
    assert "apt-get install --no-install-recommends python3-bpfcc" in done.stderr
    assert host.called("apt-get") == []


def test_user_is_created_once_without_home_or_shell(host: Host) -> None:
    host.setup("test", NO_USER="2")

    (line,) = host.called("useradd")
    assert "--system" in line
    assert "--no-create-home" in line
    assert line.endswith("--shell /usr/sbin/nologin singularityd")


def test_user_is_not_created_without_root(host: Host) -> None:
    done = host.setup("test", NO_USER="2", AS_UID="1000")

    assert done.returncode == 0
    assert host.called("useradd") == []
    assert "the daemon needs it" in done.stdout


def test_hosts_managed_by_something_else(host: Host) -> None:
    done = host.setup("test", SETUP_APT="no", MISSING="python3-bpfcc", NO_USER="2")

    assert done.returncode == 0
    assert host.called("apt-get") == host.called("useradd") == []


def test_old_python_is_refused(host: Host) -> None:
    done = host.setup("test", OLD_PYTHON="1")

    assert done.returncode == 1
    assert "no Python 3.11 or later" in done.stderr


def test_without_ensurepip_virtualenv_serves(host: Host) -> None:
    done = host.setup("test", NO_ENSUREPIP="1")
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr

    host.write("virtualenv", '#!/bin/sh\nprintf "virtualenv %s\\n" "$*" >>"$CALLS"\nmkdir -p "$5/bin" && cp "$4" "$5/bin/python"\n')
    done = host.setup("test", NO_ENSUREPIP="1")
    assert done.returncode == 0, done.stderr
    assert host.called("virtualenv")


def test_not_debian_is_told(host: Host) -> None:
    (host.bin / "dpkg-query").unlink()
    done = host.setup("test")

    assert done.returncode == 1
    assert "SETUP_APT=no" in done.stderr


def test_unknown_level(host: Host) -> None:
    assert "unknown level prod" in host.setup("prod").stderr


def test_make_knows_its_targets() -> None:
    if not shutil.which("make"):
        pytest.skip("needs make")
    for target in ("demo", "test", "lint", "bench", "install", "proto", "clean"):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, check=False, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""}
        )
        assert done.returncode == 0, done.stderr
    assert (
        subprocess.run(["make", "-n", "test-vm"], cwd=ROOT, check=False, capture_output=True).returncode != 0
        or (ROOT / "tests/vm").exists()
    )
