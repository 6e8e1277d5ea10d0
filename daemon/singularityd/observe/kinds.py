"""Every kind of event there is, with its severity. docs/events.md is made from this list; the bus refuses a kind that is not in it."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["info", "warning", "error"]


class Kind(msgspec.Struct, frozen=True):
    """A kind of event. The name is a frozen surface: scripts filter by it."""

    name: str
    severity: Severity
    help: str


KINDS = (
    Kind("rank_found", "info", "A process that has a collective library mapped was found; its rank may still be unknown"),
    Kind("rank_identified", "info", "It became known, or known better, which rank of which job a process is"),
    Kind("library_attached", "info", "Probes were attached in a collective library"),
    Kind("attach_failed", "warning", "Probes could not be attached in a library; its collectives are not seen"),
    Kind("comm_init", "info", "A rank created a communicator or group"),
    Kind("comm_end", "info", "A rank destroyed, finalized or aborted a communicator"),
    Kind("first_call", "info", "A rank made its first call of one operation on one communicator"),
    Kind("call_failed", "error", "A collective call returned an error"),
    Kind("slow_call", "warning", "A call took longer than the setting allows"),
    Kind("rank_dying", "error", "A rank's process began to exit; told before its memory is torn down"),
    Kind("rank_stopped", "warning", "A rank's process was stopped (SIGSTOP, SIGTSTP or a debugger)"),
    Kind("rank_continued", "info", "A stopped rank's process goes on"),
    Kind("rank_oom_killed", "error", "The kernel killed a rank's process for lack of memory"),
    Kind("rank_exec", "warning", "A rank's process replaced itself by another program"),
    Kind("rank_exited", "error", "A rank's process is gone; says its exit code or signal"),
    Kind("fault_armed", "warning", "A fault stands ready: the next call it is meant for will be disturbed"),
    Kind("fault_hit", "warning", "A fault disturbed a call"),
    Kind("fault_held", "warning", "The thread of a disturbed call is held"),
    Kind("fault_released", "info", "A held thread goes on"),
    Kind("fault_ended", "info", "A fault is over; says why, and how many calls it hit"),
    Kind("fault_refused", "warning", "A fault was asked for and not armed; says why"),
    Kind("probe_shed", "warning", "Probes were detached because they were hit more often than the setting allows"),
    Kind("events_dropped", "warning", "Events are missing here: a buffer was full or this reader was too slow; says how many"),
    Kind("executor_lost", "error", "The privileged half is gone; its faults and probes are gone with it"),
    Kind("executor_back", "info", "The privileged half works again"),
    Kind("agent_registered", "info", "The library inside a rank registered itself"),
    Kind("agent_report", "info", "The library inside a rank reported something"),
)

BY_NAME = {kind.name: kind for kind in KINDS}
