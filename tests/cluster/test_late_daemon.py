"""A communicator that began before the daemon: where the library carries debug information, its rank is read from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, until

SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
struct channel { char state[7000]; };
struct ncclComm { struct channel channels[64]; volatile uint64_t commHash; volatile int rank; volatile int nRanks; uint64_t opCount; };
const char version[] = "NCCL version 2.99.7+cuda12.9";
__attribute__((noinline)) int ncclAllReduce(const void *a, void *b, size_t n, int t, int o, struct ncclComm *c, void *s) {
    c->opCount++;
    return 0;
}
/* begins with a lock prefix, which the kernel cannot probe; the other functions must be watched all the same */
__attribute__((naked)) int ncclBroadcast(void) { __asm__("lock incq (%rsp)\n ret"); }
int main(int argc, char **argv) {
    struct ncclComm *c = calloc(1, sizeof(*c));
    c->commHash = 0xabcdef0123456789ull; c->rank = atoi(argv[1]); c->nRanks = 8;
    for (;;) { ncclAllReduce(0, 0, 8, 7, 0, c, 0); usleep(20000); }
}
"""


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    place = Path(tempfile.mkdtemp(prefix="singularity-late-"))
    (place / "job.c").write_text(SOURCE)
    subprocess.run(["gcc", "-g", "-O1", "-rdynamic", "-o", str(place / "job"), str(place / "job.c")], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    started = [subprocess.Popen([str(place / "job"), str(rank)], env=environment) for rank in (5, 6)]
    yield started
    for one in started:
        one.kill()
        one.wait()
    shutil.rmtree(place)


def test_the_rank_is_read_from_the_communicator(ranks: list[subprocess.Popen[bytes]]) -> None:
    late = Daemon().start()
    try:

        def known() -> dict[int, dict] | None:
            found = late.ranks("nccl-abcdef01")
            return found if sorted(found) == [5, 6] else None

        found = until(known, 40)
        assert [found[5]["pid"], found[6]["pid"]] == [one.pid for one in ranks]
        assert {(row["source"], row["world"]) for row in found.values()} == {("probe", 8)}
        assert any("ncclBroadcast" in event["text"] for event in late.events("attach_failed"))
        until(lambda: late.metric("singularity_collective_calls_total", rank="5", comm="abcdef01", op="allreduce") > 10, 20)
    finally:
        late.stop()
