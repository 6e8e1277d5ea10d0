"""The two servers: `control.sock` for the administrator, every service; `agent.sock` for every process of the host, Agent and health only.

Beside them `token.sock` says who calls; roles decide who may do what. Where no group has a role, control.sock is kept for root by its
permissions too. Loop thread only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Read when grpc is loaded: its fork handlers would stop the front's threads for each child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from singularityd.api import limits as bounds
from singularityd.api.admission import Admission
from singularityd.api.doorway import Doorway
from singularityd.api.guard import Guard
from singularityd.api.identity.fetch import TOKEN_SOCKET
from singularityd.api.identity.mint import Mint
from singularityd.api.identity.roles import Socket
from singularityd.api.limits import Limits
from singularityd.api.ports import Ports
from singularityd.api.servicers.agent import Agent
from singularityd.api.servicers.doctor import Doctor
from singularityd.api.servicers.events import Events
from singularityd.api.servicers.faults import Faults
from singularityd.api.servicers.health import Health
from singularityd.api.servicers.node import Node
from singularityd.api.servicers.ranks import Ranks
from singularityd.api.v1 import node_pb2, node_pb2_grpc
from singularityd.errors import AddressInUse

CONTROL, AGENT = "control.sock", "agent.sock"
CONTROL_MODE, AGENT_MODE = 0o600, 0o666
OPEN_CONTROL_MODE = 0o666
"""Where groups have roles: every call takes a token then, so the mode need not tell users apart; the front could not chown to a group."""


class ApiServer:
    """Both sockets in one directory."""

    def __init__(self, directory: Path, ports: Ports, *, control: Limits | None = None, agent: Limits | None = None) -> None:
        """`directory` exists, belongs to this process's user and is not writable for others."""
        self._ports = ports
        self._control_limits = control or Limits()
        self._agent_limits = agent or bounds.AGENT
        access = ports.access
        self._control = Doorway(directory / CONTROL, OPEN_CONTROL_MODE if access and access.open_control else CONTROL_MODE)
        self._mint = Mint(Doorway(directory / TOKEN_SOCKET, AGENT_MODE), access) if access else None
        self._agent = Doorway(directory / AGENT, AGENT_MODE)
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Serve. Raises AlreadyRunning, AddressInUse, NotPermitted and ConfigError; nothing is left behind then."""
        try:
            for door, make in ((self._control, self._control_server), (self._agent, self._agent_server)):
                self._servers.append(make())
                _bind(self._servers[-1], door)
            for server in self._servers:
                await server.start()
            if self._mint is not None:
                await self._mint.bind()
                self._mint.open()
            for door in (self._control, self._agent):
                door.open()
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, grace: float = 1.0) -> None:
        """Take the sockets away, let calls that run end within `grace` seconds, end the rest. More calls do nothing."""
        self._close()
        servers, self._servers = self._servers, []
        for server in servers:
            await server.stop(grace)

    def _close(self) -> None:
        self._control.close()
        self._agent.close()
        if self._mint is not None:
            self._mint.close()

    def _control_server(self) -> grpc.aio.Server:
        ports, limits = self._ports, self._control_limits
        server = _server(limits, self._admission("control"))
        node_pb2_grpc.add_NodeServicer_to_server(
            Node(ranks=ports.ranks, faults=ports.faults, status=ports.status, health=ports.health), server
        )
        node_pb2_grpc.add_RanksServicer_to_server(Ranks(ranks=ports.ranks, reading=ports.reading), server)
        faults = Faults(
            faults=ports.faults, parse=ports.parse, patterns=ports.patterns, members=ports.ranks.members, campaigns=ports.campaigns
        )
        node_pb2_grpc.add_FaultsServicer_to_server(faults, server)
        node_pb2_grpc.add_EventsServicer_to_server(Events(bus=ports.bus, kinds=ports.kinds, backlog=limits.backlog), server)
        node_pb2_grpc.add_DoctorServicer_to_server(Doctor(ports.check_up), server)
        self._add_common(server, limits)
        names = [service.full_name for service in node_pb2.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection([*names, _HEALTH, reflection.SERVICE_NAME], server)
        return server

    def _agent_server(self) -> grpc.aio.Server:
        server = _server(self._agent_limits, self._admission("agent"))
        self._add_common(server, self._agent_limits)
        return server

    def _admission(self, socket: Socket) -> Admission | None:
        access, audit = self._ports.access, self._ports.audit
        return Admission(socket, access, audit) if access and audit else None

    def _add_common(self, server: grpc.aio.Server, limits: Limits) -> None:
        ports = self._ports
        agent = Agent(ranks=ports.ranks, bus=ports.bus, kinds=ports.kinds, start_time=ports.start_time, backlog=limits.backlog)
        node_pb2_grpc.add_AgentServicer_to_server(agent, server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(ports.health), server)


_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def _server(limits: Limits, admission: Admission | None) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=[Guard(limits, admission)], options=list(_options(limits)), maximum_concurrent_rpcs=limits.calls)


def _bind(server: grpc.aio.Server, door: Doorway) -> None:
    address = door.prepare()
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise AddressInUse(f"{door.path} cannot be bound", hint="see that its file system has sockets and room") from None


def _options(limits: Limits) -> Iterable[tuple[str, Any]]:
    """https://grpc.github.io/grpc/core/group__grpc__arg__keys.html"""
    keepalive = int(limits.keepalive * 1000)
    return {
        "grpc.max_receive_message_length": limits.largest_request,
        "grpc.max_send_message_length": limits.largest_answer,
        "grpc.max_concurrent_streams": limits.streams_per_connection,
        "grpc.keepalive_time_ms": keepalive,
        "grpc.keepalive_timeout_ms": 2 * keepalive,
        "grpc.http2.ping_timeout_ms": 2 * keepalive,  # 60 s without it, whatever keepalive_timeout_ms says (measured, grpcio 1.85.3)
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": 5000,
        "grpc.server_handshake_timeout_ms": int(limits.handshake * 1000),
        "grpc.so_reuseport": 0,
    }.items()
