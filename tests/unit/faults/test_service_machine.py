"""The fault service against an executor, a journal and a clock that do their worst, in any order."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from singularityd.errors import RankGone, SingularityError
from singularityd.faults.journal import number_of
from singularityd.model import FaultSpec

from .fakes import FakeJournal, VirtualLoop, World

DURATION = 5.0
UNHEARD = DURATION + 2.0 + 3.0  # the deadline, the silence that is allowed, and the time for the last question
RANKS = st.integers(0, 3)


class Faults(RuleBasedStateMachine):
    """The executor's own view (`armed`) and the journal's rows are the truth that the service is held against."""

    def __init__(self):
        super().__init__()
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.journal = FakeJournal()
        self.ids = []
        self.lost = False
        self.stopped = False
        self.tasks = []
        self.hits = {}
        self.begin()

    def begin(self):
        async def make():
            return World(journal=self.journal)

        self.inherited = self.journal.last
        self.world = self.loop.do(make())
        self.executor = self.world.executor
        self.executor.manual = True
        self.watch_ids()
        self.loop.do(self.world.service.start())

    def watch_ids(self):
        create = type(self.journal).create

        def watched(fault):
            made = create(self.journal, fault)
            self.ids.append(made.id)
            return made

        self.journal.create = watched

    def start(self, *awaitables):
        for awaitable in awaitables:
            task = self.loop.create_task(awaitable)
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self.tasks.append(task)
        self.loop.settle()

    # --- what callers do ---

    @rule(rank=RANKS)
    def inject(self, rank):
        self.start(self.world.service.inject(FaultSpec(pattern="timeout", rank=rank, duration=DURATION), "uid 0"))

    @rule(rank=RANKS)
    def inject_twice_at_once(self, rank):
        spec = FaultSpec(pattern="timeout", rank=rank, duration=DURATION)
        self.start(self.world.service.inject(spec, "uid 0"), self.world.service.inject(spec, "uid 0"))

    @rule(which=st.sampled_from(["all", "f1", "f2", "f3", "f4"]))
    def clear(self, which):
        self.start(self.world.service.clear(which, "uid 0"))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def give_up(self, data):
        data.draw(st.sampled_from(self.tasks)).cancel()
        self.loop.settle()

    # --- what the executor does ---

    @precondition(lambda self: self.executor.waiting)
    @rule(data=st.data(), well=st.booleans())
    def answer(self, data, well):
        number = data.draw(st.sampled_from(sorted(self.executor.waiting)))
        self.executor.answer(number, None if well else RankGone("gone"))
        self.loop.settle()

    @precondition(lambda self: self.executor.armed)
    @rule(data=st.data(), silent=st.booleans())
    def hit(self, data, silent):
        """Silent: the event was lost; the executor's last word makes up for it."""
        number = data.draw(st.sampled_from(sorted(self.executor.armed)))
        self.hits[number] = self.hits.get(number, 0) + 1
        if silent:
            self.executor.armed[number] += 1
        else:
            self.executor.hit(number)

    @precondition(lambda self: self.executor.armed)
    @rule(data=st.data(), reason=st.sampled_from(["deadline", "rank exited"]))
    def end(self, data, reason):
        number = data.draw(st.sampled_from(sorted(self.executor.armed)))
        self.executor.end(number, reason)
        self.loop.settle()
        self.check_hits(number)

    @rule()
    def executor_dies(self):
        self.lost = True
        self.loop.do(self.world.service.on_executor_lost())
        self.executor.die()
        self.loop.settle()
        assert not self.world.service.active()

    @rule()
    def executor_comes_back(self):
        self.lost = False
        self.world.service.executor_back()

    @rule(silent=st.booleans(), hanging=st.booleans())
    def executor_manners(self, silent, hanging):
        self.executor.silent_on_clear = silent
        self.executor.hang_on_clear = hanging

    # --- what the disk and the clock do ---

    @rule(failing=st.sampled_from([False, True, "create", "update", "close_open"]))
    def disk(self, failing):
        self.journal.failing = failing

    @rule(held=st.booleans())
    def disk_hangs(self, held):
        if held and self.world.worker.held is None:
            self.world.worker.hold()
        elif not held and self.world.worker.held is not None:
            self.world.worker.lift()
            self.loop.settle()

    @rule(seconds=st.sampled_from([0.3, 1.0, 6.0, 20.0]))
    def time_passes(self, seconds):
        """The executor keeps its own deadlines, as the real one does."""
        self.loop.advance(seconds)

    @rule()
    def restart(self):
        """The front dies at any moment; the executor lets go of everything then, and a new front reads the journal."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.world.worker.held = None
        self.loop.settle()
        self.tasks = []
        self.lost = False
        open_before = [number for number, row in self.journal.rows.items() if row.state in ("arming", "armed")]
        self.begin()
        if not self.journal.failing:
            self.loop.settle()
            for number in open_before:
                assert self.journal.rows[number].ending == "daemon restarted"

    # --- what must hold ---

    def check_hits(self, number):
        """Nothing that the executor counted may be missing once it has spoken its last word."""
        fault = self.world.service._known(number).fault
        assert fault.hits == self.hits.get(number, 0)

    @invariant()
    def nothing_is_armed_without_a_row(self):
        for number in self.executor.armed:
            assert number in self.journal.rows

    @invariant()
    def every_order_found_its_row_arming(self):
        assert set(self.executor.states_at_arm) <= {"arming"}

    @invariant()
    def ids_are_unique(self):
        assert len(self.ids) == len(set(self.ids))

    @invariant()
    def one_fault_a_rank(self):
        believed = [(fault.pid, fault.start_time) for fault in self.world.service.active()]
        assert len(believed) == len(set(believed))

    @invariant()
    def an_armed_fault_is_known_or_being_taken_back(self):
        """What the executor has armed is believed armed, unless the executor was told to clear it."""
        believed = {number_of(fault.id) for fault in self.world.service.active()}
        for number in self.executor.armed:
            assert number in believed or number in self.executor.cleared

    @invariant()
    def states_make_sense(self):
        for row in self.journal.rows.values():
            assert (row.state in ("ended", "refused")) == bool(row.ending)
        for fault in self.world.service.active():
            assert fault.state in ("arming", "armed")
            assert not fault.ending

    def teardown(self):
        """Whatever was going on: with time every fault ends, and when the disk works the journal says so."""
        self.journal.failing = False
        if self.world.worker.held is not None:
            self.world.worker.lift()
        self.loop.advance(UNHEARD + 15)
        assert not self.world.service.active(), "an armed fault must end without the executor's help"
        assert not self.world.service._actives
        assert {row.state for row in self.journal.rows.values()} <= {"ended", "refused"}
        for task in self.tasks:
            assert task.done()
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), SingularityError)
        kinds = [(event.fault, event.kind) for event in self.world.bus.events]
        for number in {number_of(fault) for fault, _ in kinds if fault}:
            told = [kind for fault, kind in kinds if fault == f"f{number}"]
            overs = [kind for kind in told if kind in ("fault_ended", "fault_refused")]
            assert len(overs) == 1, told
            assert "fault_armed" not in told[1:], "armed is told first, once"
        stopping = self.loop.create_task(self.world.service.stop())
        self.loop.advance(5)
        assert stopping.done()
        self.loop.close()
        asyncio.set_event_loop(None)


class StopAtAnyMoment(Faults):
    """The same, ended by SIGTERM instead of by patience."""

    def teardown(self):
        self.journal.failing = False
        self.executor.silent_on_clear = self.executor.hang_on_clear = False
        if self.world.worker.held is not None:
            self.world.worker.lift()
        stopping = self.loop.create_task(self.world.service.stop())
        self.loop.settle()
        for number in list(self.executor.waiting):
            self.executor.answer(number)
        self.loop.advance(25)
        assert stopping.done()
        assert stopping.exception() is None
        assert not self.world.service.active()
        assert set(self.executor.armed) <= set(self.executor.cleared), "the executor, which may hang, was told to clear everything"
        ours = [row for number, row in self.journal.rows.items() if number > self.inherited]
        assert {row.state for row in ours} <= {"ended", "refused"}
        self.loop.close()
        asyncio.set_event_loop(None)


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestStopAtAnyMoment = StopAtAnyMoment.TestCase
TestStopAtAnyMoment.settings = settings(max_examples=80, stateful_step_count=15, deadline=None)
