"""The thin synchronous client of the node API. grpc is imported on use: `singularityctl --help` must not wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from singularityd import errors


class Unreachable(errors.SingularityError):
    """Raised when no daemon answers on the socket."""

    code, status, exit_code = "unreachable", "UNAVAILABLE", 4


def default_socket() -> str:
    """$SINGULARITYD_RUNTIME_DIR or /run/singularityd, and control.sock in it."""
    return os.path.join(os.environ.get("SINGULARITYD_RUNTIME_DIR") or "/run/singularityd", "control.sock")


class Client:
    """One connection; methods return the messages of api.v1.node_pb2 and raise SingularityError subclasses only."""

    def __init__(self, socket: str, timeout: float = 10.0) -> None:
        self._socket = socket
        self._timeout = timeout
        self._channel: Any = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.close()

    def _stub(self, service: str) -> Any:
        import grpc

        from singularityd.api.v1 import node_pb2_grpc

        if not os.access(self._socket, os.F_OK):
            hint = "is singularityd running? systemctl status singularityd, or start .venv/bin/singularityd as root"
            raise Unreachable(f"no daemon answers: there is no socket {self._socket}", hint=hint)
        if not os.access(self._socket, os.R_OK | os.W_OK):
            raise Unreachable(f"permission denied on {self._socket}", hint="run as root")
        if self._channel is None:
            self._channel = grpc.insecure_channel(f"unix:{self._socket}")
        return getattr(node_pb2_grpc, f"{service}Stub")(self._channel)

    def _call(self, service: str, method: str, request: Any, timeout: float | None = None) -> Any:
        stub = self._stub(service)
        return self._translated(lambda: getattr(stub, method)(request, timeout=timeout or self._timeout))

    def _translated(self, call: Callable[[], Any]) -> Any:
        import grpc

        try:
            return call()
        except grpc.RpcError as error:
            raise _translate(error, self._socket) from None

    def status(self) -> Any:
        """Node.Status."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Node", "Status", pb.StatusRequest())

    def version(self) -> Any:
        """Node.Version."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Node", "Version", pb.VersionRequest())

    def ranks(self, job: str = "") -> Any:
        """Ranks.List."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Ranks", "List", pb.ListRanksRequest(job=job))

    def top(self, job: str = "") -> Any:
        """Ranks.Top."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Ranks", "Top", pb.TopRequest(job=job))

    def inject(
        self, *, rank: int | None, job: str, pattern: str, options: dict[str, str], duration: str, reason: str, dry_run: bool
    ) -> Any:
        """Faults.Inject."""
        from singularityd.api.v1 import node_pb2 as pb

        request = pb.InjectRequest(
            rank=rank, job=job, pattern=pattern, options=options, duration=duration, reason=reason, dry_run=dry_run
        )
        return self._call("Faults", "Inject", request)

    def clear(self, id: str) -> Any:
        """Faults.Clear."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Faults", "Clear", pb.ClearRequest(id=id))

    def faults(self, history: bool = False, limit: int = 100) -> Any:
        """Faults.List."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Faults", "List", pb.ListFaultsRequest(history=history, limit=limit))

    def fault(self, id: str) -> Any:
        """Faults.Get."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Faults", "Get", pb.GetFaultRequest(id=id))

    def wait(self, id: str, timeout: float) -> Any:
        """Faults.Wait."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Faults", "Wait", pb.GetFaultRequest(id=id), timeout)

    def patterns(self) -> Any:
        """Faults.ListPatterns."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Faults", "ListPatterns", pb.ListPatternsRequest())

    def doctor(self) -> Any:
        """Doctor.Check."""
        from singularityd.api.v1 import node_pb2 as pb

        return self._call("Doctor", "Check", pb.CheckRequest())

    def follow(self, *, token: str = "", kinds: Iterable[str] = (), from_start: bool = False, no_follow: bool = False) -> Iterator[Any]:
        """Events.Follow."""
        from singularityd.api.v1 import node_pb2 as pb

        request = pb.FollowRequest(token=token, kinds=list(kinds), from_start=from_start, no_follow=no_follow)
        stream = self._stub("Events").Follow(request)
        try:
            while (event := self._translated(lambda: next(stream, None))) is not None:
                yield event
        finally:
            stream.cancel()


def _translate(error: Any, socket: str) -> errors.SingularityError:
    """The error the daemon raised, found by its code in the trailing metadata."""
    metadata = dict(error.trailing_metadata() or ())
    code = metadata.get("singularity-code", "")
    hint = metadata.get("singularity-hint-bin", b"").decode("utf-8", "replace")
    for kind in _kinds(errors.SingularityError):
        if code and kind.code == code:
            return kind(error.details() or "", hint=hint)
    status = error.code().name
    if status == "UNAVAILABLE":
        return Unreachable(f"no daemon answers on {socket}", hint="is singularityd running? start .venv/bin/singularityd as root")
    if status == "DEADLINE_EXCEEDED":
        return errors.Failed("the daemon did not answer in time", hint="raise --timeout, or see singularityctl status")
    return errors.Failed(f"{status}: {error.details()}")


def _kinds(kind: type[errors.SingularityError]) -> Iterator[type[errors.SingularityError]]:
    for below in kind.__subclasses__():
        yield from _kinds(below)
    yield kind
