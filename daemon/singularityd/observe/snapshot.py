"""One consistent reading of everything that is shown: what a Prometheus page, an OTLP export and `singularityctl top` are made of."""

from __future__ import annotations

import msgspec

from singularityd.model import Calls, Capability, Fault, Rank, Skew


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Taken on the loop thread by the app, then read by any thread; nothing in it changes afterwards.

    Only what is measured belongs here; what is derived from it (sums, histograms, label values) is made by `reading`.
    """

    calls: Calls = Calls()
    ranks: tuple[Rank, ...] = ()
    """Rank processes, also those that exited and are not yet expired: they keep their series alive."""
    skews: tuple[Skew, ...] = ()
    faults: tuple[Fault, ...] = ()
    """Those active, and those ended within the expiry."""
    dropped: dict[str, int] = {}
    """Buffer -> records lost since the start."""
    submitted: dict[str, int] = {}
    """Buffer -> records offered since the start; received + dropped = submitted."""
    received: dict[str, int] = {}
    """Buffer -> records read since the front started; the executor's counters are older where the front was restarted."""
    probes: dict[str, int] = {}
    """Backend -> attached sites."""
    attach_errors: dict[str, int] = {}
    """Reason -> attachments that failed since the start."""
    exits: dict[tuple[str, str, str], int] = {}
    """(job, rank, reason) -> exits since the start."""
    capabilities: tuple[Capability, ...] = ()
    executor_rss: int = 0
    """Bytes; 0 is not known."""
    executor_cpu: float = 0.0
    """Seconds of CPU, user and system, since the executor started."""
    front_rss: int = 0
    """Bytes; 0 is not known."""
    front_cpu: float = 0.0
    """Seconds of CPU, user and system, since the front started."""
    loop_lag: float = 0.0
    """Greatest delay of the event loop in the last minute, seconds."""
    event_queue: int = 0
    """Events that wait for the slowest subscriber."""
    event_subscribers: int = 0
    started_at: float = 0.0
    """Unix time at which the daemon was ready."""
