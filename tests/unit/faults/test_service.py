import asyncio

import pytest
from singularityd.errors import (
    AlreadyArmed,
    Busy,
    ExecutorGone,
    Failed,
    JournalUnavailable,
    KernelRefused,
    NoSuchFault,
    NoSuchRank,
    NotAllowed,
    RankGone,
    Refused,
)
from singularityd.faults import service as service_module
from singularityd.faults.journal import Journal
from singularityd.faults.service import FaultService
from singularityd.model import Fault, FaultSpec, Library
from singularityd.observe.bus import Bus
from singularityd.observe.recorder import Recorder

from .fakes import FakeExecutor, FakeJournal, FakeRanks, VirtualLoop, World

SPEC = FaultSpec(pattern="timeout", rank=3, point="allreduce", duration=5.0)


@pytest.fixture
def loop():
    made = VirtualLoop()
    asyncio.set_event_loop(made)
    yield made
    made.settle()
    left = asyncio.all_tasks(made)
    for task in left:
        task.cancel()
    made.settle()
    made.close()
    asyncio.set_event_loop(None)


def world_in(loop, **arguments):
    async def make():
        return World(**arguments)

    made = loop.do(make())
    loop.do(made.service.start())
    return made


@pytest.fixture
def world(loop):
    return world_in(loop)


def inject(loop, world, spec=SPEC, who="uid 0"):
    return loop.do(world.service.inject(spec, who))


def begin(loop, world, spec=SPEC):
    """Start an injection and let it run as far as it gets."""
    task = loop.create_task(world.service.inject(spec, "uid 0"))
    loop.settle()
    return task


def rank_spec(number, **values):
    return FaultSpec(**({"pattern": "timeout", "rank": number, "duration": 5.0} | values))


def test_the_row_is_written_before_the_executor_is_asked_and_says_armed_before_anybody_hears(loop, world):
    published_when = []
    world.bus.publish = lambda event: published_when.append((event.kind, world.journal.rows[1].state)) or event
    fault = inject(loop, world)
    assert fault.state == "armed"
    assert (fault.id, fault.job, fault.pid, fault.start_time, fault.mechanism, fault.who) == ("f1", "tiny", 103, 7, "ptrace", "uid 0")
    assert world.executor.states_at_arm == ["arming"]
    assert world.journal.calls == ["close_open", "history", "create", "update"]
    assert published_when == [("fault_armed", "armed")]


def test_the_order_carries_the_whole_request(loop, world):
    inject(loop, world, rank_spec(3, point="allreduce", backend="gloo", milliseconds=500, probability=25.0, seed=9, count=4))
    (order,) = world.executor.orders
    assert (order.number, order.pid, order.start_time, order.rank) == (1, 103, 7, 3)
    assert (order.op, order.backend, order.milliseconds, order.probability) == ("allreduce", "gloo", 500, 25.0)
    assert (order.duration, order.seed, order.count) == (5.0, 9, 4)


def test_from_armed_to_ended_every_event_is_a_sentence(loop, world):
    inject(loop, world)
    world.executor.hit(1)
    world.link.on_held(1, 812, 5.0)
    world.link.on_released(1, 812, 10.0, 4.98)
    world.executor.end(1, "deadline", seen=3)
    assert world.bus.kinds() == ["fault_armed", "fault_hit", "fault_held", "fault_released", "fault_ended"]
    assert world.bus.texts() == [
        "fault f1 (timeout) is armed on rank 3 of job tiny for 5s by ptrace: every allreduce call, held until the deadline",
        "fault f1 (timeout) hit rank 3 of job tiny in allreduce of communicator ab12cd34: thread 812",
        "fault f1 (timeout) holds rank 3 of job tiny: thread 812",
        "fault f1 (timeout) let rank 3 of job tiny go on: thread 812, held for 4.980 s",
        "fault f1 (timeout) on rank 3 of job tiny ended: deadline; 1 call was hit of 3 seen",
    ]
    assert {(event.fault, event.job, event.rank, event.pid) for event in world.bus.events} == {("f1", "tiny", 3, 103)}
    loop.settle()
    row = world.journal.rows[1]
    assert (row.state, row.ending, row.hits, row.seen) == ("ended", "deadline", 1, 3)


