import asyncio
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from singularityd.errors import BadOption, ResumeLost
from singularityd.model import Event
from singularityd.observe.bus import Bus
from singularityd.observe.kinds import BY_NAME, KINDS
from singularityd.observe.recorder import Recorder


def event(kind="fault_hit", text="x"):
    return Event(kind=kind, at=1.0, text=text)


@given(limit=st.integers(1, 20), count=st.integers(0, 60), asked=st.integers(0, 70))
def test_since_returns_everything_after_or_refuses(limit, count, asked):
    recorder = Recorder(limit)
    everything = [recorder.append(event(text=str(i))) for i in range(count)]
    if asked > count or count - asked > limit:
        with pytest.raises(ResumeLost):
            recorder.since(asked)
    else:
        assert recorder.since(asked) == everything[asked:]


def test_large_events_are_bounded_by_memory_and_never_by_the_last():
    recorder = Recorder(10_000, memory=1 << 20)
    fields = {f"field{number}": "x" * 256 for number in range(32)}
    tracemalloc.start()
    for number in range(3000):
        recorder.append(
            Event(kind="round", at=1.0, text="x" * 1000 + str(number), fields={key: value + str(number) for key, value in fields.items()})
        )
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 2 << 20
    assert recorder.last == 3000
    assert 50 < recorder.last - recorder.before_first < 200
    assert recorder.since(recorder.before_first)[-1].sequence == 3000
    assert Recorder(5, memory=1).append(event(text="y" * 5000)).sequence == 1


def test_token_round_trip_and_foreign_tokens():
    recorder = Recorder()
    last = recorder.append(event())
    assert recorder.resume(recorder.token(last.sequence)) == 1
    with pytest.raises(ResumeLost, match="earlier start"):
        Recorder().resume(recorder.token(1))
    for wrong in ("", "1", ":1", "abc:", "xyz:1", f"{recorder.incarnation}:-1", f"{recorder.incarnation}:1 "):
        with pytest.raises(BadOption):
            recorder.resume(wrong)


def test_incarnations_differ():
    assert len({Recorder().incarnation for _ in range(20)}) == 20


class SlowReader(RuleBasedStateMachine):
    """One subscription against a model: told = published, minus exactly what the notices say, in order."""

    LIMIT = 4

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bus = self.run(self.make())
        self.expected = []  # sequences that must still come, oldest first
        self.missing = 0
        self.total_missing = 0

    async def make(self):
        bus = Bus(Recorder(limit=1000))
        self.subscription = bus.subscribe(kinds=frozenset({"fault_hit"}), limit=self.LIMIT)
        return bus

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    async def do_publish(self, kind):
        return self.bus.publish(event(kind))

    @rule(kind=st.sampled_from(["fault_hit", "rank_found"]), times=st.integers(1, 7))
    def publish(self, kind, times):
        for _ in range(times):
            told = self.run(self.do_publish(kind))
            if kind == "fault_hit":
                self.expected.append(told.sequence)
                if len(self.expected) > self.LIMIT:
                    self.lost = self.expected.pop(0)
                    self.missing += 1
                    self.total_missing += 1

    @rule()
    def read(self):
        if not self.expected:
            return
        got = self.run(asyncio.wait_for(anext(self.subscription), 1))
        if self.missing:
            assert got.kind == "events_dropped"
            assert got.fields["count"] == str(self.missing)
            assert got.sequence == self.lost
            self.missing = 0
        else:
            assert got.kind == "fault_hit"
            assert got.sequence == self.expected.pop(0)

    @invariant()
    def counts_agree(self):
        assert self.subscription.dropped == self.bus.dropped == self.total_missing
        assert self.bus.waiting == len(self.expected)

    def teardown(self):
        self.subscription.close()
        assert self.bus.dropped == self.total_missing
        assert self.bus.subscribers == 0
        self.loop.close()


TestSlowReader = SlowReader.TestCase


async def test_resume_joins_kept_and_live_without_gap_or_repeat():
    bus = Bus()
    for _ in range(5):
        bus.publish(event())
    subscription = bus.subscribe(after=2, limit=1)
    bus.publish(event())
    assert [(await anext(subscription)).sequence for _ in range(4)] == [3, 4, 5, 6]


async def test_resume_of_what_was_overwritten_is_refused_before_anything_is_told():
    bus = Bus(Recorder(limit=2))
    for _ in range(4):
        bus.publish(event())
    with pytest.raises(ResumeLost):
        bus.subscribe(after=1)
    assert bus.subscribers == 0


async def test_close_ends_a_waiting_reader():
    bus = Bus()
    subscription = bus.subscribe()
    reader = asyncio.create_task(anext(subscription, None))
    await asyncio.sleep(0)
    subscription.close()
    assert await asyncio.wait_for(reader, 1) is None
    bus.publish(event())
    assert [one async for one in subscription] == []


async def test_publishing_from_another_thread():
    bus = Bus()
    subscription = bus.subscribe()
    seen = []

    def work():
        with pytest.raises(AssertionError, match="publish_threadsafe"):
            bus.publish(event())
        bus.publish_threadsafe(event(text="from a thread"))
        seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    got = await asyncio.wait_for(anext(subscription), 5)
    thread.join()
    assert seen
    assert (got.text, got.sequence) == ("from a thread", 1)


async def test_unlisted_kind_is_refused():
    with pytest.raises(AssertionError, match="not listed"):
        Bus().publish(event("no_such_kind"))


def test_kinds_are_unique_and_described():
    assert len(BY_NAME) == len(KINDS)
    assert all(kind.help and kind.name.isascii() for kind in KINDS)
