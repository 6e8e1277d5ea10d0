"""Who makes the call that runs now, as the fault service wants to know it."""

from __future__ import annotations

from singularityd.api.admission import WHO
from singularityd.api.identity.caller import CALLER, ROLE
from singularityd.faults.limits import Caller


def who() -> str:
    """For the journal: the proven caller, else the socket whose permissions let it in."""
    caller = CALLER.get()
    return str(caller) if caller else WHO


def asking() -> tuple[str, Caller]:
    """For the journal, and for the limits."""
    caller = CALLER.get()
    return who(), Caller(uid=caller.uid if caller else 0, admin=ROLE.get() == "admin")