def test_a_journal_that_fails_before_arming_arms_nothing(loop, world):
    world.journal.failing = "create"
    with pytest.raises(JournalUnavailable) as caught:
        inject(loop, world)
    assert caught.value.hint == "make room"
    assert world.executor.orders == []
    assert world.bus.kinds() == ["fault_refused"]
    world.journal.failing = False
    assert inject(loop, world).state == "armed", "the rank did not stay reserved"


def test_a_journal_that_fails_after_arming_clears_at_once_and_tells(loop, world):
    world.journal.failing = "update"
    with pytest.raises(JournalUnavailable):
        inject(loop, world)
    assert world.executor.armed == {}
    assert world.executor.cleared == [1]
    assert world.bus.kinds() == ["fault_armed", "fault_ended"]
    assert "journal failed" in world.bus.texts()[-1]
    assert world.service.active() == []
    world.journal.failing = False
    loop.advance(6)
    assert world.journal.rows[1].ending == "journal failed", "written when the journal works again"


def test_a_defect_in_the_journal_does_not_reserve_the_rank_for_ever(loop, world):
    world.journal.create = lambda fault: 1 // 0
    with pytest.raises(ZeroDivisionError):
        inject(loop, world)
    del world.journal.create
    assert inject(loop, world).state == "armed"


def test_a_journal_that_hangs_arms_nothing_and_its_late_row_is_closed(loop, world):
    world.worker.hold()
    task = begin(loop, world)
    loop.advance(5.5)
    assert isinstance(task.exception(), JournalUnavailable)
    assert "did not answer" in task.exception().text
    world.worker.lift()
    loop.advance(1)
    assert world.executor.orders == []
    assert world.journal.rows[1].state == "refused"


def test_a_refusal_is_journaled_and_goes_to_the_caller(loop, world):
    world.executor.refusal = RankGone("process 103 is gone", hint="singularityctl ranks")
    with pytest.raises(RankGone) as caught:
        inject(loop, world)
    assert caught.value.hint == "singularityctl ranks"
    loop.settle()
    row = world.journal.rows[1]
    assert (row.state, row.ending) == ("refused", "process 103 is gone")
    assert world.bus.texts() == ["fault f1 (timeout) for rank 3 of job tiny was not armed: process 103 is gone"]
    world.executor.refusal = None
    assert inject(loop, world).id == "f2"


@pytest.mark.parametrize("state", ["exited", "dying"])
def test_a_rank_that_is_ending_is_refused_before_anything_is_written(loop, world, state):
    world.ranks.change(3, state=state)
    with pytest.raises(RankGone, match="rank 3 of job tiny"):
        inject(loop, world)
    assert world.journal.rows == {}


def test_an_unknown_rank_writes_nothing(loop, world):
    with pytest.raises(NoSuchRank):
        inject(loop, world, rank_spec(7))
    assert world.journal.calls == ["close_open", "history"]


def test_a_fault_that_could_never_hit_is_refused(loop, world):
    with pytest.raises(Refused, match="does not use nccl: it has gloo"):
        inject(loop, world, rank_spec(3, backend="nccl"))
    broken = Library(backend="gloo", path="/lib/x", device=1, inode=2, version="", sites=0, problem="stripped")
    world.ranks.change(3, libraries=(broken,))
    with pytest.raises(Refused, match="stripped"):
        inject(loop, world)
    world.ranks.change(3, libraries=())
    assert inject(loop, world).state == "armed", "a library may be loaded before the deadline"


def test_limits(loop):
    world = world_in(loop, max_duration=6.0, max_active=2, per_minute=3)
    with pytest.raises(NotAllowed, match="up to 6s, not 7s"):
        inject(loop, world, rank_spec(0, duration=7.0))
    inject(loop, world, rank_spec(0))
    inject(loop, world, rank_spec(1))
    with pytest.raises(Busy, match="2 faults are armed"):
        inject(loop, world, rank_spec(2))
    world.executor.end(1)
    world.executor.end(2)
    inject(loop, world, rank_spec(2))
    with pytest.raises(Busy, match="within a minute") as caught:
        inject(loop, world, rank_spec(0))
    assert "try again in 60 s" in caught.value.hint
    loop.advance(61)
    assert inject(loop, world, rank_spec(0)).state == "armed"


