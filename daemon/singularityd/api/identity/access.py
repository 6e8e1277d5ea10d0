"""From a token to a caller and a role, or to a refusal. Loop thread only."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from singularityd.api.identity import peer, roles
from singularityd.api.identity.caller import Caller, Role
from singularityd.api.identity.roles import Groups, Socket
from singularityd.api.identity.token import Seal
from singularityd.errors import NotAllowed, Unauthenticated

LIFE = 60.0
_MOST_OF_USER = 256
"""Processes of one user that hold tokens."""


class Access:
    """Gives tokens to processes and judges calls by them."""

    def __init__(
        self, groups: Groups | None = None, *, life: float = LIFE, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.groups = groups or Groups()
        self.life = life
        self._proc = proc
        self._clock = clock
        self._seal = Seal(clock)
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._pins = peer.Pins(proc, most=max(room, 16), most_of_user=min(_MOST_OF_USER, max(room // 2, 8)), clock=clock)
        self._callers: dict[peer.Key, Caller] = {}

    @property
    def open_control(self) -> bool:
        """Whether others than root may have a role, so that control.sock is to be reachable for them."""
        return bool(self.groups.all)

    def give(self, fd: int, *, pid: int, uid: int, gids: tuple[int, ...], name: str, socket: Socket) -> str:
        """A token for a process; the pidfd is ours from here. Raises Unauthenticated and Busy."""
        start = self._pins.pin(fd, pid, uid, self._clock() + self.life)
        granting = tuple(sorted(self.groups.all.intersection(gids)))
        self._remember(_described(self._proc, Caller(uid, granting, pid, start, name)))
        return self._seal.make(uid=uid, gids=granting, pid=pid, start=start, socket=socket, life=self.life)

    def caller(self, token: str, socket: Socket) -> Caller:
        """The live process that took this token, which is spent by it. Raises Unauthenticated."""
        claims = self._seal.read(token, socket)
        self._pins.check(claims.pid, claims.start)
        self._seal.use(claims)
        known = self._callers.get((claims.pid, claims.start))
        proven = known or Caller(claims.uid, claims.gids, claims.pid, claims.start)
        return proven._replace(uid=claims.uid, gids=claims.gids)

    def allow(self, caller: Caller, method: str, socket: Socket) -> Role:
        """The caller's role. Raises NotAllowed when it has none, or one that may not call this."""
        role = self.groups.role(caller, socket)
        name = method.rpartition(".")[2].replace("/", ".")
        if role is None:
            raise NotAllowed(f"{caller} has no role on this host", hint="the groups in [access] of the daemon's settings give roles")
        if method not in roles.ROLES[role]:
            raise NotAllowed(f"{caller} is {role} here; {name} takes {roles.needed(method)}", hint="[access] in the daemon's settings")
        return role

    def close(self) -> None:
        """Forget every token."""
        self._pins.close()
        self._callers.clear()

    def _remember(self, caller: Caller) -> None:
        self._callers.pop((caller.pid, caller.start_time), None)  # the oldest is the one not heard of for longest
        self._callers[caller.pid, caller.start_time] = caller
        while len(self._callers) > 2 * len(self._pins) + 16:
            del self._callers[next(iter(self._callers))]


def anonymous(socket: Socket) -> Unauthenticated:
    """The refusal of a call without a token."""
    return Unauthenticated(
        f"{socket}.sock takes a token with each call", hint="take it from token.sock beside; singularityctl does by itself"
    )


def _described(proc: Path, caller: Caller) -> Caller:
    """With what /proc shows of it while it certainly lives."""
    place = proc / str(caller.pid)
    try:
        exe = os.readlink(place / "exe")
    except OSError:
        exe = ""
    pids = next((line.split()[1:] for line in _text(place / "status").splitlines() if line.startswith("NSpid:")), [])
    cgroup = _text(place / "cgroup").strip().rpartition("::")[2]
    return caller._replace(exe=exe, cgroup=cgroup, namespace_pids=tuple(map(int, pids)))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="backslashreplace")
    except OSError:
        return ""
