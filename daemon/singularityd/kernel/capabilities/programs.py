"""Checks of what BPF programs may be and do here: loaded, attached, called, and their effect read back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from singularityd.kernel.capabilities.trial import (
    EXIT,
    KPROBE,
    MAP_ARRAY,
    MAP_RINGBUF,
    RAW_TRACEPOINT,
    RETURN_REGISTER,
    Answer,
    Machine,
    call,
    closing,
    denial,
    instruction,
    refusal,
    store_cookie,
    store_one,
)

_COOKIE = 0x5196_0000_0000_0001
_RETURNED = 77
_UPROBE_MULTI = 48
_REQUIRED = ("sched_process_exit", "sched_process_exec", "signal_deliver")
_WELCOME = ("signal_generate", "mark_victim")
_PRIVILEGES = "run as root with CAP_BPF and CAP_PERFMON (a container needs --privileged, or --cap-add of both and SYS_ADMIN)"
_KERNEL_5_15 = "use Linux 5.15 or later"


def ring_buffer(machine: Machine) -> Answer:
    """Create the kind of map that carries events."""
    try:
        descriptor = machine.kernel.create_map(MAP_RINGBUF, 0, 0, os.sysconf("SC_PAGE_SIZE"))
    except OSError as error:
        remedy = "use Linux 5.8 or later" if error.errno == errno.EINVAL else _PRIVILEGES
        return Answer(denial(error), f"creating a ring buffer: {refusal(error)}", remedy)
    os.close(descriptor)
    return Answer("yes", "created a ring buffer map")


def uprobe(machine: Machine) -> Answer:
    """Attach to the entry of a function of our own, call it, and see the program run."""

    def attach(program: int, path: str) -> list[int]:
        return machine.kernel.attach_uprobe_without_cookie(program, path, returns=False)

    return _attached(machine, "the entry of a function", attach, "without uprobes no call is seen: use a kernel with CONFIG_UPROBES")


def uprobe_return(machine: Machine) -> Answer:
    """The same at the function's return."""

    def attach(program: int, path: str) -> list[int]:
        return machine.kernel.attach_uprobe_without_cookie(program, path, returns=True)

    return _attached(
        machine,
        "the return of a function",
        attach,
        "NCCL's results and durations are not seen: use a kernel with CONFIG_UPROBES",
    )


def attach_cookie(machine: Machine) -> Answer:
    """Attach with a cookie, as every probe of the daemon is attached, and read the cookie back from the program."""

    def attach(program: int, path: str) -> list[int]:
        return machine.kernel.attach_uprobe(program, path, _COOKIE, returns=False)

    return _attached(machine, "a function with a cookie", attach, _KERNEL_5_15, cookie=_COOKIE)


def uprobe_multi(machine: Machine | None = None) -> Answer:
    """One link for many functions (Linux 6.6): stopping then takes milliseconds. The loader asks this before it loads."""
    machine = machine or Machine()

    def attach(program: int, path: str) -> list[int]:
        return machine.kernel.attach_uprobe_multi(program, path, _COOKIE)

    remedy = "none needed: each function gets a link of its own, and detaching takes seconds (Linux 6.6 or later has it)"
    return _attached(machine, "functions by one link", attach, remedy, cookie=_COOKIE, attach_type=_UPROBE_MULTI)


def _attached(
    machine: Machine, what: str, attach: Callable[[int, str], list[int]], remedy: str, *, cookie: int = 0, attach_type: int = 0
) -> Answer:
    """Load, attach by `attach(program, path)`, call, and compare what the program stored: its cookie where it has one, else 1."""
    kernel = machine.kernel
    program, expected = (store_cookie, cookie) if cookie else (store_one, 1)
    try:
        array = kernel.create_map(MAP_ARRAY, 4, 8, 1)
        with closing(array):
            loaded = kernel.load_program(KPROBE, program(array), attach_type=attach_type)
            with closing(loaded), kernel.function() as (path, function), closing(*attach(loaded, path)):
                function()
                seen = kernel.first_value(array)
    except FileNotFoundError as error:
        missing = (machine.sys / "bus/event_source/devices").is_dir()
        return Answer(
            "no" if missing else "unknown", f"attaching to {what}: {refusal(error)}", remedy if missing else "mount sysfs at /sys"
        )
    except OSError as error:
        denied = error.errno in (errno.EPERM, errno.EACCES)
        return Answer(denial(error), f"attaching to {what}: {refusal(error)}", _PRIVILEGES if denied else remedy)
    if seen != expected:
        return Answer("no", f"attached to {what}, called it, and the program did not run (saw {seen:#x}, expected {expected:#x})", remedy)
    return Answer("yes", f"attached to {what}, called it, and the program ran")


