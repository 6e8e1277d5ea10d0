"""Which role may call which method: one table, and nothing else decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from singularityd.api.identity.caller import Caller, Role

Socket = Literal["control", "agent"]

_NODE = "/singularity.node.v1"
_CAMPAIGN_READS = ("GetCampaign", "ListCampaigns", "RecordCampaign")
AGENT = frozenset(f"{_NODE}.Agent/{name}" for name in ("Register", "Watch", "Report"))
READS = frozenset(
    {f"{_NODE}.{name}" for name in ("Node/Status", "Node/Version", "Ranks/List", "Ranks/Top", "Events/Follow", "Doctor/Check")}
    | {f"{_NODE}.Faults/{name}" for name in ("List", "Get", "Wait", "ListPatterns", *_CAMPAIGN_READS)}
)
ENDING = frozenset({f"{_NODE}.Faults/Clear", f"{_NODE}.Faults/StopCampaign"})
"""Calls that only let ranks go: they are made though the audit cannot be written."""
MUTATING = frozenset({f"{_NODE}.Faults/Inject", f"{_NODE}.Faults/InjectMany", f"{_NODE}.Faults/StartCampaign"}) | ENDING
"""Calls that disturb a job or end a disturbance: each is audited before it is done."""
OPEN = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
)
"""Need no token: whether the daemon is well, and the names of its methods."""

ROLES: Mapping[Role, frozenset[str]] = {
    "viewer": READS,
    "operator": READS | MUTATING,
    "admin": READS | MUTATING | AGENT,
    "agent": AGENT,
}


class Groups:
    """The groups that give roles, by number. Immutable."""

    def __init__(
        self, *, viewer: frozenset[int] = frozenset(), operator: frozenset[int] = frozenset(), admin: frozenset[int] = frozenset()
    ):
        self._by_role: tuple[tuple[Role, frozenset[int]], ...] = (("admin", admin), ("operator", operator), ("viewer", viewer))
        self.all = viewer | operator | admin

    def role(self, caller: Caller, socket: Socket) -> Role | None:
        """The highest role; root is always admin. On the agent's socket everybody is an agent, root too."""
        if socket == "agent":
            return "agent"
        if caller.uid == 0:
            return "admin"
        return next((role for role, gids in self._by_role if gids.intersection(caller.gids)), None)


def needed(method: str) -> str:
    """The least role that may call a method, for messages."""
    return next((role for role in ("viewer", "operator", "agent", "admin") if method in ROLES[role]), "no")
