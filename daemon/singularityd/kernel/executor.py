"""The executor: the privileged half. One thread, one loop, standard library only, no network.

Order of start: lock -> front and bcc children side by side -> programs and raw tracepoints -> first look at the host -> Started.
Order of stop: faults -> front -> links. Either half's death at any point leaves no rank held: holders die with the executor, and a
front that is gone has its faults ended here.
"""

from __future__ import annotations

import ctypes as c
import errno
import fcntl
import heapq
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from singularityd.kernel import (
    abi,
    arms,
    attach,
    bpf,
    capabilities,
    exits,
    front_child,
    headers,
    heartbeat,
    layouts,
    loader,
    messages,
    notify,
    reload,
)
from singularityd.kernel.channel import ChannelClosed
from singularityd.kernel.discovery import (
    Discovery,
    LibraryFound,
    ProcessExeced,
    ProcessGone,
    ProcessSeen,
    SearchFailed,
)
from singularityd.kernel.elf import Wanted
from singularityd.kernel.libraries import Table, tables
from singularityd.kernel.procfs import ProcFs
from singularityd.kernel.ptrace import calls

EX_OK, EX_UNAVAILABLE, EX_SOFTWARE, EX_NOPERM = 0, 69, 70, 77
_RAW_TRACEPOINTS = {
    "on_exit": "sched_process_exit",
    "on_exec": "sched_process_exec",
    "on_deliver": "signal_deliver",
    "on_generate": "signal_generate",
    "on_oom": "mark_victim",
}
_TICK = 1.0
_FRONT_ENDS = 0.3
"""Seconds between ending the faults and ending the front for a reload: it journals how they ended."""
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Settings(NamedTuple):
    """What the executor needs of the configuration, as JSON in its arguments."""

    runtime_dir: str
    state_dir: str
    system_python: str
    headers: str
    front: list[str]
    slow_ns: int
    guard_limit: int
    return_probes: bool
    linger: float
    event_pages: int
    process_pages: int
    faults_enabled: bool
    off_switch: str
    max_duration_ms: int
    max_active: int
    expire_after: float
    nice: int
    scan_interval: float
    packages: list[str]


class Process:
    """A process that maps a collective library."""

    def __init__(self, seen: messages.ProcessSeen) -> None:
        self.seen = seen
        self.libraries: dict[tuple[int, int, str], messages.LibraryMapped] = {}
        self.pidfd: int | None = None

    @property
    def start_time(self) -> int:
        """Ticks after boot."""
        return int(self.seen.start_time)


