"""A collective library and its callers, made for a test.

The library is compiled here: NCCL's names and version string over functions that only return a code. The programs are real processes
that dlopen it; counts are compared exactly.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from conftest import Daemon, free_port, until

LIBRARY = r"""
#include <stddef.h>
__asm__(".text; PADDING");
const char version[] = "NCCL version VERSION+cuda12.9";
__attribute__((noinline)) int ncclAllReduce(const void *a, void *b, size_t n, int t, int o, void *c, void *s) { __asm__(""); return 0; }
__attribute__((noinline)) int ncclGroupStart(void) { __asm__(""); return 0; }
"""
CALLER = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <sys/wait.h>
/* caller LIBRARY CALLS WAIT_BEFORE_DLOPEN FORKS PAUSE: says "loaded", waits for a line, calls, in forked children too, says what
 * the calls returned other than 0 as CALL:RESULT, and how long the longest took in microseconds, says "done" */
static long now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000 + t.tv_nsec / 1000; }
int main(int argc, char **argv) {
    int pause = atof(argv[5]) * 1e6;
    long calls = atol(argv[2]), longest = 0;
    usleep(atof(argv[3]) * 1e6);
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) { puts(dlerror()); return 1; }
    int (*call)(const void *, void *, size_t, int, int, void *, void *) = dlsym(library, "ncclAllReduce");
    puts("loaded"); fflush(stdout);
    if (getchar() == EOF) return 1;
    for (int i = 0; i < atoi(argv[4]); i++) if (fork() == 0) {
        for (long j = 0; j < calls; j++) call(0, 0, 8, 7, 0, 0, 0);
        _exit(0);
    }
    for (long j = 0; j < calls; j++) {
        long began = now();
        int result = call(0, 0, 8, 7, 0, 0, 0);
        if (now() - began > longest) longest = now() - began;
        if (result) printf("%ld:%d ", j, result);
        if (pause) usleep(pause);
    }
    while (wait(0) > 0);
    printf("longest:%ld\n", longest);
    puts("done"); fflush(stdout);
    sleep(60);
    return 0;
}
"""


class Caller(NamedTuple):
    """A process that has not made its calls yet, or has."""

    job: str
    pid: int
    process: subprocess.Popen[str]


class Workshop:
    """Compiles, starts and ends; callers call once the daemon has said that it watches them."""

    def __init__(self, place: Path, daemon: Daemon) -> None:
        self.place = place
        self.daemon = daemon
        self.callers: list[Caller] = []
        (place / "caller.c").write_text(CALLER)
        subprocess.run(["gcc", "-O1", "-o", str(place / "caller"), str(place / "caller.c"), "-ldl"], check=True)

    def library(self, name: str = "libnccl.so.2", version: str = "2.99.1", folder: Path | None = None, padding: int = 0) -> Path:
        """Compile one; `padding` moves its functions by so many instructions."""
        source, result = self.place / "library.c", (folder or self.place) / name
        source.write_text(LIBRARY.replace("VERSION", version).replace("PADDING", "nop;" * padding))
        subprocess.run(["gcc", "-O1", "-g", "-shared", "-fPIC", "-o", str(result), str(source)], check=True)
        return result

    def call(self, library: Path, calls: int, *prefix: str, load: float = 0.0, forks: int = 0, pause: float = 0.0) -> Caller:
        """Start a caller that is rank 0 of a job of its own."""
        port = str(free_port())
        environment = dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        words = [*prefix, str(self.place / "caller"), str(library), str(calls), str(load), str(forks), str(pause)]
        process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.callers.append(Caller(f"tcp-127.0.0.1:{port}", process.pid, process))
        return self.callers[-1]

    def begin(self, caller: Caller) -> None:
        """Let it call, once it is watched."""
        assert caller.process.stdout is not None
        assert caller.process.stdin is not None
        assert caller.process.stdout.readline() == "loaded\n"
        until(lambda: any(row["job"] == caller.job and row["libraries"] for row in self.daemon.json("ranks")["ranks"]), 60)
        caller.process.stdin.write("\n")
        caller.process.stdin.flush()

    def done(self, *callers: Caller) -> list[dict[str, int]]:
        """Begin, and wait until all calls are made; without arguments, of all callers.

        Of each: number of a call -> its result, where that was not 0, and `longest` -> microseconds.
        """
        waiting = callers or tuple(self.callers)
        for caller in waiting:
            self.begin(caller)
        return [self.results(caller) for caller in waiting]

    def results(self, caller: Caller) -> dict[str, int]:
        """Wait until a caller that has begun is done."""
        assert caller.process.stdout is not None
        words = caller.process.stdout.readline().split()
        assert caller.process.stdout.readline() == "done\n"
        return {key: int(value) for key, _, value in (word.partition(":") for word in words)}

    def end(self) -> None:
        """End every caller."""
        for caller in self.callers:
            subprocess.run(["pkill", "-KILL", "-P", str(caller.pid)], check=False)
            caller.process.kill()
            caller.process.communicate()
        self.callers.clear()
