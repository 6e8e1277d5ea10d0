"""What this machine permits, learned by doing it once. Never by its kernel's version: vendors back-port and take away.

Each check is one small function that tries one thing, leaves nothing behind, and answers yes, no or unknown with the kernel's own words
and a remedy. `CHECKS` is the list of them, in the order in which `singularityctl doctor` prints them; the function's name is the
capability's name, also in the metric `singularity_capability`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from singularityd.kernel.capabilities import host, processes, programs
from singularityd.kernel.capabilities.programs import uprobe_multi
from singularityd.kernel.capabilities.trial import Answer, Found, Machine

__all__ = ["CHECKS", "Answer", "Found", "Machine", "probe_all", "uprobe_multi"]

CHECKS: tuple[Callable[[Machine], Answer], ...] = (
    processes.privileges,
    host.kernel_headers,
    host.bcc,
    programs.ring_buffer,
    programs.uprobe,
    programs.uprobe_return,
    programs.attach_cookie,
    programs.uprobe_multi,
    programs.raw_tracepoint,
    programs.read_kernel_memory,
    programs.signal_helper,
    processes.ptrace,
    processes.yama,
    processes.selinux,
    programs.register_write,
    processes.front_reads_maps,
    processes.map_files,
    processes.pidfd_exit,
    host.perf_event_paranoid,
    host.memlock,
    host.lockdown,
    host.btf,
    host.cgroup_v2,
    programs.kprobe,
)


def probe_all(
    *, system_python: str = "/usr/bin/python3", headers_root: Path | str = "", machine: Machine | None = None
) -> tuple[Found, ...]:
    """Try everything; about half a second, most of it the kernel's grace periods after each detached probe. Never raises.

    Forks short-lived children and waits for them: call it from a process with one thread. `headers_root` is the setting kernel.headers.
    """
    machine = machine or Machine(system_python=system_python, header_setting=headers_root)
    return tuple(_try(check, machine) for check in CHECKS)


def _try(check: Callable[[Machine], Answer], machine: Machine) -> Found:
    try:
        answer = check(machine)
    except Exception as error:  # noqa: BLE001 - a check that fails is a finding too, and must not hide the others
        answer = Answer("unknown", f"the check itself failed: {type(error).__name__}: {error}", "report it with this line")
    return Found(check.__name__, answer.state, answer.detail, answer.remedy)
