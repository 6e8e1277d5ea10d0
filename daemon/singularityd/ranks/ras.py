"""A client of NCCL's RAS service."""

from __future__ import annotations

import msgspec


class RasRank(msgspec.Struct, frozen=True):
    """One member of a communicator on this host, as NCCL's RAS service tells it."""

    pid: int
    """As the process itself sees it."""
    comm: str
    rank: int
    size: int
