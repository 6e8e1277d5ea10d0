"""Tokens by real sockets and real processes, roles by the proto's own list of methods, and what an agent may say and hear."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from singularityd.api.audit import Audit
from singularityd.api.client import Client
from singularityd.api.identity import peer, roles
from singularityd.api.identity.access import Access
from singularityd.api.identity.caller import Caller
from singularityd.api.identity.fetch import METADATA, fetch
from singularityd.api.identity.roles import Groups
from singularityd.api.server import ApiServer
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import NotAllowed, Unauthenticated
from singularityd.ranks.registry import ProcessFacts

from .host import Host, Stubs, failure_of, make

VIEWERS, OPERATORS, ADMINS = 61001, 61002, 61003
ALICE = 61000
GROUPS = Groups(viewer=frozenset({VIEWERS}), operator=frozenset({OPERATORS}), admin=frozenset({ADMINS}))
INJECT = pb.InjectRequest(rank=3, pattern="timeout", duration="5s", reason="drill")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user id")


class Known(Host):
    """A host whose API asks who calls."""

    access: Access
    audit: Audit
    skip: float = 0.0

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "audit.jsonl").read_text().splitlines()]


@asynccontextmanager
async def known(directory: Path, groups: Groups | None = GROUPS, audit: Path | None = None) -> AsyncIterator[Known]:
    for parent in (directory, *directory.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    plain = make(directory)
    host = Known(directory, plain.registry, plain.bus, plain.faults)
    host.access = Access(groups, clock=lambda: asyncio.get_running_loop().time() + host.skip)
    host.audit = Audit(audit or directory / "audit.jsonl")
    host.api = ApiServer(directory, _replaced(host))
    for rank in range(4):
        host.add_rank(rank)
    await host.api.start()
    try:
        yield host
    finally:
        await host.api.stop(0.1)
        host.audit.close()


def _replaced(host: Known) -> Any:
    import dataclasses

    return dataclasses.replace(host.ports(), access=host.access, audit=host.audit)


def child(action: Callable[[], Any], *, uid: int = 0, gid: int = 0, gids: tuple[int, ...] = ()) -> Any:
    """What the action answers in another process of another user, started fresh by fork; JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(list(gids))
            os.setgid(gid)
            os.setuid(uid)
            said: Any = action()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps([os.getpid(), said]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        said = json.load(answers)
    os.waitpid(pid, 0)
    return said


def proven(token: str) -> tuple[tuple[str, str], ...]:
    return ((METADATA, token),)


async def take(path: str) -> str:
    return await asyncio.to_thread(fetch, path, 5.0)


async def refusal(stubs: Stubs, token: str) -> tuple[grpc.StatusCode, str, str]:
    status, trailing, text = await failure_of(stubs.node.Version(pb.VersionRequest(), metadata=proven(token)))
    return status, str(trailing["singularity-code"]), text


# Tokens


async def test_the_journal_names_the_proven_caller(tmp_path: Path) -> None:
    async with known(tmp_path) as host:
        with Client(host.control) as client:
            fault = await asyncio.to_thread(
                lambda: client.inject(rank=3, pattern="timeout", options={}, duration="5s"),
            )
    assert fault.who == f"root (uid 0, pid {os.getpid()})"


async def test_a_token_opens_one_call(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        token = await take(host.control)
        assert (await stubs.node.Version(pb.VersionRequest(), metadata=proven(token))).version
        status, code, text = await refusal(stubs, token)
        assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
        assert "used before" in text


@pytest.mark.parametrize("place", range(0, 300, 23))
async def test_a_forged_token_is_refused(tmp_path: Path, place: int) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        token = await take(host.control)
        place %= len(token)
        other = "A" if token[place] != "A" else "B"
        status, _, text = await refusal(stubs, token[:place] + other + token[place + 1 :])
        assert status is grpc.StatusCode.UNAUTHENTICATED
        assert "forged" in text


@pytest.mark.parametrize("token", ["", "x", ".", "a.b", "." * 4000, "é".encode().hex()])
async def test_what_is_no_token_is_refused(tmp_path: Path, token: str) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        assert (await refusal(stubs, token))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_no_token_is_refused_where_groups_have_roles(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        status, _, text = await failure_of(stubs.node.Version(pb.VersionRequest()))
        assert status is grpc.StatusCode.UNAUTHENTICATED
        assert "takes a token" in text


async def test_a_token_of_an_earlier_daemon_is_refused(tmp_path: Path) -> None:
    async with known(tmp_path) as host:
        token = await take(host.control)
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        assert "started again" in (await refusal(stubs, token))[2]


async def test_an_expired_token_is_refused(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        early, late = await take(host.control), await take(host.control)
        host.skip = 59.0
        await stubs.node.Version(pb.VersionRequest(), metadata=proven(early))
        host.skip = 61.0
        assert "expired" in (await refusal(stubs, late))[2]


async def test_a_token_for_the_other_socket_is_refused(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        assert "for agent.sock" in (await refusal(stubs, await take(host.agent)))[2]


async def test_the_token_of_a_process_that_ended_is_refused(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.control) as stubs:
        pid, token = await asyncio.to_thread(child, lambda: fetch(host.control, 5.0))
        status, _, text = await refusal(stubs, token)
        assert status is grpc.StatusCode.UNAUTHENTICATED
        assert f"process {pid}" in text
        assert "has ended" in text


def test_a_pid_that_was_used_again_is_refused(tmp_path: Path) -> None:
    """The pidfd of a living process, and a /proc that gives its number to a later one."""
    (tmp_path / "1000").mkdir()
    numbers = tmp_path / "1000" / "stat"
    numbers.write_text("1000 (a b) c) S " + "0 " * 18 + "77 0\n")
    access = Access(GROUPS, proc=tmp_path)
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        tokens = [access.give(os.pidfd_open(sleeper.pid), pid=1000, uid=0, gids=(), name="", socket="control") for _ in range(2)]
        assert access.caller(tokens[0], "control").start_time == 77
        numbers.write_text("1000 (a b) c) S " + "0 " * 18 + "78 0\n")
        with pytest.raises(Unauthenticated, match="used again"):
            access.caller(tokens[1], "control")
    finally:
        sleeper.communicate(b"\n")
        access.close()


async def test_pidfds_of_the_dead_are_let_go(tmp_path: Path) -> None:
    pins = peer.Pins(Path("/proc"), most=4, most_of_user=2, clock=lambda: 0.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
            pins.pin(os.pidfd_open(one.pid), one.pid, 1000, until=60.0)
            one.communicate(b"\n")
    assert len(pins) <= 2
    pins.close()
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_idle_clients_of_the_mint_keep_nobody_else_out(tmp_path: Path) -> None:
    async with known(tmp_path) as host:
        idle = []
        for _ in range(200):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect_ex(str(tmp_path / "token.sock"))
            idle.append(one)
        if os.geteuid() == 0:
            _, token = await asyncio.to_thread(child, lambda: fetch(host.agent, 5.0), uid=ALICE, gid=ALICE)
            assert token.count(".") == 1
        for one in idle:
            one.close()


# Roles


@as_root
@pytest.mark.parametrize(
    ("gids", "reads", "injects"),
    [
        ((), "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ((VIEWERS,), "OK", "PERMISSION_DENIED"),
        ((VIEWERS, OPERATORS), "OK", "OK"),
        ((ADMINS,), "OK", "OK"),
    ],
)
async def test_groups_give_roles_to_other_users(tmp_path: Path, gids: tuple[int, ...], reads: str, injects: str) -> None:
    script = (
        "import os,sys,json; from singularityd.api.client import Client\n"
        "from singularityd.errors import SingularityError\n"
        f"os.setgroups({list(gids)}); os.setgid({ALICE}); os.setuid({ALICE})\n"
        "def said(call):\n"
        "    try: call(); return 'OK'\n"
        "    except SingularityError as error: return error.status\n"
        "with Client(sys.argv[1]) as client:\n"
        "    print(json.dumps([os.getpid(), said(client.status), said(lambda: client.inject(rank=3, pattern='timeout', options={}))]))\n"
    )
    async with known(tmp_path) as host:
        run = await asyncio.create_subprocess_exec(sys.executable, "-c", script, host.control, stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(run.communicate(), 60)
        pid, read, injected = json.loads(out)
        assert (read, injected) == (reads, injects)
        assert [who for _, who in host.faults.asked] == ([f"uid {ALICE}, pid {pid}"] if injects == "OK" else [])
        refused = [line for line in host.lines() if line["decision"] == "refused"]
        assert len(refused) == [reads, injects].count("PERMISSION_DENIED")
        assert all((line["uid"], line["pid"]) == (ALICE, pid) for line in refused)


METHODS = {f"/{service.full_name}/{method.name}" for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods}
OF = {
    "viewer": {method for method in METHODS if method not in roles.MUTATING and "/singularity.node.v1.Agent/" not in method},
    "agent": {method for method in METHODS if "/singularity.node.v1.Agent/" in method},
}


def test_the_table_names_every_method_of_the_proto_and_no_other() -> None:
    assert {
        f"/singularity.node.v1.Faults/{name}" for name in ("Inject", "InjectMany", "Clear", "StartCampaign", "StopCampaign")
    } == roles.MUTATING
    assert roles.ROLES["viewer"] == OF["viewer"]
    assert roles.ROLES["operator"] == OF["viewer"] | roles.MUTATING
    assert roles.ROLES["admin"] == METHODS
    assert roles.ROLES["agent"] == OF["agent"]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize(
    ("role", "uid", "gids", "opened"),
    [
        ("none", ALICE, (), "control"),
        ("viewer", ALICE, (VIEWERS,), "control"),
        ("operator", ALICE, (OPERATORS, VIEWERS), "control"),
        ("admin", ALICE, (ADMINS,), "control"),
        ("admin", 0, (), "control"),
        ("agent", ALICE, (ADMINS,), "agent"),
        ("agent", 0, (), "agent"),
    ],
)
def test_each_role_and_method(method: str, role: str, uid: int, gids: tuple[int, ...], opened: roles.Socket) -> None:
    access = Access(GROUPS)
    caller = Caller(uid, gids, 1, 1)
    if role != "none" and method in roles.ROLES[role]:  # type: ignore[index]
        assert access.allow(caller, method, opened) == role
    else:
        with pytest.raises(NotAllowed, match=f"uid {uid}"):
            access.allow(caller, method, opened)


@pytest.mark.parametrize(("groups", "mode"), [(GROUPS, 0o666), (None, 0o600)])
async def test_control_is_open_only_where_groups_have_roles(tmp_path: Path, groups: Groups | None, mode: int) -> None:
    async with known(tmp_path, groups) as host:
        assert stat.S_IMODE(os.stat(host.control).st_mode) == mode
        assert stat.S_IMODE(os.stat(tmp_path / "token.sock").st_mode) == 0o666


async def test_without_groups_root_needs_no_token(tmp_path: Path) -> None:
    async with known(tmp_path, None) as host, Stubs(host.control) as stubs:
        assert (await stubs.faults.Inject(INJECT)).who == "control socket"
        assert [line["who"] for line in host.lines()] == ["control socket"] * 2


# Agents


def own_start() -> int:
    started = peer.start_time(Path("/proc"), os.getpid())
    assert started is not None
    return started


async def test_an_agent_registers_itself_and_nobody_else(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.agent) as stubs:
        host.seen[os.getpid()] = own_start()
        claim = {"rank": 2, "world": 4, "job": "mine"}
        own = pb.RegisterRequest(pid=os.getpid(), start_time_ticks=own_start(), **claim)
        reply = await stubs.agent.Register(own, metadata=proven(await take(host.agent)))
        assert (reply.accepted, reply.rank.pid) == (True, os.getpid())
        other = pb.RegisterRequest(pid=4203, start_time_ticks=9203, **claim)
        status, trailing, text = await failure_of(stubs.agent.Register(other, metadata=proven(await take(host.agent))))
        assert (status, trailing["singularity-code"]) == (grpc.StatusCode.PERMISSION_DENIED, "not_allowed")
        assert f"process {os.getpid()} speaks for process 4203" in text
        report = pb.ReportRequest(pid=4203, start_time_ticks=9203, kind="round")
        assert (await failure_of(stubs.agent.Report(report, metadata=proven(await take(host.agent)))))[0] is status
        assert (await failure_of(stubs.agent.Register(own)))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_claim_that_the_environment_contradicts_is_not_believed(tmp_path: Path) -> None:
    async with known(tmp_path) as host, Stubs(host.agent) as stubs:
        environ = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
        host.registry.observe_process(
            ProcessFacts(
                pid=os.getpid(), start_time=own_start(), parent=1, uid=0, name="python3", namespace_pids=(os.getpid(),), environ=environ
            )
        )
        request = pb.RegisterRequest(pid=os.getpid(), start_time_ticks=own_start(), rank=2, world=4)
        reply = await stubs.agent.Register(request, metadata=proven(await take(host.agent)))
        assert (reply.accepted, reply.rank.rank) == (False, 1)
        assert reply.why


async def test_an_agent_hears_only_of_its_own_users_processes(tmp_path: Path) -> None:
    """Two users give their jobs one name; 4203 is uid 1000's, 4300 is ours."""
    async with known(tmp_path) as host, Stubs(host.agent) as stubs:
        for pid, start, uid in ((os.getpid(), own_start(), os.getuid()), (4300, 9300, os.getuid()), (4203, 9203, 1000)):
            environ = {"RANK": str(pid % 4), "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "same"}
            facts = ProcessFacts(pid=pid, start_time=start, parent=1, uid=uid, name="p", namespace_pids=(pid,), environ=environ)
            host.registry.observe_process(facts)
        rank = host.registry.by_pid(os.getpid())
        assert rank is not None
        request = pb.WatchRequest(pid=os.getpid(), start_time_ticks=own_start())
        stream = stubs.agent.Watch(request, metadata=proven(await take(host.agent)))
        await stream.initial_metadata()
        host.publish("rank_dying", job=rank.job, pid=4203, text="theirs")
        host.publish("rank_dying", job=rank.job, pid=4300, text="ours")
        event = await asyncio.wait_for(stream.read(), 10)
        assert event.text == "ours"
        stream.cancel()