def raw_tracepoint(machine: Machine) -> Answer:
    """Attach to each of the tracepoints that tell of dying, stopped and killed ranks."""
    remedy = "ranks' deaths are then seen by pidfd only, after their memory is gone (up to 200 ms later)"
    try:
        program = machine.kernel.load_program(RAW_TRACEPOINT, EXIT)
    except OSError as error:
        return Answer(denial(error), f"loading a raw tracepoint program: {refusal(error)}", _PRIVILEGES)
    missing: dict[str, OSError] = {}
    with closing(program):
        for name in _REQUIRED + _WELCOME:
            try:
                os.close(machine.kernel.attach_raw_tracepoint(program, name))
            except OSError as error:
                missing[name] = error
    words = "; ".join(f"{name}: {refusal(error)}" for name, error in missing.items())
    if any(name in missing for name in _REQUIRED):
        return Answer("no", f"attaching to raw tracepoints: {words}", remedy)
    if missing:
        return Answer("yes", f"attached to {', '.join(_REQUIRED)}; not to {words}", "OOM kills or stops are then told later or not at all")
    return Answer("yes", f"attached to {', '.join(_REQUIRED + _WELCOME)}")


def signal_helper(machine: Machine) -> Answer:
    """Load a program that signals its own thread: how a hit call is handed to the tracer."""
    program = instruction(0xB7, 1, value=0) + call(117) + EXIT  # bpf_send_signal_thread(0)
    return _loaded(machine, program, "a program that signals the calling thread", "faults are not possible: use Linux 5.5 or later")


def read_kernel_memory(machine: Machine) -> Answer:
    """Load a program that reads kernel memory: tgid of dying tasks; refused under lockdown's confidentiality mode."""
    program = (
        instruction(0xBF, 1, 10)
        + instruction(0x07, 1, value=-8)  # r1 = fp - 8
        + instruction(0xB7, 2, value=8)
        + instruction(0xB7, 3, value=0)
        + call(113)  # bpf_probe_read_kernel
        + EXIT
    )
    remedy = "boot with lockdown=integrity or none; without it a dying rank is known by its pid only"
    return _loaded(machine, program, "a program that reads kernel memory", remedy)


def _loaded(machine: Machine, instructions: bytes, what: str, remedy: str) -> Answer:
    try:
        os.close(machine.kernel.load_program(KPROBE, instructions))
    except OSError as error:
        return Answer(denial(error), f"loading {what}: {refusal(error)}", _PRIVILEGES if error.errno == errno.EPERM else remedy)
    return Answer("yes", f"loaded {what}")


def register_write(machine: Machine) -> Answer:
    """Let a program change the result of a function of our own, and call it.

    Loading alone proves nothing (a kprobe program that writes registers loads and then cannot be attached), nor does the version: vendor
    kernels of 6.18 refuse it.
    """
    kernel = machine.kernel
    remedy = "none needed: faults use ptrace (mainline Linux 6.18 or later permits register writes)"
    program = instruction(0xB7, 0, value=_RETURNED) + instruction(0x7B, 1, 0, RETURN_REGISTER[kernel.machine]) + EXIT
    try:
        loaded = kernel.load_program(KPROBE, program)
        with (
            closing(loaded),
            kernel.function() as (path, function),
            closing(*kernel.attach_uprobe_without_cookie(loaded, path, returns=True)),
        ):
            returned = function()
    except OSError as error:
        return Answer(
            denial(error), f"writing the result register: {refusal(error)}", _PRIVILEGES if error.errno == errno.EPERM else remedy
        )
    if returned != _RETURNED:
        return Answer("no", f"the program was attached, but the function returned {returned}, not {_RETURNED}", remedy)
    return Answer("yes", "a program changed what a function returned")


def kprobe(machine: Machine) -> Answer:
    """Open a probe on a function of the kernel; nothing of the collectives needs it."""
    remedy = "none needed for collectives and faults; probes of RDMA verbs in the kernel need CONFIG_KPROBES"
    devices = machine.sys / "bus/event_source/devices"
    kind = machine.read(devices / "kprobe/type")
    if kind is None:
        if devices.is_dir():
            return Answer("no", "the kernel has no kprobe event source", remedy)
        return Answer("unknown", f"{devices} is not there", "mount sysfs at /sys")
    try:
        os.close(machine.kernel.open_probe(int(kind), b"schedule"))
    except (OSError, ValueError) as error:
        words = refusal(error) if isinstance(error, OSError) else f"{kind!r} is no number"
        return Answer("no", f"opening a kprobe: {words}", remedy)
    return Answer("yes", "opened a kprobe")
