import asyncio
import os
import sqlite3
import threading
import time

import msgspec
import pytest
from singularityd.errors import JournalUnavailable
from singularityd.faults import journal_file, schema
from singularityd.faults.journal import Journal, number_of
from singularityd.faults.worker import Worker
from singularityd.model import Fault, FaultSpec

DRAFT = Fault(
    id="",
    spec=FaultSpec(pattern="timeout", rank=3, point="allreduce", probability=0.0001, seed=2**63 - 1, reason="rehearsal ✓"),
    state="arming",
    job="slurm:17",
    pid=4242,
    start_time=2**60,
    who="uid 0",
    created_at=1_764_573_000.25,
)


def ended(fault, **values):
    return msgspec.structs.replace(fault, state="ended", ended_at=2.0, ending="deadline", **values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def rows(path):
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT number, state, reason, job, rank, hits, seen, ending FROM faults ORDER BY number").fetchall()


def test_a_fault_is_on_the_disk_as_asked_when_create_returns(path):
    made = Journal(path).create(DRAFT)
    assert made.id == "f1"
    assert Journal(path).get("f1") == made == msgspec.structs.replace(DRAFT, id="f1")
    assert rows(path) == [(1, "arming", "rehearsal ✓", "slurm:17", 3, 0, 0, "")]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_arming_row_waits_for_the_disk_and_later_ones_need_not(path, monkeypatch):
    said = []
    journal = Journal(path)
    connect = journal._connect

    def watched(**arguments):
        connection = connect(**arguments)
        connection.set_trace_callback(said.append)
        return connection

    monkeypatch.setattr(journal, "_connect", watched)
    made = journal.create(DRAFT)
    assert [line for line in said if "synchronous" in line] == ["PRAGMA synchronous = FULL"]
    journal.update(ended(made))
    assert [line for line in said if "synchronous" in line][1:] == ["PRAGMA synchronous = NORMAL"]
    assert journal._open().execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_ids_are_never_given_twice(path):
    journal = Journal(path, retention=2)
    assert [ended_one(journal).id for _ in range(5)] == ["f1", "f2", "f3", "f4", "f5"]
    assert [fault.id for fault in journal.history(10)] == ["f5", "f4"]
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM faults")
    assert journal.create(DRAFT).id == "f6"


def ended_one(journal):
    made = journal.create(DRAFT)
    journal.update(ended(made))
    return made


def test_ids_go_on_when_the_database_was_removed_or_everything_was(path):
    before = {Journal(path).create(DRAFT).id for _ in range(3)}
    for file in path.parent.glob("journal.sqlite*"):
        if file.suffix != ".next":
            file.unlink()
    assert number_of(Journal(path).create(DRAFT).id) > max(map(number_of, before))


def test_retention_spares_what_has_not_ended(path):
    journal = Journal(path, retention=3)
    still_open = journal.create(DRAFT)
    for _ in range(8):
        ended_one(journal)
    journal.create(DRAFT)
    ids = [fault.id for fault in journal.history(100)]
    assert ids == ["f10", "f9", "f8", still_open.id]


def test_close_open_ends_what_the_last_run_left(path):
    journal = Journal(path, clock=lambda: 99.0)
    arming, armed, over, refused = (journal.create(DRAFT) for _ in range(4))
    journal.update(msgspec.structs.replace(armed, state="armed", mechanism="ptrace", hits=7))
    journal.update(ended(over))
    journal.update(msgspec.structs.replace(refused, state="refused", ending="no"))
    closed = journal.close_open("daemon restarted")
    assert [(fault.id, fault.hits, fault.ending, fault.ended_at) for fault in closed] == [
        (arming.id, 0, "daemon restarted", 99.0),
        (armed.id, 7, "daemon restarted", 99.0),
    ]
    assert journal.close_open("daemon restarted") == []
    assert [fault.ending for fault in journal.history(9)] == ["no", "deadline", "daemon restarted", "daemon restarted"]


def test_history_is_newest_first_and_bounded(path):
    journal = Journal(path)
    for _ in range(5):
        journal.create(DRAFT)
    assert [fault.id for fault in journal.history(2)] == ["f5", "f4"]
    assert journal.history(0) == journal.history(-1) == []


@pytest.mark.parametrize("wrong", ["", "f", "f0", "f01", "F1", "1", "f1 ", "f-1", "f٣", "f" + "9" * 19, "f1;--"])
def test_ids_that_are_none(path, wrong):
    Journal(path).create(DRAFT)
    assert Journal(path).get(wrong) is None


@pytest.mark.parametrize("damage", ["garbage", "torn header", "torn page"])
def test_a_corrupt_file_is_kept_aside_said_once_and_a_new_one_begun(path, damage):
    journal = Journal(path)
    given = [journal.create(DRAFT).id for _ in range(40)]
    journal.close()
    data = bytearray(path.read_bytes())
    if damage == "garbage":
        data = bytearray(os.urandom(5000))
    elif damage == "torn header":
        data[:100] = bytes(100)
    else:
        data[4096 + 8 : 4096 + 2000] = os.urandom(1992)
    path.write_bytes(data)
    journal = Journal(path)
    made = journal.create(DRAFT)
    assert number_of(made.id) > max(map(number_of, given))
    (notice,) = journal.take_notices()
    (aside,) = [file for file in path.parent.glob("*.corrupt-*") if not file.name.endswith(("-wal", "-shm"))]
    assert str(aside) in notice
    assert "corrupt" in notice
    assert aside.read_bytes() == bytes(data)
    assert journal.take_notices() == []
    assert [fault.id for fault in journal.history(10)] == [made.id]
    assert Journal(path).take_notices() == []


def test_with_everything_corrupt_ids_still_do_not_repeat(path):
    given = Journal(path).create(DRAFT).id
    path.write_bytes(b"x" * 5000)
    journal_file.Ids(path).path.write_text("nonsense")
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink(missing_ok=True)
    assert number_of(Journal(path).create(DRAFT).id) > max(number_of(given), time.time() - 60)


def test_corruption_found_while_running_refuses_once_and_then_a_new_file_is_used(path):
    journal = Journal(path)
    made = journal.create(DRAFT)
    connection = journal._open()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("PRAGMA cache_size = 0")
    connection.execute("PRAGMA shrink_memory")
    with path.open("r+b") as file:
        file.write(b"y" * path.stat().st_size)
    with pytest.raises(JournalUnavailable):
        journal.create(DRAFT)
    assert number_of(journal.create(DRAFT).id) > number_of(made.id)
    journal.update(ended(made))
    assert journal.get(made.id).ending == "deadline", "an armed fault's row comes into the new file"


def test_a_newer_schema_and_foreign_databases_are_refused_untouched(path):
    Journal(path).create(DRAFT)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(JournalUnavailable, match="newer release") as caught:
        Journal(path).create(DRAFT)
    assert str(path) in caught.value.text
    assert len(rows(path)) == 1

    other = path.with_name("other.sqlite")
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    os.chmod(other, 0o600)
    with pytest.raises(JournalUnavailable, match="another program"):
        Journal(other).create(DRAFT)


def test_an_older_file_is_migrated_with_its_rows(path, monkeypatch):
    Journal(path).create(DRAFT)
    monkeypatch.setattr(schema.migrate, "__defaults__", ((*schema.MIGRATIONS, ("ALTER TABLE faults ADD COLUMN more TEXT DEFAULT 'm'",)),))
    assert Journal(path).get("f1").job == "slurm:17"
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS) + 1,)
        assert connection.execute("SELECT more FROM faults").fetchall() == [("m",)]


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    Journal(path).create(DRAFT)
    steps = (*schema.MIGRATIONS, ("ALTER TABLE faults ADD COLUMN more TEXT", "NONSENSE"))
    monkeypatch.setattr(schema.migrate, "__defaults__", (steps,))
    with pytest.raises(JournalUnavailable):
        Journal(path).create(DRAFT)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS),)
        assert "more" not in [row[1] for row in connection.execute("PRAGMA table_info(faults)")]


