"""Who may make this call, and the trail it leaves. Used by the guard of one socket; loop thread only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import structlog

from singularityd.api.audit import Audit
from singularityd.api.identity import roles
from singularityd.api.identity.access import Access, anonymous
from singularityd.api.identity.caller import CALLER, ROLE, Caller, Role
from singularityd.api.identity.fetch import METADATA
from singularityd.api.identity.roles import Socket
from singularityd.errors import AuditUnavailable, NotAllowed, SingularityError, Unauthenticated

WHO = "control socket"
"""A caller without a token on a socket that its permissions keep for root."""
_OBJECT = ("id", "job", "rank", "ranks", "pattern", "duration", "reason")
"""Fields of requests that say what a call is about."""


class Admitted(NamedTuple):
    """A caller that may make the call."""

    caller: Caller | None
    role: str


class Admission:
    """Of one socket."""

    def __init__(self, socket: Socket, access: Access, audit: Audit) -> None:
        self._socket: Socket = socket
        self._access = access
        self._audit = audit
        self._log = structlog.get_logger("api")

    async def enter(self, method: str, request: Any, metadata: Any) -> Admitted:
        """The caller, who is then `CALLER` too. Raises Unauthenticated and NotAllowed, which are in the audit then."""
        CALLER.set(None)
        if method in roles.OPEN:
            return Admitted(None, "")
        caller: Caller | None = None
        try:
            caller = self._caller(metadata)
            role: Role = self._access.allow(caller, method, self._socket) if caller else "admin"
        except (Unauthenticated, NotAllowed) as error:
            await self._audit.refused(_record(method, request, caller, "", decision="refused", outcome=f"{error.code}: {error.text}"))
            raise
        CALLER.set(caller)
        ROLE.set(role)
        return Admitted(caller, role)

    async def audited(self, method: str, request: Any, admitted: Admitted, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make the call; one that changes something only when that is on disk. Raises AuditUnavailable, and what the call raises."""
        if method not in roles.MUTATING:
            return await call()

        async def tell(decision: str, outcome: str) -> None:
            await self._audit.write(_record(method, request, *admitted, decision=decision, outcome=outcome))

        try:
            await tell("allowed", "begun")
        except AuditUnavailable as error:
            if method not in roles.ENDING:
                raise
            self._log.error("a fault is cleared without a line in the audit", error=error.text)  # a rank must always be let go
        try:
            answer = await call()
        except BaseException as error:
            await self._afterwards(tell(*_failed(error)))
            raise
        await self._afterwards(tell("allowed", f"done: {_said(answer)}"))
        return answer

    async def _afterwards(self, telling: Awaitable[None]) -> None:
        """What is done is done: a line that cannot follow it changes nothing for the caller."""
        try:
            await telling
        except AuditUnavailable as error:
            self._log.error("the outcome of a call is not in the audit", error=error.text)

    def _caller(self, metadata: Any) -> Caller | None:
        token = next((value for key, value in metadata or () if key == METADATA), None)
        if token is not None:
            return self._access.caller(token if isinstance(token, str) else "", self._socket)
        if self._socket == "control" and not self._access.open_control:
            return None  # the socket is 0600: whoever is here was let in by the kernel
        raise anonymous(self._socket)


def _failed(error: BaseException) -> tuple[str, str]:
    if isinstance(error, asyncio.CancelledError):
        return "allowed", "given up by the caller, or took too long"
    if isinstance(error, SingularityError):
        return ("refused" if error.status != "INTERNAL" else "allowed"), f"{error.code}: {error.text}"
    return "allowed", f"failed: {type(error).__name__}"


def _said(answer: Any) -> str:
    faults = getattr(answer, "faults", [answer])
    return ", ".join(fault.id or "nothing armed" for fault in faults) or "no fault"


def _record(method: str, request: Any, caller: Caller | None, role: str, *, decision: str, outcome: str) -> Mapping[str, Any]:
    who = {"who": str(caller), "uid": caller.uid, "pid": caller.pid, "exe": caller.exe, "cgroup": caller.cgroup} if caller else {"who": WHO}
    return {
        **(who if caller or role else {"who": "unknown"}),
        "role": role,
        "method": method.rpartition(".")[2].replace("/", "."),
        "object": _about(request),
        "dry_run": bool(getattr(request, "dry_run", False)),
        "decision": decision,
        "outcome": outcome,
    }


def _about(request: Any) -> str:
    """The set fields that name what is asked about, the options of a fault among them."""
    fields = {field.name: value for field, value in request.ListFields()} if hasattr(request, "ListFields") else {}
    options = [f"{key}={value}" for key, value in sorted(dict(fields.get("options", {})).items())]
    return " ".join([*(f"{name}={fields[name]}" for name in _OBJECT if name in fields), *options])
