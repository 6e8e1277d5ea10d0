"""The proven caller of the request that runs now."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal, NamedTuple

Role = Literal["viewer", "operator", "admin", "agent"]


class Caller(NamedTuple):
    """A process as the kernel described it when it took its token; uid, gids and pids are those of the host."""

    uid: int
    gids: tuple[int, ...]
    """Its groups that give a role; the others decide nothing and are not kept."""
    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat: clock ticks after boot."""
    name: str = ""
    """The user's name; empty where the host has none for the uid."""
    exe: str = ""
    """Empty where the front may not read it: of another user's process it needs a privilege that the front has not."""
    cgroup: str = ""
    namespace_pids: tuple[int, ...] = ()
    """What the process is called in each pid namespace, outermost first."""

    def __str__(self) -> str:
        who = f"uid {self.uid}, pid {self.pid}"
        return f"{self.name} ({who})" if self.name else who


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Of the running request; None where the permissions of the socket are all that is known."""
ROLE: ContextVar[Role] = ContextVar("role", default="admin")
"""Of that caller; whoever is only known to have opened root's own socket is an administrator."""
