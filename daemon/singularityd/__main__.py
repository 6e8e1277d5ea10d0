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

from singularityd import __version__, config, config_command, privileges
from singularityd.config import FRONT_SETTINGS
from singularityd.config_changes import Flags
from singularityd.errors import ConfigError, NotPermitted, SingularityError

EXIT_CODES = {
    0: "ended on request (SIGTERM, SIGINT), or what was asked for was answered",
    64: "usage: the command line is wrong",
    69: "unavailable: another daemon runs with this state directory, or the probes cannot be loaded on this host",
    70: "a defect: report it with the line it printed",
    77: "a privilege is missing",
    78: "the settings are wrong; all problems are listed",
    130: "interrupted before it had started",
}
"""A frozen surface: sysexits(3). The unit does not restart on 64, 69, 77 and 78."""

_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from singularityd.kernel.executor import main; raise SystemExit(main())"


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@config_command.settings_options
@click.option("--check", is_flag=True, help="Check the settings and exit, as `config check` does.")
@click.version_option(__version__, prog_name="singularityd")
@click.pass_context
def command(ctx: click.Context, path: str | None, words: tuple[str, ...], check: bool) -> None:
    """Watch, and on request disturb, the collective communication of this host's training ranks.

    \b
    Exit codes: 0 ended on request, 64 usage, 69 another daemon runs or the probes cannot be loaded,
                70 defect, 77 a privilege is missing, 78 the settings are wrong
    """
    flags = Flags(path, words)
    ctx.obj = flags
    if ctx.invoked_subcommand is not None:
        return
    settings = flags.load()
    if check:
        click.echo("the settings are valid")
        return
    if os.geteuid() != 0:
        raise NotPermitted("singularityd must be started as root", hint="sudo .venv/bin/singularityd, or the systemd unit")
    for name in ("viewer_groups", "operator_groups", "admin_groups"):
        privileges.groups(f"access.{name}", getattr(settings.access, name))  # told here, once, and not by each new front
    prepare(settings.daemon)
    execute(settings, flags)


command.add_command(config_command.group)


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


def slim(settings: config.Settings) -> dict[str, object]:
    """The executor's part of the settings, and what it starts."""
    front = [sys.executable, "-m", "singularityd.front"]
    kernel, faults = settings.kernel, settings.faults
    return {
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
        "faults_enabled": faults.mode != "off",
        "off_switch": faults.off_switch,
        "max_duration_ms": round(faults.max_duration * 1000),
        "max_active": faults.max_active,
        "expire_after": settings.ranks.expire_after,
        "nice": settings.daemon.nice,
        "scan_interval": kernel.scan_interval,
        "packages": [path for path in sys.path if path.endswith("-packages")],
    }


def execute(settings: config.Settings, flags: Flags) -> NoReturn:
    """Become the executor."""
    here = str(Path(__file__).resolve().parent.parent)
    # Through the environment: everybody on the host can read arguments, and a header may carry a token.
    environment = {**os.environ, FRONT_SETTINGS: msgspec.json.encode(settings).decode(), **flags.to_environment()}
    os.execve(  # noqa: S606 - the point of this process
        sys.executable, [sys.executable, "-E", "-S", "-c", _BOOT, here, json.dumps(slim(settings))], environment
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
