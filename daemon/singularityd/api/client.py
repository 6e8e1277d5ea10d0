"""The thin synchronous client of the node API: singularityctl's. Import it on use: grpc takes most of a command's start-up time.

Methods return messages and raise SingularityError subclasses only: the daemon's own, as it raised them; Unreachable, which says that
nothing was asked; and Failed for a daemon that was asked and did not answer in time.
"""

from __future__ import annotations

import os
import socket as sockets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Required, TypedDict, TypeVar, Unpack
from urllib.parse import quote

# Both are read when grpc is loaded. A command forks nothing, and what grpc's core has to say is said better below.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from singularityd.api import failure
from singularityd.api.identity.fetch import METADATA, fetch
from singularityd.api.v1 import node_pb2 as pb
from singularityd.api.v1 import node_pb2_grpc
from singularityd.errors import Busy, Failed, SingularityError

START = "is singularityd running? systemctl status singularityd, or start .venv/bin/singularityd as root"
LARGEST_ANSWER = 4 << 20
_STATE_PATIENCE = 0.25
"""Seconds for grpc's own thread to tell the state of the channel."""

_TOKEN_PATIENCE = 2.0
"""Seconds for a token."""

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", LARGEST_ANSWER),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.enable_retries", 0),
)

Answer = TypeVar("Answer")


class Unreachable(SingularityError):
    """Raised when no daemon answers on the socket, or the socket may not be used."""

    code, status, exit_code = "unreachable", "UNAVAILABLE", 4


def default_socket() -> str:
    """control.sock in $SINGULARITYD_RUNTIME_DIR or /run/singularityd."""
    return os.path.join(os.environ.get("SINGULARITYD_RUNTIME_DIR") or "/run/singularityd", "control.sock")