def test_switched_off(loop):
    world = world_in(loop, mode="off")
    with pytest.raises(NotAllowed) as caught:
        inject(loop, world)
    assert 'faults.mode = "admin"' in caught.value.hint
    assert world.journal.rows == {}


def test_one_fault_a_rank(loop, world):
    inject(loop, world)
    with pytest.raises(AlreadyArmed, match="rank 3 of job tiny has fault f1") as caught:
        inject(loop, world)
    assert "singularityctl clear f1" in caught.value.hint
    assert inject(loop, world, rank_spec(2)).id == "f2"


@pytest.mark.parametrize("count", [2, 5])
def test_of_several_requests_for_a_rank_at_once_exactly_one_is_armed(loop, world, count):
    async def all_at_once():
        return await asyncio.gather(*(world.service.inject(SPEC, "uid 0") for _ in range(count)), return_exceptions=True)

    results = loop.do(all_at_once())
    assert sum(isinstance(result, AlreadyArmed) for result in results) == count - 1
    assert len(world.executor.armed) == 1
    assert len(world.journal.rows) == 1


def test_clear_ends_and_says_who(loop, world):
    inject(loop, world)
    world.executor.hit(1)
    (fault,) = loop.do(world.service.clear("f1", "uid 1000"))
    assert (fault.state, fault.ending, fault.hits) == ("ended", "cleared", 1)
    assert "ended: cleared by uid 1000; 1 call was hit" in world.bus.texts()[-1]
    assert loop.do(world.service.clear("f1", "uid 0")) == [fault], "clearing again changes nothing"


def test_clear_all_and_clear_nothing(loop, world):
    for number in range(3):
        inject(loop, world, rank_spec(number))
    cleared = loop.do(world.service.clear("all", "uid 0"))
    assert [(fault.id, fault.ending) for fault in cleared] == [("f1", "cleared"), ("f2", "cleared"), ("f3", "cleared")]
    assert loop.do(world.service.clear("all", "uid 0")) == []
    for wrong in ("f9", "x", "", "f" * 500, "\ud800"):
        with pytest.raises(NoSuchFault, match="no fault"):
            loop.do(world.service.clear(wrong, "uid 0"))


def test_clear_while_the_executor_is_arming(loop, world):
    world.executor.manual = True
    injecting = begin(loop, world)
    clearing = loop.create_task(world.service.clear("f1", "uid 0"))
    loop.settle()
    assert not clearing.done()
    world.executor.answer(1)
    loop.settle()
    assert [fault.ending for fault in clearing.result()] == ["cleared"]
    assert injecting.result().state == "ended"
    assert world.executor.armed == {}
    assert world.bus.kinds("f1") == ["fault_armed", "fault_ended"]


def test_clear_while_the_journal_is_written_never_reaches_the_executor(loop, world):
    world.worker.hold()
    injecting = begin(loop, world)
    clearing = loop.create_task(world.service.clear("all", "uid 0"))
    loop.settle()
    world.worker.lift()
    loop.settle()
    assert isinstance(injecting.exception(), Refused)
    assert [fault.state for fault in clearing.result()] == ["refused"]
    assert world.executor.orders == []


def test_a_caller_that_gives_up_leaves_nothing_armed(loop, world):
    world.executor.manual = True
    injecting = begin(loop, world)
    injecting.cancel()
    loop.settle()
    world.executor.answer(1)
    loop.settle()
    assert world.executor.armed == {}
    assert world.journal.rows[1].ending == "caller gone"


def test_an_executor_that_does_not_clear_is_told_and_the_deadline_stands(loop, world):
    inject(loop, world)
    world.executor.hang_on_clear = True
    clearing = loop.create_task(world.service.clear("f1", "uid 0"))
    loop.advance(2.5)
    assert isinstance(clearing.exception(), ExecutorGone)
    assert [fault.state for fault in world.service.active()] == ["armed"]
    world.executor.end(1)
    assert loop.do(world.service.get("f1")).ending == "deadline"