class Executor:
    """The loop and what hangs on it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.procfs = ProcFs()
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._front = front_child.FrontChild(settings.front)
        self._processes: dict[int, Process] = {}
        self._capabilities: list[messages.CapabilityFound] = []
        self._links: list[int] = []
        self._maps: dict[str, int] = {}
        self._programs: dict[str, int] = {}
        self._handles: list[messages.MapHandle] = []
        self._handle_fds: list[int] = []
        self._sheds: list[messages.Shed] = []
        self._failures: dict[str, messages.AttachFailed] = {}
        self._tables: dict[str, Table] = {table.backend: table for table in tables()}
        self._attacher: attach.Attacher | None = None
        self._arms: arms.Arms | None = None
        self._layouts: layouts.Layouts | None = None
        self._discovery: Discovery | None = None
        self._started = False
        self._front_ready = False
        self._stopping = False
        self._stop_signal = 0
        self._heartbeat = heartbeat.Heartbeat(time.monotonic)
        self._reload = reload.Reload(settings.front[0], self, settings._asdict())
        self._checking = 0
        self.exit_code = EX_OK

    # --- loop ------------------------------------------------------------------------------------------------------------------

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back when readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def forget(self, descriptor: int) -> None:
        """Stop watching; fine when it was not watched."""
        try:
            self._selector.unregister(descriptor)
        except (KeyError, ValueError):
            return

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call once, later."""
        self._timer_count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._timer_count, callback))

    def send(self, message: messages.Message, descriptor: int | None = None) -> None:
        """To the front, if there is one; a front that cannot be told is replaced."""
        channel = self._front.channel
        if channel is None:
            return
        try:
            channel.send(message, descriptor)
            self._want_write()
        except ChannelClosed as error:
            self._lose_front(str(error))

    def _want_write(self) -> None:
        channel = self._front.channel
        if channel is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.wants_write else 0)
        if self._selector.get_key(channel.fileno()).events != events:
            self._selector.modify(channel.fileno(), events, self._on_front)

    def log(self, level: str, text: str) -> None:
        """A line for the front's log, and for our own stderr while no front can write it."""
        if self._front.channel is not None and self._front_ready:
            self.send(messages.Notice(level=_LEVELS[level], words=text))
        else:
            notify.say(level, f"singularityd executor: {level}: {text}")

    def run(self) -> int:
        """Until told to stop; returns the exit code."""
        lock = self._lock()
        if lock is None:
            return EX_UNAVAILABLE
        self._handle_signals()
        loader.raise_limits()
        try:
            self._start_front()
            self._load()
            if not self._stopping:
                self._first_look()
                self._loop()
        except loader.LoadError as error:
            self.exit_code = EX_UNAVAILABLE
            self._fatal(f"cannot load the probes: {error}", error.remedy)
        except Exception as error:  # noqa: BLE001 - a defect: one line for people, the place for us; the kernel lets every rank go
            self.exit_code = EX_SOFTWARE
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = f"{Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place is not None else "unknown"
            self._fatal(f"the executor failed at {where}: {type(error).__name__}: {error}", "this is a defect: report it with this line")
        finally:
            self._stop()
            os.close(lock)
        return self.exit_code

    def _fatal(self, text: str, remedy: str) -> None:
        notify.say("error", f"singularityd: {text}" + (f"\nremedy: {remedy}" if remedy else ""))

    def _lock(self) -> int | None:
        path = Path(self.settings.state_dir) / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A record lock: the children that are forked for a search or a trial do not hold it, so it ends with this process.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            self._fatal(
                f"another singularityd (pid {holder or 'unknown'}) runs with {path}", "stop it first, or set another daemon.state_dir"
            )
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor

    def _handle_signals(self) -> None:
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        self._wakeup = (reading, writing)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._note_signal)
        self.watch(reading.fileno(), lambda: self._drain(reading))

    @staticmethod
    def _drain(reading: socket.socket) -> None:
        reading.recv(4096)

    def _note_signal(self, number: int, _frame: object) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stopping, self._stop_signal = True, number
        elif number == signal.SIGHUP:
            self._reload.ask()

    def _loop(self) -> None:
        while not self._stopping:
            self._turn(self._next_deadline())

    def _next_deadline(self) -> float:
        waits = [_TICK]
        if self._timers:
            waits.append(self._timers[0][0] - time.monotonic())
        if self._arms is not None and (late := self._arms.next_deadline()) is not None:
            waits.append(late)
        if self._discovery is not None:
            due = self._discovery.next_deadline()
            if due is not None:
                waits.append(due - time.monotonic())
        return max(0.0, min(waits))

    def _turn(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():  # an earlier callback of this turn may have closed it
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        if self._arms is not None:
            self._arms.enforce()
        self._discover()
        if self._started:
            self._reload.turn()

    # --- front -----------------------------------------------------------------------------------------------------------------

    def _start_front(self) -> None:
        if self._stopping:
            return
        channel = self._front.start()
        self._front_ready = False
        self._selector.register(channel.fileno(), selectors.EVENT_READ, self._on_front)
        if self._started:
            self._tell_everything()

    def _on_front(self) -> None:
        channel = self._front.channel
        if channel is None:
            return
        try:
            channel.flush()
            received = channel.receive()
            self._want_write()
        except ChannelClosed as error:
            self._lose_front(str(error))
            return
        for message in received:
            self._on_message(message)

    def _lose_front(self, why: str) -> None:
        if self._front.channel is not None:
            self.forget(self._front.channel.fileno())
        delay = self._front.lost()
        self._front_ready = False
        if self._stopping:
            return
        self._heartbeat.lost()
        self._reload.front_lost()
        if self._arms is not None:
            self._arms.kill_all()
        self.log("warning", f"the front ended ({why}): its faults are ended, probes stay, it is started again in {delay:.1f} s")
        self.after(delay, self._start_front)

    def _on_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.FrontReady):
            self._front_ready = True
            self._announce_ready()
            self._reload.front_ready()
        elif isinstance(message, messages.Ping):
            self._heartbeat.pinged()
            self.send(messages.Done(request=message.request))
        elif self._arms is None:
            code, text = "executor_gone", "the probes are still being loaded"
            self.send(messages.Refused(request=message.request, code=code, words=text, hint="try again in a second"))
        elif isinstance(message, messages.Arm):
            self._arms.arm(message)
        elif isinstance(message, messages.Clear):
            self._arms.clear(int(message.fault), "cleared")
            self.send(messages.Done(request=message.request))

    def _announce_ready(self) -> None:
        if self._front_ready and self._started:
            notify.ready("watching")

    def _tell_everything(self) -> None:
        for handle, descriptor in zip(self._handles, self._handle_fds, strict=True):
            self.send(handle, descriptor)
        for capability in self._capabilities:
            self.send(capability)
        for process in self._processes.values():
            self.send(process.seen)
            for library in process.libraries.values():
                self.send(library)
        for failure in self._failures.values():
            self.send(failure)
        for shed in self._sheds:
            self.send(shed)
        self._tell_attached()
        boot = self.procfs.boot_id() or ""
        self.send(messages.Started(version=messages.VERSION, pid=os.getpid(), restarts=self._front.restarts, boot_id=boot))

    def _tell_attached(self) -> None:
        if self._attacher is not None:
            for backend in self._tables:
                self.send(messages.Attached(sites=self._attacher.attached(backend), backend=backend))

    # --- programs --------------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        tree = headers.prepare(self.settings.headers, Path(self.settings.state_dir))
        multi = capabilities.uprobe_multi().state == "yes"
        pages = {"EVENT_PAGES": self.settings.event_pages, "PROCESS_PAGES": self.settings.process_pages}
        loadings = [
            loader.Loading(
                family,
                python=self.settings.system_python,
                sources=loader.program_sources(),
                headers=tree.path,
                version_code=tree.version_code,
                pages=pages,
            )
            for family in loader.families(uprobe_multi=multi)
        ]
        waiting = {loading.fileno(): loading for loading in loadings}
        loaded: list[loader.Loaded] = []
        try:
            for descriptor, loading in waiting.items():
                self.watch(descriptor, lambda loading=loading: self._take_loaded(loading, loaded))  # type: ignore[misc]
            while len(loaded) < len(loadings) and not self._stopping:
                self._turn(_TICK)
        finally:
            for loading in loadings:
                self.forget(loading.fileno())
                loading.close()
        for part in loaded:
            self._programs.update(part.programs)
            self._maps.update(part.maps)
            for name, words in part.missing.items():
                self.log("info", f"program {name} is not available on this kernel: {words[:200]}")
        if not self._stopping:
            self._put_to_work(multi)

    def _take_loaded(self, loading: loader.Loading, loaded: list[loader.Loaded]) -> None:
        self.forget(loading.fileno())
        loaded.append(loading.result())

    def _put_to_work(self, multi: bool) -> None:
        settings = self.settings
        os.setpriority(os.PRIO_PROCESS, 0, settings.nice)  # not before: compiling may wait for the ranks
        bpf.update(self._maps["settings"], c.c_uint32(0), abi.Settings(slow_ns=settings.slow_ns))
        for program, name in _RAW_TRACEPOINTS.items():
            if program in self._programs:
                self._links.append(bpf.attach_raw_tracepoint(self._programs[program], name))
        self._attacher = attach.Attacher(
            self._programs, self._maps, multi=multi, return_probes=settings.return_probes, limit=settings.guard_limit
        )
        if self._attacher.fileno() >= 0:
            self.watch(self._attacher.fileno(), self._on_changed)
        limits = limits_of(settings)
        self._arms = arms.Arms(
            maps=self._maps, procfs=self.procfs, loop=self, limits=limits, is_rank=self._is_rank, unwatched=self._unwatched
        )
        self._layouts = layouts.Layouts(maps=self._maps, loop=self, packages=settings.packages)
        for name in ("stats", "inflight", "comms", "counters", "held", "process_counters"):
            self._handles.append(messages.MapHandle(writable=0, name=name))
            self._handle_fds.append(bpf.read_only(self._maps[name]))
        for name in ("events", "process_events"):
            self._handles.append(messages.MapHandle(writable=1, name=name))
            self._handle_fds.append(self._maps[name])

    def _first_look(self) -> None:
        self._discovery = Discovery(
            self.procfs,
            [table_wanted(table) for table in self._tables.values()],
            clock=time.monotonic,
            interval=self.settings.scan_interval,
        )
        self.watch(self._discovery.fileno(), self._on_search)
        self._discover()
        self._started = True
        self._tell_everything()
        self._announce_ready()
        self.after(0.0, self._probe_capabilities)
        self.after(_TICK, self._tick)

    def _probe_capabilities(self) -> None:
        """In a child: it attaches probes and traces a process of its own, which takes up to a second in all."""
        reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                if not calls.die_with_parent(parent, signal.SIGKILL):
                    os._exit(status)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                    signal.signal(number, signal.SIG_DFL)
                os.setpriority(os.PRIO_PROCESS, 0, 10)
                found = capabilities.probe_all(system_python=self.settings.system_python, headers_root=self.settings.headers)
                states = {"no": 0, "yes": 1, "unknown": 2}
                for item in found:
                    line = messages.CapabilityFound(state=states[item.state], name=item.name, detail=item.detail, remedy=item.remedy)
                    writing.send(bytes(line))
                status = 0
            finally:
                os._exit(status)
        writing.close()
        reading.setblocking(False)
        self._checking = child
        self.watch(reading.fileno(), lambda: self._on_capability(reading, child))

    def _on_capability(self, reading: socket.socket, child: int) -> None:
        while True:
            try:
                data = reading.recv(messages.LARGEST)
            except BlockingIOError:
                return
            if not data:
                break
            message = messages.decode(data, {messages.CapabilityFound.KIND: messages.CapabilityFound})
            assert isinstance(message, messages.CapabilityFound)
            self._capabilities.append(message)
            self.send(message)
        self.forget(reading.fileno())
        reading.close()
        self._checking = 0
        os.waitpid(child, 0)

    # --- processes and libraries -----------------------------------------------------------------------------------------------

    def _discover(self) -> None:
        if self._discovery is not None:
            self._on_found(self._discovery.tick(time.monotonic()))

    def _on_search(self) -> None:
        if self._discovery is not None:
            self._on_found(self._discovery.on_readable())

    def _on_found(self, found: list[ProcessSeen | LibraryFound | SearchFailed | ProcessGone | ProcessExeced]) -> None:
        for item in found:
            if isinstance(item, ProcessSeen):
                self._on_process(item)
            elif isinstance(item, LibraryFound):
                self._on_library(item)
            elif isinstance(item, ProcessGone):
                self._on_gone(item.pid)
            elif isinstance(item, ProcessExeced):
                self._on_exec(item.pid)
            elif isinstance(item, SearchFailed):
                self._fail(0, "search", item.path, item.reason)
        if found:
            self._tell_attached()

    def _on_process(self, item: ProcessSeen) -> None:
        if item.pid in self._processes:
            if self._processes[item.pid].start_time == item.start_time:
                self._processes[item.pid].seen = process_message(item)
                self.send(self._processes[item.pid].seen)
                return
            self._on_gone(item.pid)
        process = Process(process_message(item))
        process.pidfd = exits.watch(item.pid)
        self._processes[item.pid] = process
        bpf.update(self._maps["ranks"], c.c_uint32(item.pid), c.c_uint32(1))
        if process.pidfd is not None:
            self.watch(process.pidfd, lambda: self._on_gone(item.pid))
        self.send(process.seen)

    def _on_exec(self, pid: int) -> None:
        """Another program, or the library unmapped; what it maps from here on is told anew."""
        process = self._processes.get(pid)
        if process is not None and self._attacher is not None:
            process.libraries.clear()
            self._attacher.leave(pid)
            if self._arms is not None:
                self._arms.on_exit(pid, "rank exec'd")

    def _on_changed(self) -> None:
        assert self._attacher is not None
        for file in self._attacher.detach_changed():
            for pid in file.users:
                self._sweep(pid)
            words = "it was written to in place while probes were attached: they are gone, a process that maps it from now on gets new ones"
            self._fail(0, "changed", file.path, words)
        self._tell_attached()

    def _on_library(self, item: LibraryFound) -> None:
        process = self._processes.get(item.pid)
        if process is None or self._attacher is None:
            return
        sites, problem = 0, ""
        try:
            sites = self._attach(item)
        except (attach.AttachError, OSError) as error:
            problem = str(error)
            self._fail(item.pid, error.reason if isinstance(error, attach.AttachError) else "open", item.path, problem)
        library = messages.LibraryMapped(
            pid=item.pid,
            start_time=item.start_time,
            device=item.device,
            inode=item.inode,
            sites=sites,
            backend=item.backend,
            version=item.version,
            path=item.path,
            problem=problem,
        )
        process.libraries[(item.device, item.inode, item.backend)] = library
        self.send(library)

    def _attach(self, item: LibraryFound) -> int:
        """Number of sites; what a file needs once is done with the first process that maps it."""
        assert self._attacher is not None
        table = self._tables[item.backend]
        before = self._attacher.files.get((item.device, item.inode, item.backend))
        file = self._attacher.attach(table, item)
        if file is before:
            return len(file.sites)
        if table.structure and self._layouts is not None and file.number:
            self._layouts.ask(file.number, item.open_path, table.structure, still=lambda: file.number != 0)
        for symbol in file.skipped:
            self._fail(item.pid, "instruction", item.path, f"{symbol} begins with an instruction that the kernel cannot probe")
        return len(file.sites)

    def _fail(self, pid: int, reason: str, path: str, text: str) -> None:
        failure = messages.AttachFailed(pid=pid, reason=reason, path=path, words=text)
        if len(self._failures) < 1000:
            self._failures[path] = failure
        self.send(failure)

    def _is_rank(self, pid: int, start_time: int) -> bool:
        process = self._processes.get(pid)
        return process is not None and process.start_time == start_time and self.procfs.start_time(pid) == start_time

    def _unwatched(self, pid: int, point: int, backend: int) -> str:
        """Why a fault on these calls of a process would do nothing; empty where a probe stands on one of them."""
        assert self._attacher is not None
        process = self._processes.get(pid)
        files = [self._attacher.files[key] for key in process.libraries if key in self._attacher.files] if process else []
        mapped = [file for file in files if backend in (0, abi.BACKEND_CODES[file.backend])]
        if not files or any(file.reaches(point) for file in mapped):
            return ""  # no library yet: it may come before the deadline
        calls = f"{abi.OPS[point]} call" if point else "call"
        shed = sorted(symbol for file in mapped for symbol in file.shed)
        if shed:
            return f"no {calls} of process {pid} carries a probe: the guard detached {', '.join(shed[:3])}, hit too often"
        return f"no {calls} of process {pid} carries a probe: {', '.join(sorted({file.backend for file in files}))} has none to offer"

    def _on_gone(self, pid: int) -> None:
        process = self._processes.pop(pid, None)
        if process is None:
            return
        ended = exits.UNKNOWN
        if process.pidfd is not None:
            ended = exits.how(pid, process.pidfd)
            self.forget(process.pidfd)
            os.close(process.pidfd)
        if self._arms is not None:
            self._arms.on_exit(pid)
        if self._attacher is not None:
            self._attacher.leave(pid)
        bpf.delete(self._maps["ranks"], c.c_uint32(pid))
        self._sweep(pid)
        start = process.start_time
        self.send(messages.ProcessEnded(pid=pid, start_time=start, code=ended.code, signal=ended.signal, known=int(ended.known)))
        self.after(self.settings.expire_after, lambda: self._forget_counts(pid))

    def _sweep(self, pid: int) -> None:
        """Calls that will never return."""
        for key, value in bpf.read_all(self._maps["inflight"], abi.InflightKey, abi.Inflight, 65536):
            if value.tgid == pid:
                bpf.delete(self._maps["inflight"], key)

    def _forget_counts(self, pid: int) -> None:
        """Counters stay readable for a while after the exit, so that the last scrape is complete; then their entries are freed."""
        if pid in self._processes:
            return  # the number is another process's by now; its counts go on in the same entries until it ends
        for name, key in (("stats", abi.StatKey), ("comms", abi.CommKey), ("groups", abi.GroupKey)):
            for entry in [entry for entry in bpf.keys(self._maps[name], key) if entry.tgid == pid]:
                bpf.delete(self._maps[name], entry)

    # --- reload ----------------------------------------------------------------------------------------------------------------

    def adopt(self, slim: dict[str, Any]) -> None:
        """Take the executor's part of reloaded settings; what is not reloadable in it is as before."""
        self.settings = Settings(**slim)
        if self._arms is not None:
            self._arms.limits = limits_of(self.settings)

    def restart_front(self) -> bool:
        """End the front in good order and start another with the environment as it is then; False where none runs just now."""
        channel = self._front.channel
        if channel is None:
            return False
        if self._arms is not None:
            self._arms.clear(0, "settings reloaded")
        self.after(_FRONT_ENDS, lambda: self._front.end() if self._front.channel is channel else None)
        self.after(_FRONT_ENDS + 5.0, lambda: self._lose_front("it does not end") if self._front.channel is channel else None)
        return True

    def replace_front(self, why: str) -> None:
        """End the front at once and start another; nothing where none runs, for then the next is on its way."""
        if self._front.channel is not None:
            self._lose_front(why)

    # --- once a second ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.after(_TICK, self._tick)
        if self._heartbeat.silent:
            self._lose_front(f"it has been silent for {heartbeat.PATIENCE:.0f} s")
        if self._heartbeat.good:
            notify.watchdog()
        if self._attacher is None:
            return
        expired = self._attacher.expire(self.settings.linger)
        sheds = self._attacher.guard()
        for shed in sheds:
            line = messages.Shed(rate=shed.rate, limit=self.settings.guard_limit, backend=shed.backend, symbol=shed.symbol, path=shed.path)
            self._sheds.append(line)
            self.send(line)
        if sheds or expired:
            self._tell_attached()

    # --- stop ------------------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._stopping = True
        notify.stopping()
        if self._arms is not None:
            self._arms.kill_all()
        if self._checking:
            os.kill(self._checking, signal.SIGKILL)
            os.waitpid(self._checking, 0)
        if self._layouts is not None:
            self._layouts.close()
        if self._discovery is not None:
            self._discovery.close()
        self._reload.close()
        self._front.stop(5.0)
        if self._attacher is not None:
            self._attacher.detach_all()
        for link in self._links:
            os.close(link)


def limits_of(settings: Settings) -> arms.Limits:
    """What the executor allows by itself."""
    return arms.Limits(settings.faults_enabled, settings.max_duration_ms, settings.max_active, settings.off_switch)


def table_wanted(table: Table) -> Wanted:
    """The part of a table that discovery needs."""
    return Wanted(table.backend, table.markers, table.exact, table.prefixes, table.version, table.version_file)


def process_message(item: ProcessSeen) -> messages.ProcessSeen:
    """As the front is told."""
    pids = (c.c_uint32 * 8)(*item.namespace_pids[:8])
    environ = "\n".join(f"{name}={value[:512]}" for name, value in item.environ.items() if "\n" not in value)
    return messages.ProcessSeen(
        pid=item.pid,
        start_time=item.start_time,
        parent=item.parent,
        uid=item.uid,
        name=item.name,
        namespace_pids=pids,
        environ=environ,
    )


def main() -> int:
    """Entry of the slim process: one argument, the settings as JSON."""
    settings = Settings(**json.loads(sys.argv[1]))
    return Executor(settings).run()