def test_files_that_are_not_ours_alone_are_refused_with_the_command_that_helps(path, monkeypatch):
    Journal(path).create(DRAFT)
    path.chmod(0o666)
    with pytest.raises(JournalUnavailable, match="others can write") as caught:
        Journal(path).create(DRAFT)
    assert caught.value.hint == f"chmod 600 {path}"
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(JournalUnavailable, match="belongs to uid") as caught:
        Journal(path).create(DRAFT)
    assert caught.value.hint.startswith("chown 4711")
    monkeypatch.undo()
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(JournalUnavailable, match="regular file"):
        Journal(path).create(DRAFT)


def test_a_missing_directory_and_a_directory_in_its_place(tmp_path):
    with pytest.raises(JournalUnavailable) as caught:
        Journal(tmp_path / "missing" / "journal.sqlite").create(DRAFT)
    assert "missing" in caught.value.hint
    with pytest.raises(JournalUnavailable, match="regular file"):
        Journal(tmp_path).create(DRAFT)


def test_a_file_removed_under_a_running_daemon_is_not_written_to_any_more(path):
    journal = Journal(path)
    first = journal.create(DRAFT)
    for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        file.unlink(missing_ok=True)
    second = journal.create(DRAFT)
    assert number_of(second.id) > number_of(first.id)
    assert Journal(path).get(second.id) == second