class _Prover(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Gives each call a token of this process: one opens one call."""

    def __init__(self, socket: str, timeout: float) -> None:
        self._socket = socket
        self._timeout = timeout

    def _proven(self, details: Any) -> Any:
        token = fetch(self._socket, min(self._timeout, _TOKEN_PATIENCE))
        return details._replace(metadata=[*(details.metadata or ()), (METADATA, token)]) if token else details

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Called by grpc."""
        return continuation(self._proven(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Called by grpc."""
        return continuation(self._proven(client_call_details), request)


class FaultWords(TypedDict, total=False):
    """What a request for a fault says beside its ranks; the daemon judges the words."""

    pattern: Required[str]
    options: Required[Mapping[str, str]]
    job: str
    """Empty: the host's only job."""
    duration: str
    reason: str
    dry_run: bool
    may_kill_job: bool


class Client:
    """One connection, made on the first call. One thread at a time; use it in a `with` statement."""

    def __init__(self, socket: str, timeout: float = 10.0) -> None:
        """`timeout`: seconds for each answer, and for the beginning of a stream."""
        self._socket = os.path.abspath(socket)
        self._timeout = timeout
        self._channel = grpc.insecure_channel(f"unix:{quote(self._socket)}", options=_OPTIONS)
        known = grpc.intercept_channel(self._channel, _Prover(self._socket, timeout))
        self._node = node_pb2_grpc.NodeStub(known)
        self._ranks = node_pb2_grpc.RanksStub(known)
        self._faults = node_pb2_grpc.FaultsStub(known)
        self._events = node_pb2_grpc.EventsStub(known)
        self._doctor = node_pb2_grpc.DoctorStub(known)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def status(self) -> pb.StatusReply:
        """How the daemon is, what it watches and disturbs."""
        return self._ask(lambda: self._node.Status(pb.StatusRequest(), timeout=self._timeout))

    def version(self) -> pb.VersionReply:
        """The daemon's versions."""
        return self._ask(lambda: self._node.Version(pb.VersionRequest(), timeout=self._timeout))

    def ranks(self, job: str = "") -> pb.ListRanksReply:
        """The ranks of this host, or of one job."""
        return self._ask(lambda: self._ranks.List(pb.ListRanksRequest(job=job), timeout=self._timeout))

    def top(self, job: str = "") -> pb.TopReply:
        """The kernel's counters now."""
        return self._ask(lambda: self._ranks.Top(pb.TopRequest(job=job), timeout=self._timeout))

    def inject(self, *, rank: int | None, **words: Unpack[FaultWords]) -> pb.Fault:
        """Arm a fault, or say what would be armed."""
        request = pb.InjectRequest(rank=rank, **words)
        return self._ask(
            lambda: self._faults.Inject(request, timeout=self._timeout), late="singularityctl faults shows whether it was armed"
        )

    def inject_many(self, *, ranks: str, **words: Unpack[FaultWords]) -> pb.ListFaultsReply:
        """Arm the same on several ranks (`1,3`, `0-2`, `all`, `random:2`): on all of them, or on none."""
        request = pb.InjectRequest(ranks=ranks, **words)
        return self._ask(lambda: self._faults.InjectMany(request, timeout=self._timeout), late="singularityctl faults shows what was armed")

    def clear(self, fault: str) -> pb.ListFaultsReply:
        """End one fault, or `all`."""
        return self._ask(lambda: self._faults.Clear(pb.ClearRequest(id=fault), timeout=self._timeout))

    def faults(self, history: bool = False, limit: int = 100) -> pb.ListFaultsReply:
        """Those armed, or the newest of the journal."""
        return self._ask(lambda: self._faults.List(pb.ListFaultsRequest(history=history, limit=limit), timeout=self._timeout))

    def fault(self, fault: str) -> pb.Fault:
        """One fault."""
        return self._ask(lambda: self._faults.Get(pb.GetFaultRequest(id=fault), timeout=self._timeout))

    def wait(self, fault: str, timeout: float) -> pb.Fault:
        """The fault when it has ended. Raises Failed when that takes more than `timeout` seconds."""
        try:
            return self._faults.Wait(pb.GetFaultRequest(id=fault), timeout=timeout)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and _from_daemon(error) is None:
                text = f"{fault} has not ended after {timeout:g} s"
                raise Failed(text, hint=f"singularityctl status says what is not well; singularityctl clear {fault} ends it") from None
            raise self._translated(error) from None

    def patterns(self) -> pb.ListPatternsReply:
        """What can be armed."""
        return self._ask(lambda: self._faults.ListPatterns(pb.ListPatternsRequest(), timeout=self._timeout))

    def start_campaign(self, toml: str, *, dry_run: bool = False) -> pb.Campaign:
        """Begin the campaign of a file's text, or only plan it."""
        request = pb.StartCampaignRequest(toml=toml, dry_run=dry_run)
        return self._ask(
            lambda: self._faults.StartCampaign(request, timeout=self._timeout), late="singularityctl drill list shows whether it began"
        )

    def stop_campaign(self, campaign: str) -> pb.Campaign:
        """End it now, with its faults."""
        return self._ask(lambda: self._faults.StopCampaign(pb.StopCampaignRequest(id=campaign), timeout=self._timeout))

    def campaign(self, campaign: str, *, report: bool = False) -> pb.Campaign:
        """One campaign, with its report where asked."""
        return self._ask(lambda: self._faults.GetCampaign(pb.GetCampaignRequest(id=campaign, report=report), timeout=self._timeout))

    def campaigns(self, limit: int = 100) -> pb.ListCampaignsReply:
        """The newest, newest first."""
        return self._ask(lambda: self._faults.ListCampaigns(pb.ListCampaignsRequest(limit=limit), timeout=self._timeout))

    def record_campaign(self, *, campaign: str = "", since: float = 0.0) -> pb.RecordCampaignReply:
        """A campaign file of what was armed."""
        request = pb.RecordCampaignRequest(campaign=campaign, since=since)
        return self._ask(lambda: self._faults.RecordCampaign(request, timeout=self._timeout))

    def doctor(self) -> pb.CheckReply:
        """What this host permits."""
        return self._ask(lambda: self._doctor.Check(pb.CheckRequest(), timeout=self._timeout))

    def follow(
        self, *, token: str = "", kinds: Iterable[str] = (), from_start: bool = False, no_follow: bool = False
    ) -> Iterator[pb.Event]:
        """Everything after the token, then what comes; for ever, unless `no_follow`."""
        stream = self._events.Follow(pb.FollowRequest(token=token, kinds=list(kinds), from_start=from_start, no_follow=no_follow))
        try:
            self._await_beginning(stream)
            while (event := self._ask(lambda: next(stream, None))) is not None:
                yield event
        finally:
            stream.cancel()

    def _await_beginning(self, stream: Any) -> None:
        """A stream has no deadline, so its headers have one: a daemon that hangs must not hang its caller."""
        began = threading.Event()
        watch = threading.Timer(self._timeout, lambda: began.is_set() or stream.cancel())
        watch.daemon = True
        watch.start()
        try:
            stream.initial_metadata()
            began.set()
            if stream.cancelled():
                raise self._silent("")
        finally:
            watch.cancel()

    def _ask(self, call: Callable[[], Answer], *, late: str = "") -> Answer:
        try:
            return call()
        except grpc.RpcError as error:
            raise self._translated(error, late) from None

    def _translated(self, error: Any, late: str = "") -> SingularityError:
        """The daemon's own error; else what kept the daemon from answering."""
        if (raised := _from_daemon(error)) is not None:
            return raised
        status, details = error.code(), error.details() or ""
        match status:
            case grpc.StatusCode.UNAVAILABLE:
                return unreachable(self._socket)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return self._silent(late)
            case grpc.StatusCode.CANCELLED:
                return Unreachable(
                    f"the daemon on {self._socket} ended the call", hint="it is being stopped; see systemctl status singularityd"
                )
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return Busy(details, hint="ask for less, or less often")
            case grpc.StatusCode.UNIMPLEMENTED:
                return Failed("the daemon does not know this request", hint="singularityctl version compares the versions of both")
        return Failed(f"{status.name.lower().replace('_', ' ')}: {details}", hint="the daemon's log may say more")

    def _silent(self, late: str) -> SingularityError:
        """A daemon that took the request may have done it, so that is Failed; one that never spoke at all has not."""
        text = f"no answer on {self._socket} within {self._timeout:g} s"
        if self._connected():
            return Failed(text, hint=late or "the daemon is busy: see systemctl status singularityd, or raise --timeout")
        return Unreachable(text, hint="it is busy, stopped or not singularityd: see systemctl status singularityd, or raise --timeout")

    def _connected(self) -> bool:
        """Whether the other side speaks HTTP/2: the channel tells its state at once where it has one."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_STATE_PATIENCE)
        except grpc.FutureTimeoutError:
            return False
        return True


def _from_daemon(error: Any) -> SingularityError | None:
    """The error that the daemon raised; None where the status is grpc's own."""
    return failure.received(error.code().name, error.details() or "", error.trailing_metadata() or ())


def unreachable(path: str) -> Unreachable:
    """Why nothing answers on a socket, learned by opening it."""
    try:
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except PermissionError:
        return Unreachable(
            f"permission denied on {path}", hint="only root may ask the daemon, unless its socket is given to others: use sudo"
        )
    except FileNotFoundError:
        return Unreachable(f"no daemon is here: {path} does not exist", hint=START)
    except ConnectionRefusedError:
        return Unreachable(f"no daemon listens on {path}", hint=START)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        return Unreachable(f"{path} cannot be opened: {why}", hint=START)
    return Unreachable(
        f"what listens on {path} broke the connection", hint="it is starting, stopping or not singularityd: try again, then " + START
    )
