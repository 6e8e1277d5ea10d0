import itertools
import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from singularityd.errors import BadOption
from singularityd.faults.campaign import file, replay
from singularityd.faults.campaign.plan import GAP_MS, broken, draw, plan
from singularityd.faults.limits import FaultLimits
from singularityd.model import Fault

LIMITS = FaultLimits()
FROZEN = [(21046, 0), (28722, 2), (41081, 2), (56495, 0)]
EXAMPLES = re.findall(r"```toml\n(.*?)```", (Path(__file__).parents[3] / "docs/drills.md").read_text(), re.DOTALL)

GENERATED = """
name = "nightly"
seed = {seed}
duration = "{duration}s"
[campaign]
mtbf = "{mtbf}ms"
ranks = {ranks}
max_faults = {most}
[[campaign.pattern]]
pattern = "timeout"
weight = 3
for = "{life}ms"
[[campaign.pattern]]
pattern = "timeout"
for = "1s"
options = {{ point = "allreduce", count = 2 }}
"""


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_of_the_page_can_be_planned(text):
    assert plan(file.read(text), range(4), LIMITS)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    duration=st.integers(5, 600),
    mtbf=st.integers(100, 60_000),
    ranks=st.sampled_from(['"all"', "[0, 2]", '"random:1"', '"random:3"']),
    most=st.integers(1, 200),
    life=st.integers(1, 5000),
    active=st.integers(1, 4),
    minute=st.integers(1, 80),
)
def test_a_generated_plan_stays_within_every_limit(seed, duration, mtbf, ranks, most, life, active, minute):
    limits = FaultLimits(max_active=active, per_minute=minute, max_ranks_per_job=1000)
    campaign = file.read(GENERATED.format(seed=seed, duration=duration, mtbf=mtbf, ranks=ranks, most=most, life=life))
    made = plan(campaign, [3, 1, 0, 2], limits)
    assert made == plan(campaign, [0, 1, 2, 3], limits)
    assert len(made) <= most
    assert [one.index for one in made] == list(range(len(made)))
    assert list(made) == sorted(made, key=lambda one: (one.at_ms, one.spec.rank))
    assert all(one.at_ms > 0 and one.ends_ms <= duration * 1000 for one in made)
    assert broken(made, limits) == []
    for rank in range(4):
        own = [one for one in made if one.spec.rank == rank]
        assert all(after.at_ms - before.ends_ms >= GAP_MS for before, after in itertools.pairwise(own))
    for one in made:
        at_once = [other for other in made if other.at_ms <= one.at_ms < other.ends_ms]
        assert len(at_once) <= active
        assert sum(one.at_ms - 60_000 < other.at_ms <= one.at_ms for other in made) <= minute


def test_the_same_seed_gives_the_same_plan_on_every_machine_and_another_seed_another():
    made = plan(file.read(GENERATED.format(seed=7, duration=120, mtbf=9000, ranks='"all"', most=4, life=2000)), range(4), LIMITS)
    other = plan(file.read(GENERATED.format(seed=8, duration=120, mtbf=9000, ranks='"all"', most=4, life=2000)), range(4), LIMITS)
    assert [(one.at_ms, one.spec.rank) for one in made] == FROZEN
    assert made != other
    assert len({one.spec.seed for one in made}) == len(made)
    assert draw(7, "distance", 0) == 1779616879046732386


def test_distances_are_exponential_with_the_mean_asked_for():
    campaign = file.read(GENERATED.format(seed=1, duration=80_000, mtbf=40_000, ranks='"all"', most=1000, life=1))
    times = [one.at_ms for one in plan(campaign, range(1000), FaultLimits(max_active=1000, per_minute=100_000, max_ranks_per_job=1000))]
    gaps = [after - before for before, after in zip([0, *times], times, strict=False)]
    assert len(gaps) == 1000
    mean = sum(gaps) / len(gaps)
    assert abs(mean / 40_000 - 1) < 3.3 / math.sqrt(len(gaps))
    assert abs(sum(gap > 40_000 for gap in gaps) / len(gaps) - math.exp(-1)) < 0.05


def test_weights_decide_how_often():
    campaign = file.read(GENERATED.format(seed=5, duration=80_000, mtbf=20_000, ranks='"all"', most=1000, life=1))
    made = plan(campaign, range(1000), FaultLimits(max_active=1000, per_minute=100_000, max_ranks_per_job=1000))
    assert 0.70 < sum(one.spec.count == 0 for one in made) / len(made) < 0.80