def test_the_backstop_asks_to_clear_and_gives_up_what_is_silent(loop, world):
    world.executor.silent_on_clear = True
    inject(loop, world)
    loop.advance(6.5)
    assert world.executor.cleared == []
    loop.advance(1.0)
    assert world.executor.cleared == [1]
    loop.advance(1.5)
    fault = loop.do(world.service.get("f1"))
    assert (fault.state, fault.ending) == ("ended", "executor silent")
    assert inject(loop, world).state == "armed"


def test_the_backstop_works_with_an_executor_that_hangs_or_breaks(loop, world):
    inject(loop, world)
    world.executor.hang_on_clear = True
    loop.advance(11)
    assert world.service.active() == []

    async def broken(number):
        raise OSError("socket")

    world.executor.clear = broken
    inject(loop, world)
    loop.advance(11)
    assert world.service.active() == []


def test_an_end_in_time_keeps_the_backstop_quiet(loop, world):
    inject(loop, world)
    world.executor.end(1)
    loop.advance(20)
    assert world.executor.cleared == []
    assert world.bus.kinds() == ["fault_armed", "fault_ended"]


def test_hits_that_come_before_the_answer_are_told_after_armed(loop, world):
    world.executor.manual = True
    injecting = begin(loop, world)
    world.link.on_hit(1, tid=5, op="allreduce", comm="", index=0, at=1.0)
    world.link.on_ended(1, reason="deadline", hits=2, seen=9)
    world.executor.answer(1)
    loop.settle()
    assert world.bus.kinds() == ["fault_armed", "fault_hit", "fault_ended"]
    assert (injecting.result().hits, injecting.result().seen, injecting.result().ending) == (2, 9, "deadline")


def test_the_last_word_on_hits_is_the_executors(loop, world):
    inject(loop, world)
    world.executor.hit(1)
    world.executor.armed[1] = 4
    world.executor.end(1, seen=10)
    world.link.on_hit(1, tid=9, op="allreduce", comm="", index=4, at=1.0)
    fault = loop.do(world.service.get("f1"))
    assert (fault.hits, fault.seen) == (4, 10)
    assert world.bus.kinds()[-1] == "fault_hit", "a hit that was told late is still told"


def test_words_that_come_after_the_fault_was_given_up_still_count(loop, world):
    inject(loop, world)
    world.executor.hit(1)
    loop.do(world.service.on_executor_lost())
    world.link.on_hit(1, tid=9, op="allreduce", comm="", index=1, at=1.0)
    assert loop.do(world.service.get("f1")).hits == 2
    world.link.on_ended(1, reason="deadline", hits=3, seen=3)
    loop.advance(1)
    assert (world.journal.rows[1].hits, world.journal.rows[1].ending) == (3, "executor died")


def test_words_about_unknown_faults_are_ignored(loop, world):
    world.link.on_hit(99, tid=1, op="x", comm="", index=0, at=0.0)
    world.link.on_held(99, 1, 0.0)
    world.link.on_released(99, 1, 0.0, 0.0)
    world.link.on_ended(99, reason="x", hits=0, seen=0)
    assert world.bus.events == []


def test_hits_reach_the_journal_while_the_fault_is_armed(loop, world):
    inject(loop, world)
    for _ in range(50):
        world.executor.hit(1)
    before = len(world.journal.calls)
    loop.advance(0.6)
    assert world.journal.rows[1].hits == 50
    assert world.journal.rows[1].state == "armed"
    assert len(world.journal.calls) == before + 1, "one write for all of them"


def test_a_hit_during_arming_does_not_turn_the_row_back(loop, world):
    world.executor.manual = True
    begin(loop, world)
    world.link.on_hit(1, tid=5, op="allreduce", comm="", index=0, at=1.0)
    world.executor.answer(1)
    loop.settle()
    loop.advance(1)
    assert (world.journal.rows[1].state, world.journal.rows[1].hits) == ("armed", 1)


def test_an_executor_that_dies_takes_every_fault_with_it(loop, world):
    inject(loop, world, rank_spec(0))
    world.executor.manual = True
    ordered = begin(loop, world, rank_spec(1))
    world.worker.hold()
    writing = begin(loop, world, rank_spec(2))
    loop.do(world.service.on_executor_lost())
    world.executor.die()
    world.worker.lift()
    loop.settle()
    assert isinstance(ordered.exception(), ExecutorGone)
    assert isinstance(writing.exception(), ExecutorGone)
    assert world.service.active() == []
    assert {row.state for row in world.journal.rows.values()} <= {"ended", "refused"}
    assert world.journal.rows[1].ending == "executor died"
    with pytest.raises(ExecutorGone):
        inject(loop, world, rank_spec(3))
    world.executor.manual = False
    world.service.executor_back()
    assert inject(loop, world, rank_spec(3)).state == "armed"


