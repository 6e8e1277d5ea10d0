"""The journal on real file systems that are full or read-only (root: they are mounted for the test)."""

import os
import subprocess

import pytest
from singularityd.errors import JournalUnavailable
from singularityd.faults.journal import Journal
from singularityd.model import Fault, FaultSpec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
DRAFT = Fault(id="", spec=FaultSpec(pattern="timeout", rank=3), state="arming")


@pytest.fixture
def small(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_a_full_disk_refuses_and_is_used_again_when_there_is_room(small):
    journal = Journal(small / "journal.sqlite")
    given = [journal.create(DRAFT)]
    fill(small)
    with pytest.raises(JournalUnavailable) as caught:  # the write-ahead log still has room that was allocated before
        given.extend(journal.create(DRAFT) for _ in range(200))
    assert str(small / "journal.sqlite") in caught.value.text
    assert "room" in caught.value.hint or "full" in caught.value.hint
    (small / "filler").unlink()
    given.append(journal.create(DRAFT))
    kept = [fault.id for fault in journal.history(500)]
    assert kept == [fault.id for fault in reversed(given)], "all that was promised is there, and no more"
    journal.close()


def test_a_disk_that_is_full_from_the_start(small):
    fill(small)
    with pytest.raises(JournalUnavailable) as caught:
        Journal(small / "journal.sqlite").create(DRAFT)
    assert "room" in caught.value.hint or "full" in caught.value.hint


def test_a_read_only_file_system(small):
    journal = Journal(small / "journal.sqlite")
    made = journal.create(DRAFT)
    journal.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(JournalUnavailable) as caught:
        Journal(small / "journal.sqlite").create(DRAFT)
    assert caught.value.hint
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    assert journal.get(made.id) == made
    journal.close()
