"""Doctor: what this host permits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from singularityd.api import convert
from singularityd.api.ports import CheckUp
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc


class Doctor(node_pb2_grpc.DoctorServicer):
    """The capabilities that were tried."""

    def __init__(self, check_up: Callable[[], CheckUp]) -> None:
        self._check_up = check_up

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        """What was tried on this host and what came of it."""
        found = self._check_up()
        return pb.CheckReply(capabilities=[convert.capability(one) for one in found.capabilities], complete=found.complete)
