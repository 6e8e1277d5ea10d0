"""What a wait status of a traced thread means: a pure function, so that every case can be tested."""

from __future__ import annotations

import os
import signal
from enum import Enum
from typing import NamedTuple

from singularityd.kernel.ptrace import calls

_GROUP = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class Kind(Enum):
    """What happened to the thread."""

    ENDED = "ended"
    SIGNAL = "signal"
    GROUP_STOP = "group stop"
    NEW = "new thread"
    CLONE = "made a thread"
    EXEC = "exec"
    OTHER = "other"


class Stop(NamedTuple):
    """`signal` is the one to be delivered, for SIGNAL and GROUP_STOP."""

    kind: Kind
    signal: int = 0


def classify(status: int) -> Stop:
    """From waitpid's status."""
    if not os.WIFSTOPPED(status):
        return Stop(Kind.ENDED)
    number, event = os.WSTOPSIG(status), status >> 16
    if event == calls.EVENT_STOP:
        # PTRACE_EVENT_STOP with a stopping signal is a group-stop; with SIGTRAP it is a new thread's first stop or an interrupt.
        return Stop(Kind.GROUP_STOP, number) if number in _GROUP else Stop(Kind.NEW)
    if event == calls.EVENT_CLONE:
        return Stop(Kind.CLONE)
    if event == calls.EVENT_EXEC:
        return Stop(Kind.EXEC)
    return Stop(Kind.OTHER) if event else Stop(Kind.SIGNAL, number)
