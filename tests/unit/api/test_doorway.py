"""The sockets themselves: permissions at every moment, stale and living ones, what is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from singularityd.api.doorway import Doorway
from singularityd.api.server import ApiServer
from singularityd.api.v1 import node_pb2 as pb
from singularityd.errors import AddressInUse, AlreadyRunning, ConfigError, NotPermitted

from .host import Stubs, make, serving

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user id")


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
async def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with serving(tmp_path):
            assert modes(tmp_path) == {"control.sock": 0o600, "agent.sock": 0o666}
    finally:
        os.umask(before)
    assert modes(tmp_path) == {}


async def test_at_no_moment_is_there_a_socket_with_other_permissions(tmp_path: Path) -> None:
    """A watcher looks as fast as it can while servers start; whatever it can see by a name has its mode, and private ones are 0700."""
    seen: set[tuple[str, int]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for entry in os.scandir(tmp_path):
                try:
                    mode = stat.S_IMODE(entry.stat().st_mode)
                except FileNotFoundError:
                    continue
                seen.add((entry.name if entry.name.endswith(".sock") else "private", mode))

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = os.umask(0)
    try:
        for _ in range(10):
            async with serving(tmp_path):
                await asyncio.sleep(0.002)
    finally:
        os.umask(before)
        done.set()
        watcher.join()
    assert seen <= {("control.sock", 0o600), ("agent.sock", 0o666), ("private", 0o700)}
    assert {("control.sock", 0o600), ("agent.sock", 0o666)} <= seen


def in_child(action: Callable[[], object]) -> str:
    """What the action answers or raises, run as another user in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = str(action())
        except BaseException as error:
            said = type(error).__name__
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        said = answers.read()
    os.waitpid(child, 0)
    return said


def connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    return "connected"


@as_root
async def test_another_user_opens_the_agents_socket_and_not_the_administrators(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent != Path("/tmp"):
            parent.chmod(0o755)
    async with serving(tmp_path) as host:
        assert await asyncio.to_thread(in_child, lambda: connect(host.agent)) == "connected"
        assert await asyncio.to_thread(in_child, lambda: connect(host.control)) == "PermissionError"
        assert await asyncio.to_thread(in_child, lambda: os.unlink(host.agent)) == "PermissionError"


async def test_what_a_dead_daemon_left_is_replaced(tmp_path: Path) -> None:
    for name in ("control.sock", "agent.sock"):
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(tmp_path / name))
        left.close()
    async with serving(tmp_path) as host, Stubs(host.control) as stubs:
        await stubs.node.Version(pb.VersionRequest())


async def test_what_a_daemon_that_was_killed_while_it_started_left_is_cleared(tmp_path: Path) -> None:
    Doorway(tmp_path / "control.sock", 0o600).prepare()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / ".control" / "s"))
    left.close()
    async with serving(tmp_path):
        assert set(modes(tmp_path)) == {"control.sock", "agent.sock"}


async def test_a_living_daemon_is_not_replaced(tmp_path: Path) -> None:
    async with serving(tmp_path) as host:
        second = ApiServer(tmp_path, make(tmp_path).ports())
        with pytest.raises(AlreadyRunning, match=r"control\.sock") as refused:
            await second.start()
        assert refused.value.hint
        await second.stop()
        assert set(modes(tmp_path)) == {"control.sock", "agent.sock"}
        async with Stubs(host.control) as stubs:
            await stubs.node.Version(pb.VersionRequest())


async def test_a_living_agent_socket_alone_is_not_replaced_either_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "agent.sock"))
        other.listen(0)
        with pytest.raises(AlreadyRunning):
            await ApiServer(tmp_path, make(tmp_path).ports()).start()
        assert list(modes(tmp_path)) == ["agent.sock"]


async def test_a_socket_with_a_full_backlog_lives(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(0)
        waiting = []
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(str(path))
            waiting.append(client)
        with pytest.raises(AlreadyRunning):
            Doorway(path, 0o600).prepare()
        for client in waiting:
            client.close()


async def test_a_file_in_the_way_is_not_destroyed(tmp_path: Path) -> None:
    (tmp_path / "control.sock").write_text("precious")
    with pytest.raises(AddressInUse, match="no socket"):
        await ApiServer(tmp_path, make(tmp_path).ports()).start()
    assert (tmp_path / "control.sock").read_text() == "precious"


async def test_a_path_that_is_too_long_and_a_directory_that_is_not_there_are_said(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        await ApiServer(deep, make(deep).ports()).start()
    with pytest.raises(NotPermitted, match="cannot be made: No such file"):
        await ApiServer(tmp_path / "no", make(tmp_path).ports()).start()


async def test_odd_characters_in_the_path(tmp_path: Path) -> None:
    odd = tmp_path / "a b%41é"
    odd.mkdir()
    async with serving(odd):
        assert set(modes(odd)) == {"control.sock", "agent.sock"}
        assert connect(str(odd / "control.sock")) == "connected"


async def test_stopping_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    first = ApiServer(tmp_path, make(tmp_path).ports())
    await first.start()
    for name in ("control.sock", "agent.sock"):
        (tmp_path / name).unlink()
    async with serving(tmp_path) as host:
        await first.stop()
        async with Stubs(host.control) as stubs:
            await stubs.node.Version(pb.VersionRequest())
