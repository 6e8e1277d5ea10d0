import msgspec
import pytest
from singularityd.errors import Busy, NotAllowed, Refused
from singularityd.faults.limits import Caller, FaultLimits, Gate, Situation
from singularityd.faults.spec import parse
from singularityd.model import Fault

from .fakes import rank

NOW = 1_000_000.0
USER = Caller(uid=1000, admin=False)


def check(spec=None, caller=Caller(), *, limits=None, **situation):  # noqa: B008 - immutable
    values = {"rank": rank(3), "job": (rank(2), rank(3)), "active": (), "ended": (), "timeout": None} | situation
    Gate(FaultLimits(**{"off_switch": "/nonexistent/no-faults"} | (limits or {}))).check(
        spec or parse("timeout", 3, {}), caller, Situation(**values), NOW
    )


def fault(number, *, job="tiny", armed_at=NOW - 100, ended_at=NOW - 90, hits=1):
    return Fault(id="f1", spec=parse("timeout", number, {}), state="ended", job=job, armed_at=armed_at, ended_at=ended_at, hits=hits)


def test_all_is_well():
    check()


DRILL = msgspec.structs.replace(rank(3), drill=True, uid=1000)


@pytest.mark.parametrize(
    ("mode", "caller", "target", "refused"),
    [
        ("off", Caller(), DRILL, "switched off"),
        ("admin", Caller(), rank(3), ""),
        ("admin", USER, DRILL, "administrator"),
        ("drill", Caller(), rank(3), "SINGULARITY_DRILL=1"),
        ("drill", Caller(), DRILL, ""),
        ("drill", USER, DRILL, ""),
        ("drill", Caller(uid=1001, admin=False), DRILL, "belongs to user 1000"),
        ("drill", USER, rank(3), "SINGULARITY_DRILL=1"),
        ("open", USER, rank(3), ""),
    ],
)
def test_modes(mode, caller, target, refused):
    if not refused:
        check(caller=caller, rank=target, limits={"mode": mode})
        return
    with pytest.raises(NotAllowed) as caught:
        check(caller=caller, rank=target, limits={"mode": mode})
    assert refused in f"{caught.value.text} {caught.value.hint}"


def test_the_off_switch(tmp_path):
    path = tmp_path / "no-faults"
    check(limits={"off_switch": str(path)})
    path.touch()
    with pytest.raises(NotAllowed, match="no-faults exists"):
        check(limits={"off_switch": str(path), "mode": "open"})


def test_ranks_of_a_job():
    check(active=[fault(3)])
    check(active=[fault(2, job="other")])
    with pytest.raises(Busy, match="rank 2 of job tiny has a fault already"):
        check(active=[fault(2)])
    check(active=[fault(2)], limits={"max_ranks_per_job": 2})


@pytest.mark.parametrize("state", ["dying", "exited"])
def test_a_job_that_has_lost_a_rank(state):
    lost = msgspec.structs.replace(rank(2), state=state)
    with pytest.raises(Refused, match="rank 2 of job tiny is d"):
        check(job=(lost, rank(3)))
    check(job=(lost, msgspec.structs.replace(rank(2), pid=999), rank(3)))  # it is back


@pytest.mark.parametrize(
    ("pattern", "options", "duration", "timeout", "fine"),
    [
        ("timeout", {}, "10s", 19.0, False),
        ("timeout", {}, "10s", 20.0, True),
        ("timeout", {}, "10s", None, True),
        ("timeout", {"ms": "2s"}, "10s", 5.0, True),
        ("delay", {"ms": "200", "jitter": "2s", "distribution": "uniform"}, "10s", 4.0, False),
        ("hang", {}, "10s", 19.0, False),
        ("slow", {}, "10s", 1.0, True),
        ("error", {}, "10s", 1.0, True),
        ("kill", {}, "10s", 1.0, True),
        ("flap", {"on": "1s", "off": "1s"}, "10s", 1.5, False),
        ("flap", {"on": "1s", "off": "1s"}, "10s", 2.0, True),
    ],
)
def test_a_hold_that_may_end_the_job(pattern, options, duration, timeout, fine):
    spec = parse(pattern, 3, options, duration=duration)
    if fine:
        check(spec, timeout=timeout)
        return
    with pytest.raises(NotAllowed) as caught:
        check(spec, timeout=timeout)
    assert f"after {timeout:g} s" in caught.value.text
    assert "--may-kill-job" in caught.value.hint
    check(parse(pattern, 3, options, duration=duration, may_kill_job=True), timeout=timeout)


def test_the_budget_of_a_day():
    used = [fault(3, armed_at=NOW - 5000 - 50, ended_at=NOW - 5000), fault(2, armed_at=NOW - 86_000, ended_at=NOW - 85_960)]
    with pytest.raises(Busy, match="90 s within a day, and 86 s") as caught:
        check(ended=used)
    assert "try again in 7m" in caught.value.hint
    check(ended=used[:1])
    check(ended=used, limits={"budget": 1000.0})
    check(ended=[used[0], fault(3, job="other", armed_at=NOW - 86_000, ended_at=NOW - 85_960)])
    check(ended=[used[0], fault(3, armed_at=NOW - 86_000, ended_at=NOW - 85_960, hits=0)])  # it disturbed nothing
    check(ended=[used[0], fault(3, armed_at=NOW - 86_460, ended_at=NOW - 86_420)])  # yesterday
