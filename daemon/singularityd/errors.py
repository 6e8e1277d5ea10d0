"""Every error the daemon tells a caller about. Adapters turn bcc, sqlite, netlink and OS errors into these; no other leaves them.

SingularityError
+-- UsageError                 the request itself is wrong (exit 2)
|   +-- UnknownPattern
|   +-- BadOption
+-- NotFound                   no such thing (exit 3)
|   +-- NoSuchRank
|   +-- NoSuchJob
|   +-- AmbiguousJob
|   +-- NoSuchFault
|   +-- NoSuchCampaign
+-- Refused                    understood, and not done (exit 1)
|   +-- NotAllowed
|   +-- Unauthenticated
|   +-- AuditUnavailable
|   +-- AlreadyArmed
|   +-- CampaignRuns
|   +-- RankGone
|   +-- NotWatched
|   +-- TracedByAnother
|   +-- CannotStop
|   +-- JournalUnavailable
|   +-- Busy
|   +-- ResumeLost
+-- Failed                     tried, and did not work (exit 1)
|   +-- ExecutorGone
|   +-- KernelRefused
|   +-- TookTooLong
+-- ConfigError                settings (exit 78)
+-- NotPermitted               the daemon lacks a privilege (exit 77)
+-- AlreadyRunning             a second daemon (exit 69)
+-- AddressInUse               a port that another process has (exit 69)
"""

from __future__ import annotations


class SingularityError(Exception):
    """Base. `code` is stable and machine-readable; `status` is a gRPC status name; `exit_code` is singularityctl's or the daemon's."""

    code = "internal"
    status = "INTERNAL"
    exit_code = 1

    def __init__(self, text: str, *, hint: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


class UsageError(SingularityError):
    """The request itself is wrong; names the thing, the allowed values and the remedy."""

    code, status, exit_code = "usage", "INVALID_ARGUMENT", 2


class UnknownPattern(UsageError):
    """Raised when a fault pattern has a name that no pattern has."""

    code = "unknown_pattern"


class BadOption(UsageError):
    """Raised when an option's key, unit or value is not one of the allowed."""

    code = "bad_option"


class NotFound(SingularityError):
    """Something named in the request is not on this host."""

    code, status, exit_code = "not_found", "NOT_FOUND", 3


class NoSuchRank(NotFound):
    """Raised when no process of this host is that rank; lists those there are."""

    code = "no_such_rank"


class NoSuchJob(NotFound):
    """Raised when no job of that name runs on this host; lists those there are."""

    code = "no_such_job"


class AmbiguousJob(NotFound):
    """Raised when several jobs run here and the request names none."""

    code, status = "ambiguous_job", "FAILED_PRECONDITION"


class NoSuchFault(NotFound):
    """Raised when the journal has no fault of that id."""

    code = "no_such_fault"


class NoSuchCampaign(NotFound):
    """Raised when the journal has no campaign of that id."""

    code = "no_such_campaign"


class Refused(SingularityError):
    """Understood, and not done."""

    code, status, exit_code = "refused", "FAILED_PRECONDITION", 1


class NotAllowed(Refused):
    """Raised when the caller or the settings forbid it."""

    code, status = "not_allowed", "PERMISSION_DENIED"


class Unauthenticated(Refused):
    """Raised when a caller does not prove who it is: no token, or one that is forged, expired, used, or of a process that has ended."""

    code, status = "unauthenticated", "UNAUTHENTICATED"


class AuditUnavailable(Refused):
    """Raised when the audit cannot be written; nothing that it would have to tell is done then."""

    code = "audit_unavailable"


class AlreadyArmed(Refused):
    """Raised when the rank already has a fault."""

    code, status = "already_armed", "ALREADY_EXISTS"


class CampaignRuns(Refused):
    """Raised when a campaign is asked for while another runs; names it."""

    code, status = "campaign_runs", "ALREADY_EXISTS"


class RankGone(Refused):
    """Raised when the rank exited or exec'ed between naming it and arming it."""

    code = "rank_gone"


class NotWatched(Refused):
    """Raised when no probe stands on the calls asked for, so that the fault would do nothing."""

    code = "not_watched"


class TracedByAnother(Refused):
    """Raised when another tracer (gdb, strace, py-spy) is attached; names it."""

    code = "traced_by_another"


class CannotStop(Refused):
    """Raised when the rank's threads cannot be stopped: signals taken, ptrace forbidden."""

    code = "cannot_stop"


class JournalUnavailable(Refused):
    """Raised when the journal cannot be written; nothing is armed then."""

    code = "journal_unavailable"


class Busy(Refused):
    """Raised when a limit on rate, size or number is reached."""

    code, status = "busy", "RESOURCE_EXHAUSTED"


class ResumeLost(Refused):
    """Raised when the events after a resume token are no longer kept."""

    code, status = "resume_lost", "OUT_OF_RANGE"


class Failed(SingularityError):
    """Tried, and did not work."""

    code, status = "failed", "INTERNAL"


class ExecutorGone(Failed):
    """Raised when the privileged half died or does not answer."""

    code, status = "executor_gone", "UNAVAILABLE"


class KernelRefused(Failed):
    """Raised when the kernel answers no; the text carries its errno by name."""

    code = "kernel_refused"


class TookTooLong(Failed):
    """Raised when a request was not answered within the time that the server allows."""

    code, status = "took_too_long", "DEADLINE_EXCEEDED"


class ConfigError(SingularityError):
    """Raised for settings that are wrong; lists every problem at once."""

    code, status, exit_code = "config", "INVALID_ARGUMENT", 78


class NotPermitted(SingularityError):
    """Raised when the daemon itself lacks a privilege it cannot work without."""

    code, status, exit_code = "not_permitted", "PERMISSION_DENIED", 77


class AlreadyRunning(SingularityError):
    """Raised when another daemon holds this host's lock."""

    code, status, exit_code = "already_running", "UNAVAILABLE", 69


class AddressInUse(SingularityError):
    """Raised when another process listens on an address the daemon is set to listen on; names it."""

    code, status, exit_code = "address_in_use", "UNAVAILABLE", 69
