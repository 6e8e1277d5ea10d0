"""How the front gives up what it started with: user, groups, capabilities, system calls, the way back."""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import signal
from collections.abc import Iterable

from singularityd import seccomp
from singularityd.errors import ConfigError, NotPermitted

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_LAST_CAPABILITY = 63


def account(name: str) -> tuple[int, int]:
    """uid and gid of the front's user."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        hint = f"useradd --system --no-create-home --shell /usr/sbin/nologin {name}, or set daemon.user"
        raise ConfigError(f"daemon.user: there is no user {name!r}", hint=hint) from None
    if entry.pw_uid == 0:
        raise ConfigError(f"daemon.user: {name!r} is root; the front must not be", hint="name an unprivileged user of its own")
    return entry.pw_uid, entry.pw_gid


def groups(setting: str, names: Iterable[str]) -> frozenset[int]:
    """The numbers of groups. Raises ConfigError for one that the host does not have."""
    found: set[int] = set()
    for name in names:
        try:
            found.add(grp.getgrnam(name).gr_gid)
        except KeyError:
            raise ConfigError(f"{setting}: there is no group {name!r}", hint=f"groupadd --system {name}, or correct {setting}") from None
    return frozenset(found)


def drop(name: str) -> None:
    """Become `name` for good; from here nothing this process does, or is made to do, has a privilege."""
    uid, gid = account(name)
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or os.getresuid() != (uid, uid, uid):
        raise NotPermitted("the front's privileges could not be dropped")
    seccomp.install()


def die_with(parent: int) -> bool:
    """Be ended when the executor ends. Set after `drop`: a change of user clears it. False where it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent
