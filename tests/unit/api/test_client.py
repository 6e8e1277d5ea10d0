"""The synchronous client against real servers, and against everything that is none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from singularityd.api.client import Client, Unreachable, default_socket, unreachable
from singularityd.api.limits import Limits
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import AlreadyArmed, BadOption, Busy, Failed, NoSuchFault, NoSuchRank, ResumeLost, SingularityError, TookTooLong

from .host import JOB, Host, serving
from .test_doorway import as_root, in_child
from .test_failure import every


async def ask(host: Host, action: Any, timeout: float = 10.0) -> Any:
    def run() -> Any:
        with Client(host.control, timeout) as client:
            return action(client)

    return await asyncio.to_thread(run)


async def test_every_method_asks_and_answers(host: Host) -> None:
    def all_of_them(client: Client) -> None:
        assert client.status().ranks == 4
        assert client.version().api == "singularity.node.v1"
        assert len(client.ranks().ranks) == len(client.ranks(JOB).ranks) == 4
        assert client.top().at > 0
        assert client.inject(rank=3, pattern="timeout", options={}, dry_run=True).id == ""
        fault = client.inject(rank=3, pattern="timeout", options={"ms": "5"}, job=JOB, duration="1s", reason="why")
        assert (fault.milliseconds, fault.duration_seconds, fault.reason) == (5, 1, "why")
        assert client.fault(fault.id) == fault
        assert [one.id for one in client.faults().faults] == [fault.id]
        assert [one.id for one in client.clear(fault.id).faults] == [fault.id]
        assert client.wait(fault.id, 5).state == pb.FAULT_STATE_ENDED
        assert [one.id for one in client.faults(history=True, limit=5).faults] == [fault.id]
        assert client.patterns().patterns[0].name == "timeout"
        assert client.doctor().complete

    await ask(host, all_of_them)


@pytest.mark.parametrize(
    ("call", "kind", "exit_code"),
    [
        (lambda client: client.inject(rank=7, pattern="timeout", options={}), NoSuchRank, 3),
        (lambda client: client.inject(rank=3, pattern="timeout", options={"ms": "-1"}), BadOption, 2),
        (lambda client: client.fault("f99"), NoSuchFault, 3),
        (lambda client: next(client.follow(token="abc:1")), ResumeLost, 1),
    ],
)
async def test_the_daemons_errors_arrive_as_they_were_raised(host: Host, call: Any, kind: type[SingularityError], exit_code: int) -> None:
    with pytest.raises(kind) as raised:
        await ask(host, call)
    assert raised.value.exit_code == exit_code
    assert raised.value.hint
    assert raised.value.__cause__ is None


async def test_follow_passes_events_until_it_is_closed(host: Host) -> None:
    host.publish("rank_found")
    host.publish("rank_dying", text="second")

    def two(client: Client) -> list[str]:
        stream = client.follow(from_start=True)
        found = [next(stream).kind, next(stream).text]
        stream.close()
        return found

    assert await ask(host, two) == ["rank_found", "second"]
    assert await ask(host, lambda client: [event.kind for event in client.follow(from_start=True, no_follow=True)]) == [
        "rank_found",
        "rank_dying",
    ]


async def test_a_fault_that_does_not_end_is_told_with_how_to_end_it(host: Host) -> None:
    def wait(client: Client) -> None:
        client.inject(rank=3, pattern="timeout", options={})
        client.wait("f1", 0.2)

    with pytest.raises(Failed, match=r"f1 has not ended after 0\.2 s") as raised:
        await ask(host, wait)
    assert raised.value.exit_code == 1
    assert "clear f1" in raised.value.hint


async def test_a_wait_that_the_server_ends_is_told_with_the_servers_time(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(longest_wait=0.2)) as host:
        host.add_rank(3)

        def wait(client: Client) -> None:
            client.inject(rank=3, pattern="timeout", options={})
            client.wait("f1", 30)

        with pytest.raises(TookTooLong, match=r"0\.2 s"):
            await ask(host, wait)


@pytest.mark.parametrize("kind", list(every(SingularityError)), ids=lambda kind: kind.__name__)
async def test_every_error_crosses_a_real_connection(host: Host, kind: type[SingularityError]) -> None:
    host.faults.failure = kind("no rank 7: é, 中", hint="write --rank 3 · or 4")
    with pytest.raises(SingularityError) as raised:
        await ask(host, lambda client: client.inject(rank=3, pattern="timeout", options={}))
    assert type(raised.value) is kind
    assert (raised.value.text, raised.value.hint, raised.value.exit_code) == ("no rank 7: é, 中", "write --rank 3 · or 4", kind.exit_code)


async def test_a_refusal_by_rate_is_busy(tmp_path: Path) -> None:
    async with serving(tmp_path, control=Limits(rate=0.001, burst=1)) as host:
        with pytest.raises(Busy) as raised:
            await ask(host, lambda client: (client.version(), client.version()))
    assert "ask less often" in raised.value.hint


async def test_a_request_not_answered_in_time_has_failed_and_an_injection_may_be_armed(host: Host) -> None:
    """Not `unreachable`: the daemon has the request, and a script must not take it for never sent."""
    host.faults.hold = asyncio.Event()
    with pytest.raises(Failed, match=r"within 0.3 s") as raised:
        await ask(host, lambda client: client.inject(rank=3, pattern="timeout", options={}), 0.3)
    assert raised.value.exit_code == 1
    assert "singularityctl faults" in raised.value.hint


@contextlib.contextmanager
def mute(path: Path) -> Iterator[str]:
    """A socket that takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(16)
        yield str(path)


@pytest.mark.parametrize("call", [lambda client: client.status(), lambda client: next(client.follow())], ids=["status", "follow"])
def test_something_that_says_nothing_does_not_hang_its_caller(tmp_path: Path, call: Any) -> None:
    with mute(tmp_path / "s") as path, Client(path, 0.5) as client, pytest.raises(Unreachable, match="no answer on"):
        call(client)


def test_something_that_is_no_daemon_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(16)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with Client(str(path), 3) as client, pytest.raises(Unreachable) as raised:
            client.status()
        assert raised.value.exit_code == 4
        server.shutdown(socket.SHUT_RDWR)


async def test_a_daemon_that_stops_ends_the_stream_with_exit_4(tmp_path: Path) -> None:
    async with serving(tmp_path) as host:
        following = asyncio.ensure_future(ask(host, lambda client: list(client.follow())))
        while host.bus.subscribers == 0:
            await asyncio.sleep(0.01)
        await host.api.stop(0.1)
        with pytest.raises(Unreachable):
            await asyncio.wait_for(following, 10)


def test_why_nobody_answers_is_said(tmp_path: Path) -> None:
    missing = unreachable(str(tmp_path / "no.sock"))
    assert "does not exist" in missing.text
    assert "systemctl status singularityd" in missing.hint
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "left"))
    left.close()
    assert "no daemon listens on" in unreachable(str(tmp_path / "left")).text
    (tmp_path / "file").touch()
    assert unreachable(str(tmp_path / "file")).exit_code == 4
    assert "too long" in unreachable(str(tmp_path / ("x" * 200))).text


@as_root
async def test_who_may_not_ask_is_told_so(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    async with serving(tmp_path) as host:
        told = await asyncio.to_thread(in_child, lambda: (unreachable(host.control).text, unreachable(host.control).hint))
    assert "permission denied" in told
    assert "root" in told


def test_the_default_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SINGULARITYD_RUNTIME_DIR", raising=False)
    assert default_socket() == "/run/singularityd/control.sock"
    monkeypatch.setenv("SINGULARITYD_RUNTIME_DIR", "/x")
    assert default_socket() == "/x/control.sock"


async def test_a_relative_path_and_odd_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a b%41é"
    odd.mkdir()
    monkeypatch.chdir(odd)
    async with serving(odd):

        def version() -> str:
            with Client("control.sock") as client:
                return client.version().api

        assert await asyncio.to_thread(version) == "singularity.node.v1"


@pytest.fixture
async def strange(tmp_path: Path) -> AsyncIterator[str]:
    """A server whose errors are grpc's own."""

    async def answer(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "odd")
        return b""

    server = grpc.aio.server()
    handlers = {"Status": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("singularity.node.v1.Node", handlers),))
    server.add_insecure_port(f"unix:{tmp_path}/control.sock")
    await server.start()
    yield str(tmp_path / "control.sock")
    await server.stop(0)


async def test_statuses_that_are_not_the_daemons_own(strange: str) -> None:
    def call(method: str) -> Any:
        with Client(strange) as client:
            return getattr(client, method)()

    with pytest.raises(Failed, match="data loss: odd"):
        await asyncio.to_thread(call, "status")
    with pytest.raises(Failed, match="does not know") as raised:
        await asyncio.to_thread(call, "version")
    assert "singularityctl version" in raised.value.hint


def test_what_is_not_needed_is_not_loaded() -> None:
    code = "import sys, singularityd.api.client; print([n for n in sys.modules if n.partition('.')[0] in ('structlog', 'msgspec')])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=os.environ)
    assert said.stdout.strip() == "[]"


async def test_an_already_armed_rank_keeps_the_hint_with_its_odd_characters(host: Host) -> None:
    host.faults.failure = AlreadyArmed("rank 3 has ‘f1’", hint="fertig → clear\nf1")
    with pytest.raises(AlreadyArmed, match="‘f1’") as raised:
        await ask(host, lambda client: client.inject(rank=3, pattern="timeout", options={}))
    assert raised.value.hint == "fertig → clear\nf1"