def test_a_yes_that_comes_after_the_patience_is_taken_back(loop, world):
    world.executor.manual = True
    injecting = begin(loop, world)
    loop.advance(5.5)
    assert isinstance(injecting.exception(), ExecutorGone)
    assert world.executor.cleared == [1]
    world.executor.answer(1)
    loop.settle()
    assert world.executor.cleared == [1, 1]
    assert world.executor.armed == {}
    assert world.journal.rows[1].state == "refused"


def test_an_error_without_a_name_is_made_one_and_cleared_for_safety(loop, world):
    world.executor.refusal = OSError("socket")
    with pytest.raises(Failed, match="socket"):
        inject(loop, world)
    loop.settle()
    assert world.executor.cleared == [1]
    assert world.journal.rows[1].state == "refused"


def test_a_kernel_refusal_keeps_its_class(loop, world):
    world.executor.refusal = KernelRefused("EPERM")
    with pytest.raises(KernelRefused):
        inject(loop, world)


def test_wait_returns_at_the_end(loop, world):
    inject(loop, world)
    waiting = loop.create_task(world.service.wait("f1"))
    loop.settle()
    assert not waiting.done()
    world.executor.hit(1)
    world.executor.end(1)
    loop.settle()
    assert (waiting.result().hits, waiting.result().ending) == (1, "deadline")
    assert loop.do(world.service.wait("f1")) == waiting.result()
    with pytest.raises(NoSuchFault):
        loop.do(world.service.wait("f2"))


def test_a_waiter_that_goes_does_not_disturb_the_others(loop, world):
    inject(loop, world)
    first, second = (loop.create_task(world.service.wait("f1")) for _ in range(2))
    loop.settle()
    first.cancel()
    loop.settle()
    world.executor.end(1)
    loop.settle()
    assert second.result().ending == "deadline"


def test_dry_run_checks_everything_and_does_nothing(loop, world):
    before = list(world.journal.calls)
    told = world.service.dry_run(rank_spec(3, backend="gloo", point="allreduce", probability=25.0), "uid 0")
    assert told.text == (
        "would arm timeout on rank 3 of job tiny (process 103, python) by ptrace: "
        "25% of gloo allreduce calls, held until the deadline, for 5 s; nothing was armed"
    )
    assert (told.fault.id, told.fault.mechanism, told.rank.pid) == ("", "ptrace", 103)
    for spec, error in ((rank_spec(7), NoSuchRank), (rank_spec(3, duration=100.0), NotAllowed), (rank_spec(3, backend="nccl"), Refused)):
        with pytest.raises(error):
            world.service.dry_run(spec)
    inject(loop, world)
    with pytest.raises(AlreadyArmed):
        world.service.dry_run(rank_spec(3))
    assert (before, world.executor.orders[1:], world.bus.kinds()) == (["close_open", "history"], [], ["fault_armed"])


def test_stop_clears_everything_and_journals_it(loop, world):
    inject(loop, world, rank_spec(0))
    world.executor.manual = True
    arming = begin(loop, world, rank_spec(1))
    stopping = loop.create_task(world.service.stop())
    loop.settle()
    world.executor.answer(2)
    loop.settle()
    assert stopping.done()
    assert world.executor.armed == {}
    assert {row.ending for row in world.journal.rows.values()} == {"daemon stopped"}
    assert arming.result().ending == "daemon stopped"
    assert world.journal.calls[-1] == "close"
    assert world.worker.closed
    with pytest.raises(Refused, match="stopping"):
        inject(loop, world, rank_spec(2))


def test_stop_ends_in_time_whatever_hangs(loop, world):
    inject(loop, world, rank_spec(0))
    world.executor.manual = True
    begin(loop, world, rank_spec(1))
    world.executor.hang_on_clear = True
    world.worker.hold()
    stopping = loop.create_task(world.service.stop())
    loop.advance(25)
    assert stopping.done()
    assert world.service.active() == []


