"""A unix socket that nobody can reach before it has its permissions.

It is bound in a directory that only its owner can enter, given its mode there, and then renamed into place: no umask, no moment between
bind and chmod. The rename also replaces, in one step, what a daemon that died has left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from urllib.parse import quote

from singularityd.errors import AddressInUse, AlreadyRunning, ConfigError, NotPermitted

LONGEST = 107
"""Bytes of a socket's path: sun_path less its end."""


class Doorway:
    """One socket's way from bound to reachable to gone. Any thread, one at a time; the host's lock keeps a second daemon out."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._private = path.parent / f".{path.stem}"
        self._hidden = self._private / "s"
        self._identity: tuple[int, int] | None = None

    def prepare(self) -> str:
        """The address to bind. Raises AlreadyRunning, AddressInUse, ConfigError and NotPermitted."""
        longest = max(len(os.fsencode(self.path)), len(os.fsencode(self._hidden)))
        if longest > LONGEST:
            raise ConfigError(f"{self.path} is too long for a socket", hint=f"choose a shorter runtime_dir: {LONGEST} bytes fit")
        _refuse_living(self.path)
        self._clear()  # of a daemon that was killed while it started
        try:
            self._private.mkdir(mode=0o700)
        except OSError as error:
            raise NotPermitted(
                f"{self._private} cannot be made: {os.strerror(error.errno or 0)}",
                hint="it must exist and belong to the daemon's user; systemd makes it by RuntimeDirectory=",
            ) from None
        return f"unix:{quote(os.fspath(self._hidden))}"

    @property
    def hidden(self) -> Path:
        """Where it is bound before it is opened."""
        return self._hidden

    def open(self) -> None:
        """Let clients in: called when the server listens and serves."""
        self._hidden.chmod(self._mode)
        found = self._hidden.stat()
        self._identity = found.st_dev, found.st_ino
        self._hidden.rename(self.path)
        self._private.rmdir()

    def close(self) -> None:
        """Take away what is ours; what another daemon has put there meanwhile stays."""
        with contextlib.suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self.path.unlink()
        self._clear()
        self._identity = None

    def _clear(self) -> None:
        with contextlib.suppress(OSError):
            self._hidden.unlink()
        with contextlib.suppress(OSError):
            self._private.rmdir()


def _refuse_living(path: Path) -> None:
    """Raises AlreadyRunning where somebody listens; what refuses a connection is left by a daemon that died, and is replaced."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise AddressInUse(f"{path} exists and is no socket", hint="move it away: the daemon replaces nothing but its own sockets")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code in (errno.ECONNREFUSED, errno.ENOENT):
        return
    if code == errno.EACCES:
        raise NotPermitted(f"{path} belongs to another user", hint="remove it, if no other daemon of this host uses it")
    raise AlreadyRunning(f"another process listens on {path}", hint="stop it first, or set another runtime_dir")
