"""singularityd: reads the settings, then becomes the executor.

The settings are read in this first image, which then executes the slim one under the same pid: what parsing needs (msgspec, click)
is not kept in the privileged process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from singularityd import __version__, config, privileges
from singularityd.config import FRONT_SETTINGS
from singularityd.errors import ConfigError, NotPermitted, SingularityError

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from singularityd.kernel.executor import main; raise SystemExit(main())"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--config", "path", metavar="FILE", help="Settings; without it $SINGULARITYD_CONFIG or /etc/singularityd/config.toml.")
@click.option("--set", "words", metavar="TABLE.KEY=VALUE", multiple=True, help="One setting; may be given several times.")
@click.option("--check", is_flag=True, help="Check the settings and exit.")
@click.version_option(__version__, prog_name="singularityd")
def command(path: str | None, words: tuple[str, ...], check: bool) -> None:
    """Watch, and on request disturb, the collective communication of this host's training ranks."""
    settings = config.load(path, dict(config.override(word) for word in words))
    if check:
        click.echo("the settings are valid")
        return
    if os.geteuid() != 0:
        raise NotPermitted("singularityd must be started as root", hint="sudo .venv/bin/singularityd, or the systemd unit")
    for name in ("viewer_groups", "operator_groups", "admin_groups"):
        privileges.groups(f"access.{name}", getattr(settings.access, name))  # told here, once, and not by each new front
    prepare(settings.daemon)
    execute(settings)


def prepare(daemon: config.DaemonSettings) -> None:
    """Make the directories: the state is root's (programs are compiled from it), what the front writes is the front's."""
    uid, gid = privileges.account(daemon.user)
    places = ((Path(daemon.runtime_dir), uid, gid), (Path(daemon.state_dir), 0, 0), (Path(daemon.state_dir) / "front", uid, gid))
    for place, owner, group in places:
        try:
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
            os.chown(place, owner, group)
            place.chmod(0o755 if owner == 0 or place == Path(daemon.runtime_dir) else 0o700)
        except OSError as error:
            raise NotPermitted(
                f"{place} cannot be prepared: {error.strerror}", hint="set daemon.runtime_dir or daemon.state_dir"
            ) from error
        if owner:
            reachable(place, daemon.user, uid, gid)


def reachable(place: Path, user: str, uid: int, gid: int) -> None:
    """Raises NotPermitted where the front's user cannot get to a directory; it would start again and again."""
    for parent in place.resolve().parents:
        status = parent.stat()
        bit = 0o100 if status.st_uid == uid else 0o010 if status.st_gid == gid else 0o001
        if not status.st_mode & bit:
            hint = f"chmod o+x {parent}, or set daemon.runtime_dir and daemon.state_dir"
            raise NotPermitted(f"{place} cannot be reached by user {user}: {parent} lets nobody else in", hint=hint)


def execute(settings: config.Settings) -> NoReturn:
    """Become the executor."""
    front = [sys.executable, "-m", "singularityd.front"]
    kernel, faults = settings.kernel, settings.faults
    slim = {
        "runtime_dir": settings.daemon.runtime_dir,
        "state_dir": settings.daemon.state_dir,
        "system_python": kernel.system_python,
        "headers": kernel.headers,
        "front": front,
        "slow_ns": round(kernel.slow_call * 1e9),
        "guard_limit": kernel.guard_hits if kernel.guard else 0,
        "return_probes": kernel.return_probes,
        "linger": kernel.linger,
        "event_pages": kernel.event_pages,
        "process_pages": kernel.process_pages,
        "faults_enabled": faults.enabled,
        "max_duration_ms": round(faults.max_duration * 1000),
        "max_active": faults.max_active,
        "expire_after": settings.ranks.expire_after,
        "nice": settings.daemon.nice,
        "scan_interval": kernel.scan_interval,
        "packages": [path for path in sys.path if path.endswith("-packages")],
    }
    here = str(Path(__file__).resolve().parent.parent)
    # Through the environment: everybody on the host can read arguments, and a header may carry a token.
    environment = dict(os.environ, **{FRONT_SETTINGS: msgspec.json.encode(settings).decode()})
    os.execve(  # noqa: S606 - the point of this process
        sys.executable, [sys.executable, "-E", "-S", "-c", _BOOT, here, json.dumps(slim)], environment
    )


def main() -> None:
    """Entry of the script; no traceback reaches a user."""
    try:
        command.main(standalone_mode=False)
    except click.exceptions.Abort:
        raise SystemExit(130) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(64) from None
    except SingularityError as error:
        click.echo(f"singularityd: {error.text}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        raise SystemExit(error.exit_code if isinstance(error, (ConfigError, NotPermitted)) else 70) from None


if __name__ == "__main__":
    main()
