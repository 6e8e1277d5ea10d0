"""Starts the bcc children and takes over the programs and maps they loaded.

Two children, one for each program file, run side by side: a compile takes 0.5 to 1.5 s of LLVM. They end at once; what stays in the
executor is descriptors. Executor only, single thread.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

KPROBE, RAW_TRACEPOINT = 2, 17
UPROBE_MULTI = 48
TIME_LIMIT = 60.0
"""Seconds for one child; a compile takes 1.5 s on a slow core, a hung one must not hang the host's daemon."""


class LoadError(RuntimeError):
    """Raised when bcc, its headers or the verifier said no; `remedy` tells an administrator what to do."""

    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


class Family(NamedTuple):
    """One program file."""

    source: str
    programs: dict[str, tuple[int, int, bool]]
    """name -> program type, expected attach type (-1: none), optional"""
    maps: tuple[str, ...]
    task_offsets: bool


def families(*, uprobe_multi: bool) -> tuple[Family, ...]:
    """The program files of this release."""
    attach = UPROBE_MULTI if uprobe_multi else -1
    return (
        Family(
            "collectives.c",
            dict.fromkeys(("on_call", "on_return", "on_end"), (KPROBE, attach, False)),
            (
                "sites",
                "site_hits",
                "layouts",
                "counters",
                "settings",
                "stats",
                "inflight",
                "comms",
                "groups",
                "inject_config",
                "held",
                "events",
            ),
            task_offsets=False,
        ),
        Family(
            "process.c",
            {
                "on_exit": (RAW_TRACEPOINT, -1, False),
                "on_exec": (RAW_TRACEPOINT, -1, False),
                "on_deliver": (RAW_TRACEPOINT, -1, False),
                "on_generate": (RAW_TRACEPOINT, -1, True),
                "on_oom": (RAW_TRACEPOINT, -1, True),
            },
            ("ranks", "process_counters", "process_events"),
            task_offsets=True,
        ),
    )


class Loaded(NamedTuple):
    """Descriptors by name, owned by the executor."""

    programs: dict[str, int]
    maps: dict[str, int]
    missing: dict[str, str]
    """Optional programs that this kernel refused, with its words."""


class Loading:
    """One child at work; poll `fileno()`, then call `result()` once."""

    def __init__(self, family: Family, *, python: str, sources: Path, headers: Path, version_code: int, pages: dict[str, int]) -> None:
        self.family = family
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = here
        request = {
            "socket": there.fileno(),
            "source": str(sources / family.source),
            "include": str(sources),
            "defines": pages,
            "programs": family.programs,
            "maps": family.maps,
            "task_offsets": family.task_offsets,
        }
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "BCC_KERNEL_SOURCE": str(headers),
            "BCC_LINUX_VERSION_CODE": str(version_code),
        }
        child = Path(__file__).with_name("bcc_child.py")
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(child), json.dumps(request)],
                pass_fds=(there.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
            )
        except OSError as error:
            here.close()
            raise LoadError(
                f"cannot start {python}: {error.strerror}", "set kernel.system_python to the distribution's Python 3"
            ) from error
        finally:
            there.close()

    def fileno(self) -> int:
        """Readable when the child has answered or died."""
        return self._socket.fileno()

    def result(self) -> Loaded:
        """Take the descriptors over; raises LoadError with bcc's or the verifier's words."""
        try:
            ready, _, _ = select.select([self._socket], [], [], TIME_LIMIT)
            if not ready:
                raise LoadError(f"bcc did not finish {self.family.source} within {TIME_LIMIT:.0f} s")
            data, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 64, socket.MSG_CMSG_CLOEXEC)
            words = self._finish()
            if not data:
                raise LoadError(*explain(words or "the bcc child ended without an answer"))
            answer = json.loads(data)
            if not answer["ok"]:
                raise LoadError(*explain(f"{answer['error']}\n{words}"))
            missing = dict(answer["missing"])
            names = [name for name in self.family.programs if name not in missing]
            programs = dict(zip(names, descriptors, strict=False))
            maps = dict(zip(self.family.maps, descriptors[len(names) :], strict=True))
            return Loaded(programs, maps, missing)
        finally:
            self.close()

    def _finish(self) -> str:
        _, errors = self._process.communicate(timeout=TIME_LIMIT)
        return errors.decode("utf-8", "replace")[-4000:]

    def close(self) -> None:
        """End the child if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()
        self._socket.close()


def explain(words: str) -> tuple[str, str]:
    """(one line, remedy) for what bcc printed; its own messages name kernel headers in three wrong ways."""
    lines = [line.strip() for line in words.splitlines() if line.strip() and "WARNING" not in line and "may be unpredictable" not in line]
    if "No module named 'bcc'" in words:
        return "the system's Python has no module bcc", "apt-get install python3-bpfcc (PyPI's package bcc is something else)"
    if "kconfig.h" in words or "Unable to find kernel headers" in words or "kheaders" in words:
        return "kernel headers were not found", "apt-get install linux-headers-amd64 (any version serves)"
    if "Operation not permitted" in words:
        return "the kernel does not permit loading programs", "run as root with CAP_BPF and CAP_PERFMON; see singularityctl doctor"
    interesting = [line for line in lines if "error" in line.lower() or "Exception" in line or "Permission denied" in line]
    return (interesting or lines or ["no reason given"])[0][:400], "singularityctl doctor tells what this kernel offers"


def raise_limits() -> None:
    """Kernels before 5.11 account maps to RLIMIT_MEMLOCK; later ones ignore it. Capability `memlock` says whether it suffices."""
    import resource

    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def program_sources() -> Path:
    """The folder of the C files: the package's own copy, or the checkout's bpf/ beside daemon/."""
    inside = Path(__file__).resolve().parent.parent / "bpf"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[3] / "bpf"
