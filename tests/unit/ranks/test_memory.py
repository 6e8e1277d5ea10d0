"""What a restarted daemon still knows, and that losing it never hurts."""

import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from singularityd.ranks.evidence import Comm
from singularityd.ranks.memory import RankMemory
from singularityd.ranks.registry import RankRegistry
from structlog.testing import capture_logs

from .host import facts, shown

COMM = Comm("nccl", "0a1b2c3d", 2, 8)


def memory(path, boot="boot-1", **more):
    return RankMemory(path, boot, **more)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ranks.json"


def test_a_restarted_daemon_knows_the_rank_again(path):
    before = RankRegistry(memory=memory(path))
    before.observe_process(facts(50))
    before.observe_init(50, comm="0a1b2c3d", comm_rank=2, comm_size=8)
    after = RankRegistry(memory=memory(path))
    after.observe_process(facts(50))
    assert shown(after) == [(50, "nccl-0a1b2c3d", 2)]


def test_a_communicator_joined_before_its_process_was_reported_is_kept_too(path):
    before = RankRegistry(memory=memory(path))
    before.observe_init(50, comm="0a1b2c3d", comm_rank=2, comm_size=8)
    before.observe_process(facts(50))
    assert memory(path).recall(50, 50) == {COMM}


def test_another_process_with_the_pid_and_another_boot_get_nothing(path):
    memory(path).remember(50, 7, {COMM})
    assert memory(path).recall(50, 7) == {COMM}
    assert memory(path).recall(50, 8) == frozenset()
    assert memory(path, "boot-2").recall(50, 7) == frozenset()


def test_an_exited_process_is_forgotten(path):
    kept = memory(path)
    registry = RankRegistry(memory=kept)
    registry.observe_process(facts(50))
    registry.observe_init(50, comm="0a1b2c3d", comm_rank=2, comm_size=8)
    registry.observe_exit(50, 50, "")
    kept.close()
    assert memory(path).recall(50, 50) == frozenset()


def test_the_file_is_private_even_where_an_open_one_was(path):
    path.touch(0o666)
    memory(path).remember(50, 7, {COMM})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["ranks.json"]


def test_saves_are_spaced_and_the_last_is_not_lost(path):
    now = [100.0]
    kept = memory(path, pause=1.0, clock=lambda: now[0])
    kept.remember(1, 1, {COMM})
    kept.remember(2, 2, {COMM})
    assert memory(path).recall(2, 2) == frozenset()
    now[0] += 1.0
    kept.flush()
    assert memory(path).recall(2, 2) == {COMM}
    kept.remember(3, 3, {COMM})
    kept.close()
    assert memory(path).recall(3, 3) == {COMM}


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.sampled_from([b"[]", b"{}", b'{"boot_id":1}', b"[" * 100_000, b""])))
def test_a_corrupt_file_is_told_once_and_replaced(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("memory") / "ranks.json"
    path.write_bytes(data)
    with capture_logs() as log:
        kept = memory(path)
    assert kept.recall(50, 7) == frozenset()
    assert [entry["event"] for entry in log] == ["rank_memory_unreadable"]
    kept.remember(50, 7, {COMM})
    assert memory(path).recall(50, 7) == {COMM}


def test_impossible_numbers_in_the_file_are_not_believed(path):
    memory(path).remember(50, 7, {COMM})
    path.write_bytes(path.read_bytes().replace(b'"rank":2', b'"rank":99'))
    assert b"99" in path.read_bytes()
    assert memory(path).recall(50, 7) == frozenset()


def test_a_full_disk_is_one_warning_and_the_knowledge_stays():
    with capture_logs() as log:
        kept = memory("/dev/full/ranks.json", pause=0.0)
        kept.remember(1, 1, {COMM})
        kept.remember(2, 2, {COMM})
    assert kept.recall(2, 2) == {COMM}
    assert len(log) == 1
    assert log[0]["log_level"] == "warning"


def test_a_device_with_no_space_left(path):
    path.with_name("ranks.json.new").symlink_to("/dev/full")  # and a link in the way is not followed
    with capture_logs() as log:
        kept = memory(path, pause=0.0)
        kept.remember(1, 1, {COMM})
    assert [entry["event"] for entry in log] == ["rank_memory_unwritable"]
    kept.remember(2, 2, {COMM})
    assert memory(path).recall(1, 1) == {COMM}


def test_it_does_not_grow_without_end(path):
    kept = memory(path, pause=1e9)
    for pid in range(5000):
        kept.remember(pid, 1, {COMM})
    assert kept.recall(0, 1) == frozenset()
    assert kept.recall(4999, 1) == {COMM}
