"""Node: what the daemon is and does."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from singularityd import __version__
from singularityd.api import convert
from singularityd.api.ports import FaultService, NodeStatus, RankRegistry
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc

API = "singularity.node.v1"


class Node(node_pb2_grpc.NodeServicer):
    """Status and versions."""

    def __init__(
        self,
        *,
        ranks: RankRegistry,
        faults: FaultService,
        status: Callable[[], NodeStatus],
        health: Callable[[], Mapping[str, tuple[bool, str]]],
    ) -> None:
        self._ranks = ranks
        self._faults = faults
        self._status = status
        self._health = health

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        """What the daemon is and does now; exited ranks are not counted."""
        now = self._status()
        live = [rank for rank in self._ranks.all() if rank.state != "exited"]
        ill = [f"{name}: {detail or 'not well'}" for name, (works, detail) in self._health().items() if not works]
        return pb.StatusReply(
            version=__version__,
            started_at=now.started_at,
            executor_started_at=now.executor_started_at,
            executor_pid=now.executor_pid,
            front_pid=os.getpid(),
            executor_restarts=now.executor_restarts,
            probes=now.probes,
            dropped=now.dropped,
            attach_errors=now.attach_errors,
            shed=[convert.text(site) for site in now.shed],
            ranks=len(live),
            jobs=[convert.text(job) for job in sorted({rank.job for rank in live})],
            faults=[convert.fault(fault) for fault in self._faults.active()],
            metrics_address=now.metrics_address,
            healthy=not ill,
            problems=[convert.text(problem) for problem in ill],
        )

    async def Version(self, request: pb.VersionRequest, context: Any) -> pb.VersionReply:
        """The daemon's version, the API's and Python's."""
        return pb.VersionReply(version=__version__, api=API, python=platform.python_version())
