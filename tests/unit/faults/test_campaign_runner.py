"""Campaigns beside the real fault service and the real journal, in time that a test moves."""

import asyncio

import pytest
from singularityd.errors import BadOption, CampaignRuns, NoSuchCampaign
from singularityd.faults.campaign import record
from singularityd.faults.campaign.runner import CampaignService
from singularityd.faults.journal import Journal
from singularityd.faults.limits import FaultLimits
from singularityd.model import Calls, CallStats, Event
from singularityd.observe.bus import Bus
from singularityd.observe.snapshot import Snapshot

from .fakes import VirtualLoop, World

STEP = '[[fault]]\nat = "{at}s"\nrank = {rank}\npattern = "timeout"\nfor = "{life}s"\noptions = {{ seed = 3 }}\n'


def text(*steps, duration=60, more=""):
    return f'name = "nightly"\nduration = "{duration}s"\nreason = "why"\n{more}' + "".join(
        STEP.format(at=at, rank=rank, life=life) for at, rank, life in steps
    )


@pytest.fixture
def loop():
    made = VirtualLoop()
    asyncio.set_event_loop(made)
    yield made
    for task in asyncio.all_tasks(made):
        task.cancel()
    made.settle()
    made.close()
    asyncio.set_event_loop(None)


class Drills:
    """The service and all it stands on; `count` is what each rank's counter says."""

    def __init__(self, loop, path):
        async def make():
            world = World(journal=Journal(path))
            world.service._bus = self.bus = Bus()
            world.ranks.all = lambda: tuple(world.ranks.ranks.values())
            self.world = world
            self.campaigns = CampaignService(
                registry=world.ranks,
                faults=world.service,
                bus=self.bus,
                reading=self.reading,
                limits=FaultLimits(max_ranks_per_job=100),
                clock=asyncio.get_running_loop().time,
            )

        self.loop, self.calls = loop, 0
        loop.do(make())
        loop.do(self.world.service.start())
        loop.do(self.campaigns.open())

    async def reading(self):
        self.calls += 10
        stats = CallStats(
            pid=101, backend="gloo", op="allreduce", comm="1", result="ok", calls=self.calls, bytes=0, seconds=0, last_call=0, buckets=()
        )
        return Snapshot(calls=Calls(stats=(stats,)), ranks=self.world.ranks.all())

    def do(self, awaitable):
        return self.loop.do(awaitable)

    def start(self, *steps, **more):
        return self.do(self.campaigns.start(text(*steps, **more), "uid 0"))

    def get(self, run):
        return self.do(self.campaigns.get(run.id))


@pytest.fixture
def drills(loop, tmp_path):
    return Drills(loop, tmp_path / "journal.sqlite")


def test_each_fault_comes_at_its_time_and_is_journaled_with_its_campaign(loop, drills):
    run = drills.start((2, 1, 5), (10, 3, 5))
    loop.advance(1)
    assert drills.world.executor.armed == {}
    loop.advance(1.5)
    assert list(drills.world.executor.armed) == [1]
    drills.world.executor.hit(1)
    drills.world.executor.end(1)
    loop.advance(8)
    assert list(drills.world.executor.armed) == [2]
    drills.world.executor.end(2)
    loop.advance(2)
    ended = drills.get(run)
    assert (ended.state, ended.ending) == ("ended", "done")
    assert [outcome.fault for outcome in ended.outcomes] == ["f1", "f2"]
    assert {fault.campaign for fault in drills.do(drills.world.service.history(9))} == {"c1"}
    assert [event.kind for event in ended.events].count("fault_hit") == 1
    (one,) = [seen for seen in ended.seen if seen.rank == 1]
    assert one.calls > 50
    markdown, document = drills.do(drills.campaigns.report(ended))
    assert "| 2 s | 1 | timeout | seed=3 | 5 s | f1 | ptrace | 1 | 1 | ended: deadline |" in markdown
    assert '"mechanism": "ptrace"' in document
    assert "seed" in drills.do(drills.campaigns.replay(campaign="c1"))


def test_a_second_is_refused_naming_the_first_and_stop_ends_faults_at_once(loop, drills):
    run = drills.start((0, 1, 30))
    loop.advance(0.5)
    with pytest.raises(CampaignRuns, match=run.id):
        drills.start((0, 2, 5))
    assert drills.do(drills.campaigns.stop(run.id, "uid 7")).ending == "stopped by uid 7"
    assert drills.world.executor.armed == {}
    assert drills.start((0, 2, 5)).id == "c2"


def test_a_rank_that_disappears_is_an_outcome_and_ends_it_only_where_asked(loop, drills):
    run = drills.start((5, 1, 2), (10, 2, 2))
    del drills.world.ranks.ranks[1]
    loop.advance(11)
    drills.world.executor.end(1)
    loop.advance(2)
    ended = drills.get(run)
    assert (ended.ending, [outcome.code for outcome in ended.outcomes]) == ("done", ["no_such_rank", ""])
    run = drills.start((5, 2, 2), more='stop = { when = ["rank_gone"] }\n')
    del drills.world.ranks.ranks[2]
    loop.advance(3)
    assert drills.get(run).ending == "rank 2 is gone"


def test_the_jobs_end_and_too_many_refusals_end_it(loop, drills):
    run = drills.start((30, 1, 2))
    drills.world.ranks.ranks.clear()
    loop.advance(3)
    assert drills.get(run).ending == "job gone"


def test_too_many_refusals_end_it(loop, drills):
    run = drills.start((1, 1, 2), (2, 2, 2), (30, 3, 2), more="stop = { max_failures = 2 }\n")
    del drills.world.ranks.ranks[1], drills.world.ranks.ranks[2]
    loop.advance(4)
    assert "max_failures" in drills.get(run).ending


def test_clear_all_and_the_daemons_stop_end_it(loop, drills):
    run = drills.start((1, 1, 30), (2, 2, 30))
    loop.advance(1.5)
    drills.do(drills.campaigns.clear_all("uid 0"))
    assert "cleared" in drills.get(run).ending
    run = drills.start((0, 3, 30))
    loop.advance(1)
    drills.do(drills.campaigns.close())
    assert drills.get(run).ending == "daemon stopped"
    assert drills.world.executor.armed == {}


def test_after_a_crash_the_next_start_closes_it(loop, drills, tmp_path):
    run = drills.start((30, 1, 2))
    later = Drills(loop, tmp_path / "journal.sqlite")
    closed = later.do(later.campaigns.get(run.id))
    assert (closed.state, closed.ending) == ("ended", "daemon restarted")


def test_a_dry_run_arms_and_journals_nothing_and_bad_files_are_refused(loop, drills):
    assert len(drills.campaigns.dry_run(text((0, 1, 5))).planned) == 1
    assert drills.do(drills.campaigns.history(9)) == []
    with pytest.raises(BadOption):
        drills.start((0, 1, 90), duration=100)
    with pytest.raises(NoSuchCampaign):
        drills.do(drills.campaigns.get("c9"))


def test_events_of_other_jobs_are_not_its_own(loop, drills):
    run = drills.start((5, 1, 2))
    loop.settle()
    drills.bus.publish(Event(kind="rank_dying", at=1.0, text="theirs", job="other"))
    drills.bus.publish(Event(kind="rank_dying", at=1.0, text="ours", job="tiny"))
    loop.settle()
    assert [event.text for event in drills.get(run).events] == ["ours"]


@pytest.mark.parametrize("word", ["c", "c-1", "f1", "", "c1x", "c" + "9" * 30])
def test_what_is_no_id_is_no_row(word):
    assert record.number_of(word) == -1
