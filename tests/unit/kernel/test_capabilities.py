"""Capabilities: the answers that machines other than this one give, from made-up roots and kernels."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from singularityd.kernel import capabilities, headers
from singularityd.kernel.capabilities import Machine, host, processes, programs, trial

ROOT = (1 << 41) - 1
LOG = """0: R1=ctx(off=0,imm=0) R10=fp0
; ignored
0: (b7) r0 = 0                        ; R0_w=0
1: (7b) *(u64 *)(r1 +80) = r0
invalid bpf_context access off=80 size=8
processed 2 insns (limit 1000000) max_states_per_insn 0 total_states 0 peak_states 0 mark_read 0
"""


class FakeKernel:
    """Says yes to everything unless told which call to refuse; remembers what it handed out."""

    machine = "x86_64"

    def __init__(self, *, value: int | None = None, result: int = 0, **refuse: int | OSError) -> None:
        self.refuse, self.value, self.result = refuse, value, result
        self.open: set[int] = set()
        self.cookie = 1
        self.names: list[str] = []

    def _descriptor(self, call: str) -> int:
        error = self.refuse.get(call)
        if isinstance(error, int):
            raise OSError(error, os.strerror(error))
        if error:
            raise error
        descriptor = os.open("/dev/null", os.O_RDONLY)
        self.open.add(descriptor)
        return descriptor

    def create_map(self, *_: int) -> int:
        return self._descriptor("create_map")

    def load_program(self, *_: Any, **__: Any) -> int:
        return self._descriptor("load_program")

    def attach_uprobe(self, program: int, path: str, cookie: int, *, returns: bool) -> list[int]:
        self.cookie = cookie
        return [self._descriptor("attach_uprobe")]

    def attach_uprobe_without_cookie(self, program: int, path: str, *, returns: bool) -> list[int]:
        return [self._descriptor("attach_uprobe")]

    def attach_uprobe_multi(self, program: int, path: str, cookie: int) -> list[int]:
        self.cookie = cookie
        return [self._descriptor("attach_uprobe_multi")]

    def attach_raw_tracepoint(self, program: int, name: str) -> int:
        self.names.append(name)
        return self._descriptor(name)

    def open_probe(self, *_: Any, **__: Any) -> int:
        return self._descriptor("open_probe")

    def first_value(self, array: int) -> int:
        return self.cookie if self.value is None else self.value

    def ptrace(self, *_: Any) -> None:
        self._descriptor("ptrace")

    @contextlib.contextmanager
    def function(self) -> Iterator[tuple[str, Any]]:
        yield "/nowhere", lambda: self.result


def machine(tmp_path: Path, kernel: FakeKernel | None = None, files: dict[str, str] | None = None, **kwargs: Any) -> Machine:
    """A machine whose /proc and /sys hold only `files`."""
    for name, text in (files or {}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(proc=tmp_path / "proc", sys=tmp_path / "sys", kernel=kernel or FakeKernel(), **kwargs)  # type: ignore[arg-type]


def status(mask: int) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tx\nCapEff:\t{mask:016x}\n"}


def test_every_check_has_its_own_name_and_fits_a_message() -> None:
    names = [check.__name__ for check in capabilities.CHECKS]

    assert len(set(names)) == len(names)
    assert all(len(name) < 48 for name in names)


def test_a_check_that_breaks_is_unknown_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Machine) -> capabilities.Answer:
        raise RuntimeError("surprise")

    monkeypatch.setattr(capabilities, "CHECKS", (broken, programs.ring_buffer))
    first, second = capabilities.probe_all(machine=machine(tmp_path))

    assert (first.name, first.state) == ("broken", "unknown")
    assert "RuntimeError: surprise" in first.detail
    assert second.state == "yes"


@pytest.mark.parametrize(
    ("code", "state", "remedy"), [(errno.EINVAL, "no", "5.8"), (errno.EPERM, "no", "CAP_BPF"), (errno.ENFILE, "unknown", "CAP_BPF")]
)
def test_ring_buffer_refused(tmp_path: Path, code: int, state: str, remedy: str) -> None:
    answer = programs.ring_buffer(machine(tmp_path, FakeKernel(create_map=code)))

    assert answer.state == state
    assert errno.errorcode[code] in answer.detail
    assert remedy in answer.remedy


UPROBES = [
    (programs.uprobe, "attach_uprobe"),
    (programs.uprobe_return, "attach_uprobe"),
    (programs.attach_cookie, "attach_uprobe"),
    (programs.uprobe_multi, "attach_uprobe_multi"),
]


@pytest.mark.parametrize(("check", "call"), UPROBES)
def test_uprobes(tmp_path: Path, check: Any, call: str) -> None:
    assert check(machine(tmp_path)).state == "yes"

    refused = check(machine(tmp_path, FakeKernel(**{call: errno.EOPNOTSUPP})))
    assert refused.state == "no"
    assert "EOPNOTSUPP" in refused.detail
    assert refused.remedy

    silent = check(machine(tmp_path, FakeKernel(value=0)))
    assert silent.state == "no", "attached and never run is not yes"
    assert "did not run" in silent.detail

    denied = check(machine(tmp_path, FakeKernel(**{call: errno.EACCES})))
    assert "CAP_PERFMON" in denied.remedy


@pytest.mark.parametrize(("check", "call"), UPROBES)
def test_uprobes_close_what_they_open(tmp_path: Path, check: Any, call: str) -> None:
    for kernel in (FakeKernel(), FakeKernel(**{call: errno.EPERM}), FakeKernel(load_program=errno.EPERM)):
        check(machine(tmp_path, kernel))
        for descriptor in kernel.open:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


def test_no_uprobe_source_is_no_only_where_sysfs_is_there(tmp_path: Path) -> None:
    missing = FakeKernel(attach_uprobe=FileNotFoundError(errno.ENOENT, "No such file or directory"))

    assert programs.uprobe(machine(tmp_path, missing)).state == "unknown"
    (tmp_path / "sys/bus/event_source/devices").mkdir(parents=True)
    assert programs.uprobe(machine(tmp_path, missing)).state == "no"


def test_raw_tracepoints(tmp_path: Path) -> None:
    kernel = FakeKernel()
    assert programs.raw_tracepoint(machine(tmp_path, kernel)).state == "yes"
    assert "sched_process_exit" in kernel.names

    partial = programs.raw_tracepoint(machine(tmp_path, FakeKernel(mark_victim=errno.ENOENT)))
    assert partial.state == "yes"
    assert "mark_victim: ENOENT" in partial.detail

    without = programs.raw_tracepoint(machine(tmp_path, FakeKernel(sched_process_exit=errno.ENOENT)))
    assert without.state == "no"
    assert "pidfd" in without.remedy


@pytest.mark.parametrize("check", [programs.signal_helper, programs.read_kernel_memory, programs.register_write])
def test_refused_program_tells_the_kernels_words(tmp_path: Path, check: Any) -> None:
    answer = check(machine(tmp_path, FakeKernel(load_program=OSError(errno.EACCES, trial.reason(LOG)))))

    assert answer.state == "no"
    assert "EACCES: invalid bpf_context access off=80 size=8" in answer.detail


def test_register_write_is_proven_by_what_the_function_returns(tmp_path: Path) -> None:
    assert programs.register_write(machine(tmp_path, FakeKernel(result=77))).state == "yes"

    ignored = programs.register_write(machine(tmp_path, FakeKernel(result=0)))
    assert ignored.state == "no"
    assert "returned 0" in ignored.detail
    refused = programs.register_write(machine(tmp_path, FakeKernel(attach_uprobe=errno.EINVAL)))
    assert refused.state == "no", "a program that loads and cannot be attached writes nothing"


def test_kprobe(tmp_path: Path) -> None:
    assert programs.kprobe(machine(tmp_path)).state == "unknown"
    (tmp_path / "sys/bus/event_source/devices").mkdir(parents=True)
    assert programs.kprobe(machine(tmp_path)).state == "no"
    with_source = machine(tmp_path, files={"sys/bus/event_source/devices/kprobe/type": "6\n"})
    assert programs.kprobe(with_source).state == "yes"
    with_source.kernel = FakeKernel(open_probe=errno.EACCES)  # type: ignore[assignment]
    assert programs.kprobe(with_source).state == "no"


@pytest.mark.parametrize(("scope", "state"), [("0", "yes"), ("1", "yes"), ("2", "yes"), ("3", "no")])
def test_yama(tmp_path: Path, scope: str, state: str) -> None:
    answer = processes.yama(machine(tmp_path, files={"proc/sys/kernel/yama/ptrace_scope": scope}))

    assert answer.state == state
    assert (state == "no") == ("reboot" in answer.remedy)


def test_yama_absent_is_not_a_restriction_but_no_proc_is_unknown(tmp_path: Path) -> None:
    assert processes.yama(machine(tmp_path)).state == "unknown"
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    assert processes.yama(machine(tmp_path)).state == "yes"


def test_selinux(tmp_path: Path) -> None:
    assert processes.selinux(machine(tmp_path)).state == "yes"
    unmounted = machine(tmp_path, files={"proc/filesystems": "nodev\tselinuxfs\n", "proc/self/mounts": ""})
    assert processes.selinux(unmounted).state == "unknown"
    off = machine(tmp_path, files={"sys/fs/selinux/booleans/deny_ptrace": "0 0"})
    assert processes.selinux(off).state == "yes"
    on = processes.selinux(machine(tmp_path, files={"sys/fs/selinux/booleans/deny_ptrace": "1 1"}))
    assert (on.state, on.remedy) == ("no", "setsebool -P deny_ptrace off")


def test_ptrace_refused_leaves_no_child(tmp_path: Path) -> None:
    answer = processes.ptrace(machine(tmp_path, FakeKernel(ptrace=errno.EPERM)))

    assert answer.state == "no"
    assert "EPERM" in answer.detail
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_ptrace_that_never_stops_is_unknown(tmp_path: Path) -> None:
    assert processes.ptrace(machine(tmp_path)).state == "unknown"


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("[none] integrity confidentiality", "yes", "none"),
        ("none [integrity] confidentiality", "yes", "integrity"),
        ("none integrity [confidentiality]", "no", "kernel memory"),
        ("gibberish", "unknown", "gibberish"),
    ],
)
def test_lockdown(tmp_path: Path, text: str, state: str, words: str) -> None:
    answer = host.lockdown(machine(tmp_path, files={"sys/kernel/security/lockdown": text}))

    assert answer.state == state
    assert words in answer.detail


def test_lockdown_not_mounted_is_unknown_never_none(tmp_path: Path) -> None:
    answer = host.lockdown(machine(tmp_path, files={"proc/self/mounts": "sysfs /sys sysfs rw 0 0\n"}))

    assert answer.state == "unknown"
    assert "mount -t securityfs" in answer.remedy
    mounted = machine(tmp_path, files={"proc/self/mounts": "securityfs /sys/kernel/security securityfs rw 0 0\n"})
    assert host.lockdown(mounted).state == "yes"


def test_btf(tmp_path: Path) -> None:
    assert host.btf(machine(tmp_path)).state == "no"
    odd = machine(tmp_path, files={"sys/kernel/btf/vmlinux": "no"})
    assert host.btf(odd).state == "no"
    (tmp_path / "sys/kernel/btf/vmlinux").write_bytes(b"\x9f\xeb\x01")
    assert host.btf(odd).state == "yes"


def test_missing_headers_name_the_package(tmp_path: Path) -> None:
    answer = host.kernel_headers(machine(tmp_path, header_roots=headers.Roots(tmp_path / "src", tmp_path / "modules")))

    assert answer.state == "no"
    assert "linux-headers-" in answer.remedy


def test_missing_bcc_names_the_right_package(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'bcc'\" >&2\nexit 1\n")
    python.chmod(0o755)

    answer = host.bcc(machine(tmp_path, system_python=str(python)))

    assert answer.state == "no"
    assert "No module named 'bcc'" in answer.detail
    assert "apt-get install python3-bpfcc" in answer.remedy


def test_missing_system_python(tmp_path: Path) -> None:
    answer = host.bcc(machine(tmp_path, system_python=str(tmp_path / "nowhere")))

    assert answer.state == "no"
    assert "kernel.system_python" in answer.remedy


def test_slow_bcc_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(host, "_BCC_LIMIT", 0.2)

    assert host.bcc(machine(tmp_path, system_python=str(python))).state == "unknown"


def test_root_holds_all(tmp_path: Path) -> None:
    assert processes.privileges(machine(tmp_path, files=status(ROOT))).state == "yes"


def test_not_root_names_each_missing_capability(tmp_path: Path) -> None:
    answer = processes.privileges(machine(tmp_path, files=status(0)))

    assert answer.state == "no"
    for name in ("BPF", "PERFMON", "SYS_PTRACE", "SYS_ADMIN", "KILL", "CHECKPOINT_RESTORE", "DAC_READ_SEARCH", "SYS_RESOURCE"):
        assert f"CAP_{name}" in answer.detail
        assert f"CAP_{name}" in answer.remedy


def test_admin_stands_for_the_newer_capabilities_as_in_the_kernel(tmp_path: Path) -> None:
    without = ROOT & ~(1 << 38) & ~(1 << 39) & ~(1 << 40)

    assert processes.privileges(machine(tmp_path, files=status(without))).state == "yes"
    without &= ~(1 << 21)
    assert "CAP_BPF" in processes.privileges(machine(tmp_path, files=status(without))).detail


def test_only_old_kernels_need_sys_resource(tmp_path: Path) -> None:
    answer = processes.privileges(machine(tmp_path, files=status(ROOT & ~(1 << 24))))

    assert answer.state == "yes"
    assert "CAP_SYS_RESOURCE" in answer.detail


def test_no_proc_is_unknown(tmp_path: Path) -> None:
    assert processes.privileges(machine(tmp_path)).state == "unknown"


@pytest.mark.parametrize(
    ("level", "mask", "state"), [("3", ROOT, "yes"), ("3", 1 << 38, "no"), ("2", 1 << 38, "yes"), ("2", 0, "no"), ("-1", ROOT, "yes")]
)
def test_perf_event_paranoid(tmp_path: Path, level: str, mask: int, state: str) -> None:
    answer = host.perf_event_paranoid(machine(tmp_path, files={"proc/sys/kernel/perf_event_paranoid": level, **status(mask)}))

    assert answer.state == state
    assert level in answer.detail


def test_perf_event_paranoid_unreadable(tmp_path: Path) -> None:
    assert host.perf_event_paranoid(machine(tmp_path)).state == "unknown"


@pytest.mark.parametrize(("code", "remedy"), [(errno.EPERM, "LimitMEMLOCK|CAP_BPF"), (errno.ENOMEM, "MemoryMax")])
def test_memlock(tmp_path: Path, code: int, remedy: str) -> None:
    answer = host.memlock(machine(tmp_path, FakeKernel(create_map=code)))

    assert answer.state == "no"
    assert any(word in answer.remedy for word in remedy.split("|"))


def test_map_files(tmp_path: Path) -> None:
    assert processes.map_files(machine(tmp_path)).state == "no"
    folder = tmp_path / "proc/self/map_files"
    folder.mkdir(parents=True)
    assert processes.map_files(machine(tmp_path)).state == "unknown"
    (folder / "1000-2000").write_text("")
    assert processes.map_files(machine(tmp_path)).state == "yes"


def test_front_reads_maps_refused(tmp_path: Path) -> None:
    class Old(FakeKernel):
        def first_value(self, array: int) -> int:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    answer = processes.front_reads_maps(machine(tmp_path, Old(), {"proc/sys/kernel/unprivileged_bpf_disabled": "2"}))

    assert answer.state == "no"
    assert "unprivileged_bpf_disabled = 2" in answer.detail
    assert "EPERM" in answer.detail


def test_cgroup_v2(tmp_path: Path) -> None:
    assert host.cgroup_v2(machine(tmp_path)).state == "no"
    hybrid = machine(tmp_path, files={"proc/self/mounts": "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"})
    assert "version 1" in host.cgroup_v2(hybrid).detail
    unified = machine(tmp_path, files={"proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"})
    assert host.cgroup_v2(unified).state == "unknown"
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert host.cgroup_v2(unified).state == "yes"


def test_reason_is_the_verifiers_last_word() -> None:
    assert trial.reason(LOG) == "invalid bpf_context access off=80 size=8"
    assert trial.reason("") == ""