WRONG = """
name = "x"
duration = "10s"
sead = 3
[[fault]]
at = "1s"
pattern = "timeoot"
rank = 1
[[fault]]
at = "-1s"
pattern = "timeout"
ranks = "some"
[[fault]]
at = 5
rank = -1
patern = "timeout"
[stop]
max_failures = 0
when = ["moon_gone"]
"""


def test_every_problem_of_a_file_is_told_at_once_with_a_suggestion():
    with pytest.raises(BadOption) as caught:
        file.read(WRONG)
    said = caught.value.text
    for word in (
        "sead; did you mean seed?",
        "fault[3].patern; did you mean pattern?",
        "fault[3].at",
        "fault[3].rank",
        "fault[3].pattern is missing",
    ):
        assert word in said
    assert "stop.max_failures" in said
    assert "stop.when" in said


def test_what_the_words_mean_is_told_at_once_too():
    text = WRONG.replace("sead", "seed").replace("patern =", "pattern =").replace("at = 5", 'at = "5s"').replace("rank = -1", "rank = 1")
    with pytest.raises(BadOption) as caught:
        file.read(text.replace("max_failures = 0", "max_failures = 1").replace("moon_gone", "job_gone"))
    said = caught.value.text
    for word in ("fault[1]: pattern 'timeoot'", "fault[2].ranks", "fault[2].at", "fault[3]: it would end after"):
        assert word in said


@given(st.text(max_size=200) | st.text(alphabet='[]{}="\n0123afilnrtu.', max_size=200))
def test_no_text_raises_anything_else(text):
    try:
        file.read(text)
    except BadOption:
        return


STEP = '[[fault]]\nat = "{at}"\nrank = {rank}\npattern = "timeout"\nfor = "{life}"\n'


@pytest.mark.parametrize(
    ("steps", "limits", "said"),
    [
        ([("0s", 1, "5s"), ("5500ms", 1, "1s")], LIMITS, "less than 1 s after"),
        ([("0s", 1, "5s"), ("1s", 2, "5s")], FaultLimits(max_active=1), "faults.max_active"),
        ([("0s", 1, "5s"), ("1s", 2, "5s")], FaultLimits(), "faults.max_ranks_per_job"),
        ([("0s", 1, "5s"), ("20s", 2, "5s")], FaultLimits(per_minute=1), "faults.per_minute"),
        ([("0s", 1, "20s")], FaultLimits(max_duration=10), "faults.max_duration"),
        ([("0s", 9, "2s")], LIMITS, "no rank 9"),
    ],
)
def test_a_fixed_schedule_that_breaks_a_limit_is_refused(steps, limits, said):
    text = 'name = "x"\nduration = "1m"\n' + "".join(STEP.format(at=at, rank=rank, life=life) for at, rank, life in steps)
    with pytest.raises(BadOption, match=said):
        plan(file.read(text), range(4), limits)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**40), mtbf=st.integers(200, 9000))
def test_what_was_recorded_replays_the_same_faults_with_the_same_seeds(seed, mtbf):
    made = plan(file.read(GENERATED.format(seed=seed, duration=300, mtbf=mtbf, ranks='"all"', most=30, life=700)), range(4), LIMITS)
    if not made:
        return
    faults = [
        Fault(id=f"f{one.index + 1}", spec=one.spec, state="ended", created_at=1000 + one.at_ms / 1000, armed_at=1001.0) for one in made
    ]
    again = plan(file.read(replay.write("again", faults)), range(4), LIMITS)
    assert [one.spec for one in again] == [one.spec for one in made]
    assert [one.at_ms for one in again] == [one.at_ms - made[0].at_ms for one in made]


def test_a_fault_that_was_cleared_early_does_not_make_the_record_unusable():
    spec = plan(file.read(EXAMPLES[1]), range(4), LIMITS)[0].spec
    faults = [
        Fault(id=f"f{n}", spec=msgspec.structs.replace(spec, seed=n), state="ended", created_at=1000.0 + n, armed_at=1000.0 + n)
        for n in (1, 2)
    ]
    assert [one.at_ms for one in plan(file.read(replay.write('a "b" \\', faults)), range(4), LIMITS)] == [0, 4000]