def test_start_closes_what_the_last_run_left_and_tells(loop):
    world = world_in(loop)
    inject(loop, world)
    again = world_in(loop, journal=world.journal)
    assert world.journal.rows[1].ending == "daemon restarted"
    assert again.bus.texts() == ["fault f1 (timeout) on rank 3 of job tiny ended: daemon restarted; no call was hit"]
    assert inject(loop, again).id == "f2"


def test_a_journal_that_fails_at_the_start_is_recovered_before_the_first_fault(loop):
    journal = FakeJournal()
    world = world_in(loop, journal=journal)
    inject(loop, world)
    journal.failing = True
    again = world_in(loop, journal=journal)
    with pytest.raises(JournalUnavailable):
        inject(loop, again, rank_spec(1))
    assert again.executor.orders == []
    journal.failing = False
    assert inject(loop, again, rank_spec(1)).id == "f2"
    assert journal.rows[1].ending == "daemon restarted"


def test_without_a_request_too_the_last_runs_faults_are_closed_when_the_disk_works_again(loop):
    journal = FakeJournal()
    journal.create(Fault(id="", spec=SPEC, state="arming"))
    journal.failing = True
    world_in(loop, journal=journal)
    loop.advance(12)
    assert journal.rows[1].state == "arming"
    journal.failing = False
    loop.advance(6)
    assert journal.rows[1].ending == "daemon restarted"


def test_what_could_not_be_written_is_written_later(loop, world):
    inject(loop, world)
    world.journal.failing = True
    world.executor.hit(1)
    world.executor.end(1)
    loop.advance(4)
    assert world.journal.rows[1].state == "armed"
    assert loop.do(world.service.get("f1")).ending == "deadline"
    world.journal.failing = False
    loop.advance(6)
    assert (world.journal.rows[1].ending, world.journal.rows[1].hits) == ("deadline", 1)


def test_recent_and_history(loop, world):
    inject(loop, world, rank_spec(0))
    world.executor.end(1)
    loop.advance(100)
    inject(loop, world, rank_spec(1))
    world.executor.end(2)
    inject(loop, world, rank_spec(2))
    assert [fault.id for fault in world.service.recent(50.0)] == ["f2", "f3"]
    assert [fault.id for fault in world.service.recent(500.0)] == ["f1", "f2", "f3"]
    assert [(fault.id, fault.state) for fault in loop.do(world.service.history(2))] == [("f3", "armed"), ("f2", "ended")]


def test_faults_that_are_over_do_not_pile_up(loop, world, monkeypatch):
    monkeypatch.setattr(service_module, "ENDED_KEPT", 3)
    for number in range(1, 7):
        inject(loop, world)
        world.executor.end(number)
    loop.settle()
    assert [fault.id for fault in world.service.recent(1e9)] == ["f4", "f5", "f6"]
    assert loop.do(world.service.get("f1")).ending == "deadline", "the journal has it"


async def test_with_the_real_journal_its_thread_and_the_real_bus(tmp_path):
    executor = FakeExecutor()
    bus = Bus(Recorder())
    listening = bus.subscribe()
    journal = Journal(tmp_path / "journal.sqlite")
    service = executor.link = FaultService(registry=FakeRanks(), executor=executor, journal=journal, bus=bus)
    await service.start()
    fault = await service.inject(SPEC, "uid 0 pid 1")
    executor.hit(1)
    waiting = asyncio.create_task(service.wait(fault.id))
    await asyncio.sleep(0)
    executor.end(1)
    assert (await waiting).hits == 1
    second = await service.inject(SPEC, "uid 0 pid 1")
    await service.stop()
    kept = Journal(tmp_path / "journal.sqlite").history(10)
    assert [(row.id, row.state, row.hits, row.ending) for row in kept] == [
        (second.id, "ended", 0, "daemon stopped"),
        ("f1", "ended", 1, "deadline"),
    ]
    kinds = [(await anext(listening)).kind for _ in range(5)]
    assert kinds == ["fault_armed", "fault_hit", "fault_ended", "fault_armed", "fault_ended"]
