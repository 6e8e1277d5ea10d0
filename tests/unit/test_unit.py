"""systemd/: what the unit promises, as systemd itself reads it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "systemd/singularityd.service"
EXAMPLES = sorted((ROOT / "systemd/examples").glob("*.conf"))
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: apt-get install systemd")


def values(name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", UNIT.read_text())


def verified(place: Path, *drop_ins: Path, unit: str | None = None) -> str:
    """What systemd-analyze says of the unit with its program in place; empty where it finds nothing."""
    text = unit or UNIT.read_text()
    (place / "singularityd.service").write_text(text.replace(values("ExecStart")[0], "/bin/true"))
    for number, drop_in in enumerate(drop_ins):
        (place / "singularityd.service.d").mkdir(exist_ok=True)
        shutil.copy(drop_in, place / f"singularityd.service.d/{number}-{drop_in.name}")
    command = ["systemd-analyze", "verify", "--man=no", str(place / "singularityd.service")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return run.stdout + run.stderr + (f"exit {run.returncode}" if run.returncode else "")


@analyze
def test_the_exposure_is_at_most_four() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", "--no-pager", str(UNIT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout[-400:]


@analyze
@pytest.mark.parametrize("examples", [(), *((path,) for path in EXAMPLES), tuple(EXAMPLES)])
def test_systemd_has_nothing_to_say_against_the_unit_and_its_examples(tmp_path: Path, examples: tuple[Path, ...]) -> None:
    assert verified(tmp_path, *examples) == ""


@analyze
def test_what_systemd_does_not_know_would_be_seen(tmp_path: Path) -> None:
    wrong = UNIT.read_text().replace("DevicePolicy=closed", "DevicePolicy=closde").replace("WatchdogSec=30", "WatchdogSecs=30")
    told = verified(tmp_path, unit=wrong)
    assert "closde" in told
    assert "WatchdogSecs" in told


def test_every_capability_stands_alone_under_the_reason_for_it() -> None:
    lines = UNIT.read_text().splitlines()
    sets = [number for number, line in enumerate(lines) if line.startswith("CapabilityBoundingSet=")]
    assert len(sets) >= 8
    for number in sets:
        assert re.fullmatch(r"CapabilityBoundingSet=CAP_[A-Z_]+", lines[number])
        above = next(line for line in reversed(lines[:number]) if not line.startswith("CapabilityBoundingSet="))
        assert above.startswith("# "), lines[number]
    assert len({lines[number] for number in sets}) == len(sets)


def test_a_restart_is_not_tried_where_it_cures_nothing() -> None:
    from singularityd.errors import AddressInUse, AlreadyRunning, ConfigError, NotPermitted

    (codes,) = values("RestartPreventExitStatus")
    assert {int(code) for code in codes.split()} == {
        64,
        *(kind.exit_code for kind in (ConfigError, NotPermitted, AlreadyRunning, AddressInUse)),
    }


def test_the_watchdog_waits_longer_than_the_daemon_takes_to_notice_by_itself() -> None:
    from singularityd.kernel.heartbeat import PATIENCE, STARTING

    (seconds,) = values("WatchdogSec")
    assert PATIENCE < STARTING <= int(seconds)
    assert values("NotifyAccess") == ["main"]
    assert values("ExecReload") == ["/bin/kill -HUP $MAINPID"]


def test_only_this_host_is_reached_unless_a_drop_in_says_more() -> None:
    assert (values("IPAddressDeny"), values("IPAddressAllow")) == (["any"], ["localhost"])
    for path in EXAMPLES:
        said = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert said[0] == "[Service]"
        assert all(line.startswith("IPAddressAllow=192.0.2.") for line in said[1:])