def test_a_lock_of_another_process_is_told_and_nothing_stays_begun(path, monkeypatch):
    monkeypatch.setattr("singularityd.faults.journal._BUSY_SECONDS", 0.05)
    journal = Journal(path)
    journal.create(DRAFT)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalUnavailable) as caught:
        journal.create(DRAFT)
    assert "another process" in caught.value.hint
    other.execute("ROLLBACK")
    other.close()
    assert journal.create(DRAFT).id == "f2"


@pytest.mark.parametrize("step", ["promise", "prune", "commit"])
def test_create_is_all_or_nothing(path, monkeypatch, step):
    journal = Journal(path)
    journal.create(DRAFT)
    with monkeypatch.context() as patched:
        if step == "promise":
            patched.setattr(journal_file, "BLOCK", 1)
            journal._ids._promised = 1
            patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        elif step == "prune":
            patched.setattr("singularityd.faults.journal._PRUNE", "DELETE FROM nothing WHERE ?")
        else:
            wrong = journal._open()
            wrong.execute("CREATE TEMP TABLE parent (x PRIMARY KEY)")
            wrong.set_authorizer(lambda action, what, *_: sqlite3.SQLITE_DENY if (action, what) == (22, "COMMIT") else sqlite3.SQLITE_OK)
        with pytest.raises(JournalUnavailable) as caught:
            journal.create(DRAFT)
    assert str(path) in caught.value.text
    assert caught.value.hint
    assert [row[0] for row in rows(path)] == [1]
    assert journal.create(DRAFT).state == "arming"


def test_a_row_somebody_edited_into_nonsense_is_told_and_not_raised_raw(path):
    journal = Journal(path)
    journal.create(DRAFT)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE faults SET spec = '{'")
    with pytest.raises(JournalUnavailable):
        journal.get("f1")


async def test_the_worker_runs_in_order_on_its_own_named_thread_and_never_on_the_loop():
    worker = Worker("journal")
    seen = []

    def note(number):
        time.sleep(0.01)
        seen.append((number, threading.current_thread().name))
        return number

    answers = [worker.run(note, number) for number in range(5)]
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(0)
    assert asyncio.get_running_loop().time() - began < 0.01
    assert await asyncio.gather(*answers) == list(range(5))
    assert seen == [(number, "journal") for number in range(5)]
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    worker.close(1.0)
    assert "journal" not in {thread.name for thread in threading.enumerate()}


async def test_a_stuck_disk_does_not_keep_the_process_from_ending():
    worker = Worker("stuck")
    free = threading.Event()
    waiting = worker.run(free.wait)
    began = time.monotonic()
    worker.close(0.05)
    assert time.monotonic() - began < 1.0
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "stuck"]
    assert thread.daemon
    free.set()
    await waiting
