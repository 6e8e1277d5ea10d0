"""Which process is shown as which rank, and how it is found by name."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from singularityd.errors import AmbiguousJob, NoSuchJob, NoSuchRank
from singularityd.ranks.ras import RasRank
from singularityd.ranks.registry import RankRegistry

from .host import facts, library, numbers, shown, torchrun

JOB = "tcp-a:29500"


@pytest.fixture
def registry():
    return RankRegistry()


def fill(registry, *found):
    for process in found:
        registry.observe_process(process)
    return registry


def four(registry, port=29500, first=100, count=4):
    return fill(registry, *(facts(first + rank, torchrun(rank, count, port)) for rank in range(count)))


# Which one is the rank


def test_a_torchrun_job(registry):
    four(registry)
    assert shown(registry) == [(100 + rank, JOB, rank) for rank in range(4)]
    assert {(rank.source, rank.scheme, rank.confidence, rank.world) for rank in registry.all()} == {
        ("environment", "torchrun", "medium", 4)
    }


def test_data_loader_workers_are_not_the_rank_whoever_is_found_first(registry):
    fill(registry, facts(203, torchrun(3), parent=103), facts(303, torchrun(3), parent=203), facts(103, torchrun(3)))
    assert numbers(registry) == [(103, 3)]
    assert registry.by_pid(203).rank == 3


def test_a_bash_wrapper_is_not_the_rank(registry):
    fill(registry, facts(103, torchrun(3), name="bash"), facts(203, torchrun(3), parent=103))
    assert numbers(registry) == [(203, 3)]


def test_a_wrapper_without_a_library_gives_way_to_the_child_that_has_one(registry):
    fill(registry, facts(103, torchrun(3), name="wrap.py"), facts(203, torchrun(3), parent=103))
    registry.observe_library(203, 203, library())
    assert numbers(registry) == [(203, 3)]


def test_the_child_is_the_rank_where_only_it_makes_calls(registry):
    fill(registry, facts(103, torchrun(3)), facts(203, torchrun(3), parent=103))
    registry.observe_calls({203})
    assert numbers(registry) == [(203, 3)]
    registry.observe_calls({103})
    assert numbers(registry) == [(103, 3)]


def test_torchrun_itself_is_not_shown(registry):
    fill(registry, facts(50, name="pt_elastic"), facts(100, torchrun(0), parent=50))
    assert numbers(registry) == [(100, 0)]
    assert registry.by_pid(50).rank is None


@pytest.mark.parametrize("name", ["pt_elastic", "python"])
def test_torchrun_under_srun_is_not_the_rank_that_srun_gave_it(registry, name):
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    fill(registry, facts(50, srun, name=name), facts(101, srun | torchrun(1), parent=50), facts(102, srun | torchrun(2), parent=50))
    assert shown(registry) == [(101, "slurm-7.0", 1), (102, "slurm-7.0", 2)]


def test_the_operators_rank_on_a_pod_is_not_taken_for_torchruns_child(registry):
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    fill(registry, facts(50, pod), *(facts(100 + rank, torchrun(rank), parent=50) for rank in range(2)))
    assert numbers(registry) == [(100, 0), (101, 1)]


def test_calls_without_an_identity_are_shown_with_the_rank_unknown(registry):
    fill(registry, facts(50), facts(51))
    registry.observe_calls([50])
    assert numbers(registry) == [(50, None)]


def test_one_pid_in_two_namespaces(registry):
    fill(registry, facts(5001, torchrun(0, port=1), inside=7), facts(6001, torchrun(0, port=2), inside=7))
    assert [(rank.pid, rank.namespace_pids) for rank in registry.all()] == [(5001, (5001, 7)), (6001, (6001, 7))]


def test_a_restarted_rank_takes_the_place_of_the_one_that_exited(registry):
    four(registry)
    registry.observe_exit(102, 102, "killed by SIGKILL")
    assert [rank.state for rank in registry.all()] == ["running", "running", "exited", "running"]
    registry.observe_process(facts(902, torchrun(2)))
    assert numbers(registry) == [(100, 0), (101, 1), (902, 2), (103, 3)]
    assert registry.resolve(2).pid == 902


def test_an_orphaned_worker_does_not_become_the_rank(registry):
    fill(registry, facts(103, torchrun(3)), facts(203, torchrun(3), parent=103))
    registry.observe_exit(103, 103, "")
    registry.observe_process(facts(203, torchrun(3), parent=1))
    assert [(rank.pid, rank.state) for rank in registry.all()] == [(103, "exited")]


def test_a_helper_that_left_the_family_is_not_the_rank_once_the_rank_makes_calls(registry):
    fill(registry, facts(103, torchrun(3)), facts(203, torchrun(3), parent=1))
    registry.observe_calls({103})
    assert numbers(registry) == [(103, 3)]


def test_a_process_that_started_later_is_nobodys_parent(registry):
    fill(registry, facts(203, torchrun(3), parent=103), facts(103, torchrun(3), start=9000))
    assert numbers(registry) == [(203, 3), (103, 3)]


# Communicators, RAS, agents


def test_without_an_environment_the_largest_communicator_tells(registry):
    fill(registry, facts(50))
    registry.observe_init(50, comm="0a1b2c3d", comm_rank=1, comm_size=2)
    registry.observe_init(50, comm="ffee0011", comm_rank=5, comm_size=8)
    rank = registry.by_pid(50)
    assert (rank.job, rank.rank, rank.world, rank.source, rank.confidence) == ("nccl-ffee0011", 5, 8, "probe", "high")


@pytest.mark.parametrize("other", [f"{number:08x}" for number in range(20)])
def test_of_two_communicators_of_one_size_the_name_decides_not_the_order(registry, other):
    fill(registry, facts(50))
    registry.observe_init(50, comm="ffee0011", comm_rank=1, comm_size=3)
    registry.observe_init(50, comm=other, comm_rank=2, comm_size=3)
    assert registry.by_pid(50).job == "nccl-ffee0011"


def test_a_gloo_group_tells_the_rank_but_no_job(registry):
    fill(registry, facts(50))
    registry.observe_init(50, comm="1", comm_rank=1, comm_size=2)
    rank = registry.by_pid(50)
    assert (rank.job, rank.rank, rank.source, rank.confidence) == ("unknown", 1, "probe", "medium")


def test_agreement_raises_the_confidence(registry):
    four(registry)
    registry.observe_init(101, comm="1", comm_rank=1, comm_size=4)
    rank = registry.by_pid(101)
    assert (rank.source, rank.confidence, rank.scheme) == ("environment", "high", "torchrun")


def test_a_smaller_group_does_not_contradict(registry):
    four(registry)
    registry.observe_init(103, comm="0a1b2c3d", comm_rank=1, comm_size=2)
    assert (registry.by_pid(103).rank, registry.notes(103)) == (3, ())


def test_a_world_sized_communicator_wins_over_the_environment_and_says_so(registry):
    four(registry)
    registry.observe_init(103, comm="0a1b2c3d", comm_rank=0, comm_size=4)
    rank = registry.by_pid(103)
    assert (rank.rank, rank.source, rank.job) == (0, "probe", JOB)
    assert any("rank 3 of 4" in note and "rank 0 of 4" in note for note in registry.notes(103))


@pytest.mark.parametrize(("rank", "size"), [(None, None), (None, 4), (1, None), (9, 4), (-1, 4), (0, 0)])
def test_numbers_that_cannot_be_name_no_rank(registry, rank, size):
    fill(registry, facts(50))
    registry.observe_init(50, comm="0a1b2c3d", comm_rank=rank, comm_size=size)
    assert numbers(registry) == [(50, None)]


def test_mp_spawn_under_a_one_task_step(registry):
    srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    fill(registry, facts(50, srun), *(facts(100 + rank, srun, parent=50) for rank in range(3)))
    for rank in range(3):
        registry.observe_init(100 + rank, comm="1", comm_rank=rank, comm_size=3)
    assert shown(registry) == [(100 + rank, "slurm-7.0", rank) for rank in range(3)]


def test_ras_tells_the_ranks_of_a_job_that_was_there_before(registry):
    fill(registry, facts(5001, inside=7), facts(60))
    registry.observe_ras([RasRank(7, "abcd0123", 2, 8), RasRank(60, "abcd0123", 3, 8), RasRank(999, "abcd0123", 4, 8)])
    assert shown(registry) == [(5001, "nccl-abcd0123", 2), (60, "nccl-abcd0123", 3)]
    assert registry.by_pid(60).source == "ras"


def test_ras_names_nobody_where_two_containers_have_the_pid(registry):
    fill(registry, facts(5001, inside=7), facts(6001, inside=7))
    registry.observe_ras([RasRank(7, "abcd0123", 2, 8)])
    assert registry.all() == ()


def claim(registry, pid, job="mine", rank=1, world=4, local_rank=1):
    return registry.claim(pid, job=job, rank=rank, world=world, local_rank=local_rank)


def test_an_agents_claim_fills_what_is_unknown(registry):
    fill(registry, facts(50))
    rank = claim(registry, 50)
    assert (rank.job, rank.rank, rank.world, rank.source, rank.confidence) == ("mine", 1, 4, "agent", "high")
    assert shown(registry) == [(50, "mine", 1)]


def test_a_claim_may_come_before_its_process(registry):
    assert claim(registry, 50).rank == 1
    assert registry.all() == ()
    fill(registry, facts(50))
    assert shown(registry) == [(50, "mine", 1)]


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"world": 5}, {"job": "mine"}])
def test_a_claim_overrules_nothing(registry, wrong):
    four(registry)
    before = registry.by_pid(101)
    assert claim(registry, 101, **({"job": JOB} | wrong)) == before
    assert any("claim is not taken" in note for note in registry.notes(101))
    assert claim(registry, 101, job=JOB).source == "agent"
    assert registry.notes(101) == ()


def test_a_claim_against_a_probe_is_not_taken(registry):
    fill(registry, facts(50))
    registry.observe_init(50, comm="0a1b2c3d", comm_rank=2, comm_size=4)
    assert claim(registry, 50).rank == 2


@pytest.mark.parametrize(("rank", "world"), [(-1, 4), (4, 4)])
def test_a_claim_that_cannot_be_is_not_taken(registry, rank, world):
    fill(registry, facts(50))
    assert claim(registry, 50, rank=rank, world=world).rank is None


# Names


def message(call, *arguments):
    with pytest.raises((NoSuchRank, NoSuchJob, AmbiguousJob)) as caught:
        call(*arguments)
    return caught.type, caught.value.text, caught.value.hint


def test_resolve(registry):
    kind, text, hint = message(registry.resolve, 0)
    assert (kind, text) == (NoSuchRank, "no ranks run on this host")
    assert hint
    four(registry)
    assert registry.resolve(2).pid == 102
    assert registry.resolve(2, JOB).pid == registry.resolve(2, "tcp").pid == 102
    assert message(registry.resolve, 7)[:2] == (NoSuchRank, f"no rank 7 in job {JOB}: this host runs ranks 0-3")
    assert message(registry.resolve, 0, "other")[:2] == (NoSuchJob, f"no job other on this host: {JOB} (ranks 0-3)")


def test_resolve_among_several_jobs(registry):
    four(registry)
    four(registry, port=29501, first=200, count=2)
    listed = f"{JOB} (ranks 0-3), tcp-a:29501 (ranks 0-1)"
    assert message(registry.resolve, 3) == (AmbiguousJob, f"several jobs run on this host: {listed}", "name one with --job")
    assert message(registry.resolve, 0, "tcp")[0] is AmbiguousJob
    assert registry.resolve(1, "tcp-a:29501").pid == 201


def test_a_job_that_is_over_does_not_make_another_ambiguous(registry):
    four(registry)
    four(registry, port=29501, first=200, count=1)
    registry.observe_exit(200, 200, "")
    assert registry.resolve(3).pid == 103


def test_what_exited_or_is_dying_is_not_resolved(registry):
    four(registry)
    registry.observe_exit(102, 102, "killed by SIGKILL")
    registry.observe_state(101, "dying")
    assert message(registry.resolve, 2)[1] == f"rank 2 of job {JOB} exited (killed by SIGKILL): this host runs ranks 0, 3"
    assert "dying" in message(registry.resolve, 1)[1]


def test_two_processes_that_nothing_tells_apart_are_not_guessed_between(registry):
    fill(registry, facts(50, {"RANK": "0", "WORLD_SIZE": "2"}), facts(60, {"RANK": "0", "WORLD_SIZE": "2"}))
    kind, text, _ = message(registry.resolve, 0)
    assert kind is AmbiguousJob
    assert "50, 60" in text


# Lives


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [([], "none"), (["nccl"], "enqueue"), (["gloo"], "collectives"), (["nccl", "gloo"], "collectives")],
)
def test_visibility(registry, libraries, expected):
    four(registry)
    for backend in libraries:
        registry.observe_library(100, 100, library(backend))
    assert registry.by_pid(100).visibility == expected


def test_a_library_without_sites_shows_nothing(registry):
    four(registry)
    registry.observe_library(100, 100, library("gloo"))
    registry.observe_library(100, 100, library("gloo", sites=0))
    assert (registry.by_pid(100).visibility, len(registry.by_pid(100).libraries)) == ("none", 1)


def test_states_and_what_subscribers_hear(registry):
    heard = []
    registry.subscribe(lambda new, old: heard.append((new.pid, old and old.state, new.state)))
    fill(registry, facts(203, torchrun(3), parent=103), facts(103, torchrun(3)))
    registry.observe_calls({103})
    registry.observe_state(103, "stopped")
    registry.observe_state(103, "stopped")
    registry.observe_state(103, "dying")
    registry.observe_state(103, "running")
    registry.observe_exit(103, 103, "killed by SIGKILL")
    assert heard[1:] == [(103, None, "running"), (103, "running", "stopped"), (103, "stopped", "dying"), (103, "dying", "exited")]
    assert "exited: killed by SIGKILL" in registry.notes(103)


def test_an_exited_rank_is_kept_until_it_expires():
    now = [1000.0]
    registry = four(RankRegistry(clock=lambda: now[0], expire_after=300))
    registry.observe_exit(100, 100, "")
    now[0] += 299
    assert registry.expire() == []
    assert len(registry.all()) == 4
    now[0] += 1
    assert [rank.pid for rank in registry.expire()] == [100]
    assert numbers(registry) == [(101, 1), (102, 2), (103, 3)]
    assert registry.by_pid(100) is None


def test_a_pid_used_again_is_another_process(registry):
    fill(registry, facts(100, torchrun(0)))
    registry.observe_calls({100})
    registry.observe_process(facts(100, torchrun(0, port=29501), start=9000))
    assert [(rank.start_time, rank.state, rank.job) for rank in registry.all()] == [
        (100, "exited", JOB),
        (9000, "running", "tcp-a:29501"),
    ]
    assert registry.by_pid(100).start_time == 9000
    assert registry.observe_exit(100, 100, "late news") is None
    assert registry.by_pid(100).state == "running"


def test_calls_of_the_dead_in_the_kernels_tables_revive_nobody(registry):
    fill(registry, facts(103, torchrun(3)), facts(203, torchrun(3), parent=103))
    registry.observe_exit(203, 203, "")
    registry.observe_calls({203})
    assert [(rank.pid, rank.state) for rank in registry.all()] == [(103, "running")]


# Order


def _observations():
    """Two ranks with wrappers and workers, a launcher, and one rank known by its communicator alone."""
    found = [facts(50, name="pt_elastic"), facts(70)]
    for rank in range(2):
        base = 100 + 10 * rank
        found += [facts(base, torchrun(rank), parent=50, name="bash"), facts(base + 1, torchrun(rank), parent=base)]
        found += [facts(base + 2, torchrun(rank), parent=base + 1), facts(base + 3, torchrun(rank), parent=base + 2)]
    steps = [("observe_process", (one,), {}) for one in found]
    steps += [("observe_library", (pid, pid, library(kind)), {}) for pid in (101, 102, 111, 70) for kind in ("gloo", "nccl")]
    steps += [("observe_calls", ([pid],), {}) for pid in (101, 112)]
    steps += [
        ("observe_init", (101,), {"comm": "0a1b2c3d", "comm_rank": 0, "comm_size": 4}),
        ("observe_init", (101,), {"comm": "1", "comm_rank": 1, "comm_size": 2}),
        ("observe_init", (70,), {"comm": "99999999", "comm_rank": 1, "comm_size": 3}),
        ("observe_init", (70,), {"comm": "88888888", "comm_rank": 2, "comm_size": 3}),
    ]
    return steps


STEPS = _observations()


def _after(steps):
    registry = RankRegistry()
    for method, arguments, more in steps:
        getattr(registry, method)(*arguments, **more)
    return registry


@settings(max_examples=60, deadline=None)
@given(st.permutations(STEPS), st.lists(st.sampled_from(STEPS), max_size=6))
def test_the_order_of_news_does_not_matter(steps, again):
    expected = _after(STEPS)
    found = _after([*steps, *again])
    assert msgspec.to_builtins(found.all()) == msgspec.to_builtins(expected.all())
    assert numbers(found) == [(70, 1), (101, 0), (112, 1)]
