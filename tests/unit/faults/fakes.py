"""An executor, a journal, ranks and a loop whose answers, failures and time a test decides."""

import asyncio

import msgspec
from singularityd.errors import ExecutorGone, JournalUnavailable, NoSuchRank
from singularityd.faults.journal import number_of
from singularityd.faults.limits import FaultLimits
from singularityd.faults.orders import Armed
from singularityd.faults.service import FaultService
from singularityd.model import Library, Rank

ARMED = Armed(mechanism="ptrace", signal=23, threads=5, delay=0.004)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time moves only by `advance`, so that minutes of deadlines take no time."""

    now = 1000.0

    def time(self):
        return self.now

    def do(self, awaitable):
        async def soon():
            return await awaitable

        return self.run_until_complete(soon())

    def settle(self, turns=20):
        async def turn():
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run_until_complete(turn())

    def advance(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.settle(8)


class InlineWorker:
    """Makes the call at once; the answer comes a turn of the loop later, or when `hold` is lifted."""

    def __init__(self):
        self.held = None
        self.closed = False

    def hold(self):
        self.held = []

    def lift(self):
        waiting, self.held = self.held, None
        for start in waiting:
            start()

    def run(self, function, *arguments):
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def start():
            try:
                result = function(*arguments)
            except Exception as error:
                loop.call_soon(lambda error=error: future.done() or future.set_exception(error))
            else:
                loop.call_soon(lambda: future.done() or future.set_result(result))

        if self.held is None:
            start()
        else:
            self.held.append(start)
        return future

    def close(self, wait):
        self.closed = True


class FakeJournal:
    """What a disk keeps over a restart; `failing` makes every call fail, as a full disk does."""

    def __init__(self):
        self.rows = {}
        self.last = 0
        self.failing = False
        self.calls = []
        self.notices = []

    def _check(self, name):
        self.calls.append(name)
        if self.failing is True or self.failing == name:
            raise JournalUnavailable("the journal /j cannot be used: disk full", hint="make room")

    def create(self, fault):
        self._check("create")
        self.last += 1
        made = msgspec.structs.replace(fault, id=f"f{self.last}")
        self.rows[self.last] = made
        return made

    def update(self, fault):
        self._check("update")
        self.rows[number_of(fault.id)] = fault

    def close_open(self, reason):
        self._check("close_open")
        closed = [
            msgspec.structs.replace(row, state="ended", ending=reason) for row in self.rows.values() if row.state in ("arming", "armed")
        ]
        self.rows |= {number_of(row.id): row for row in closed}
        return closed

    def get(self, fault_id):
        self._check("get")
        return self.rows.get(number_of(fault_id))

    def history(self, limit):
        self._check("history")
        return sorted(self.rows.values(), key=lambda row: -number_of(row.id))[:limit]

    def close(self):
        self.calls.append("close")

    def take_notices(self):
        taken, self.notices = self.notices, []
        return taken


class FakeExecutor:
    """Arms when told to (`manual`), or at once. `armed`: what stands armed in it, with the hits it counted."""

    def __init__(self, journal=None):
        self.journal = journal
        self.link = None
        self.manual = False
        self.silent_on_clear = False
        self.hang_on_clear = False
        self.refusal = None
        self.orders = []
        self.waiting = {}
        self.armed = {}
        self.cleared = []
        self.states_at_arm = []

    async def arm(self, order):
        self.orders.append(order)
        if self.journal is not None:
            self.states_at_arm.append(self.journal.rows[order.number].state)
        if self.manual:
            future = self.waiting[order.number] = asyncio.get_running_loop().create_future()
            await future
        if self.refusal is not None:
            raise self.refusal
        self.armed[order.number] = 0
        return ARMED

    def answer(self, number, error=None):
        future = self.waiting.pop(number)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    async def clear(self, number):
        self.cleared.append(number)
        if self.hang_on_clear:
            await asyncio.get_running_loop().create_future()
        if number in self.armed and self.silent_on_clear:
            del self.armed[number]
        elif number in self.armed:
            self.end(number, "cleared")

    def hit(self, number, tid=812):
        self.armed[number] += 1
        self.link.on_hit(number, tid=tid, op="allreduce", comm="ab12cd34", index=self.armed[number], at=5.0)

    def end(self, number, reason="deadline", seen=None):
        hits = self.armed.pop(number)
        self.link.on_ended(number, reason=reason, hits=hits, seen=seen if seen is not None else hits)

    def die(self):
        self.armed.clear()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ExecutorGone("the executor died"))
        self.waiting.clear()


class Link:
    """Calls the service as the link does: on the loop."""

    def __init__(self, service, loop):
        self._service = service
        self._loop = loop

    def __getattr__(self, name):
        method = getattr(self._service, name)

        def call(*arguments, **named):
            async def inside():
                return method(*arguments, **named)

            return method(*arguments, **named) if self._loop.is_running() else self._loop.run_until_complete(inside())

        return call


class FakeRanks:
    """Ranks 0 to 3 of job `tiny`."""

    def __init__(self, count=4):
        self.ranks = {number: rank(number) for number in range(count)}

    def resolve(self, number, job=""):
        if number not in self.ranks:
            raise NoSuchRank(f"no rank {number} here", hint="ranks 0-3")
        return self.ranks[number]

    def jobs(self):
        found = {}
        for one in self.ranks.values():
            found.setdefault(one.job, []).append(one)
        return {job: tuple(ranks) for job, ranks in found.items()}

    def change(self, number, **values):
        self.ranks[number] = msgspec.structs.replace(self.ranks[number], **values)


def rank(number, **values):
    gloo = Library(backend="gloo", path="/lib/libtorch_cpu.so", device=1, inode=2, version="2.13", sites=10)
    return Rank(pid=100 + number, start_time=7, job="tiny", rank=number, world=4, name="python", libraries=(gloo,), **values)


class FakeBus:
    def __init__(self):
        self.events = []

    def publish(self, event):
        self.events.append(event)
        return event

    def kinds(self, fault=None):
        return [event.kind for event in self.events if fault in (None, event.fault)]

    def texts(self):
        return [event.text for event in self.events]


class World:
    """A service with fakes all around, in one place for the tests."""

    def __init__(self, journal=None, **limits):
        self.journal = journal or FakeJournal()
        self.executor = FakeExecutor(self.journal if isinstance(self.journal, FakeJournal) else None)
        self.ranks = FakeRanks()
        self.bus = FakeBus()
        self.worker = InlineWorker()
        self.service = FaultService(
            registry=self.ranks,
            executor=self.executor,
            journal=self.journal,
            bus=self.bus,
            clock=asyncio.get_running_loop().time,
            limits=FaultLimits(**({"per_minute": 10_000, "max_ranks_per_job": 100, "budget": 86_400.0} | limits)),
            worker=self.worker,
        )
        self.link = self.executor.link = Link(self.service, asyncio.get_running_loop())
