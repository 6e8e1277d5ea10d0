"""The events of faults, in words that are complete without the other fields."""

from __future__ import annotations

from singularityd.faults import spec as wording
from singularityd.faults.orders import Armed
from singularityd.faults.quantity import duration_text, percent_text
from singularityd.model import Event, Fault, FaultSpec


def armed(fault: Fault, answer: Armed) -> Event:
    """The fault stands ready."""
    text = f"{_name(fault)} is armed on {_whom(fault)} for {_seconds(fault.spec.duration)} by {fault.mechanism}: {calls(fault.spec)}"
    fields = {
        "mechanism": answer.mechanism,
        "signal": str(answer.signal),
        "threads": str(answer.threads),
        "delay_seconds": f"{answer.delay:.6f}",
        "who": fault.who,
        "reason": fault.spec.reason,
    }
    return _event("fault_armed", fault, fault.armed_at, text, fields)


def refused(fault: Fault) -> Event:
    """It was asked for and not armed."""
    name = _name(fault) if fault.id else f"a fault ({fault.spec.pattern})"
    text = f"{name} for {_whom(fault)} was not armed: {fault.ending}"
    return _event("fault_refused", fault, fault.ended_at, text, {"who": fault.who, "reason": fault.ending})


def hit(fault: Fault, *, tid: int, op: str, comm: str, index: int, at: float) -> Event:
    """The kernel program chose a call."""
    text = f"{_name(fault)} hit {_whom(fault)} in {op} of communicator {comm or 'unknown'}: thread {tid}"
    fields = {"tid": str(tid), "comm": comm, "index": str(index), "hits": str(fault.hits)}
    return _event("fault_hit", fault, at, text, fields, op=op)


def held(fault: Fault, tid: int, at: float) -> Event:
    """The thread of a call stands still."""
    text = f"{_name(fault)} holds {_whom(fault)}: {'all threads' if _all_threads(fault) else f'thread {tid}'}"
    return _event("fault_held", fault, at, text, {"tid": str(tid)})


def released(fault: Fault, tid: int, at: float, seconds: float) -> Event:
    """The thread goes on."""
    text = f"{_name(fault)} let {_whom(fault)} go on: thread {tid}, held for {seconds:.3f} s"
    return _event("fault_released", fault, at, text, {"tid": str(tid), "held_seconds": f"{seconds:.6f}"})


def ended(fault: Fault, by: str = "") -> Event:
    """It is over. `by`: who ended it, where somebody did."""
    if _all_threads(fault):
        hits = "it was never stopped" if not fault.hits else f"it was stopped {'once' if fault.hits == 1 else f'{fault.hits} times'}"
    else:
        hits = "no call was hit" if not fault.hits else "1 call was hit" if fault.hits == 1 else f"{fault.hits} calls were hit"
    seen = f" of {fault.seen} seen" if fault.seen else ""
    text = f"{_name(fault)} on {_whom(fault)} ended: {fault.ending}{f' by {by}' if by else ''}; {hits}{seen}"
    fields = {"reason": fault.ending, "hits": str(fault.hits), "seen": str(fault.seen), "mechanism": fault.mechanism}
    return _event("fault_ended", fault, fault.ended_at, text, fields | ({"by": by} if by else {}))


def calls(spec: FaultSpec) -> str:
    """Which calls are meant and what happens to them, for example `25% of nccl allreduce calls, held for 500ms each`."""
    pattern = wording.find(spec.pattern)
    if not pattern.needs_calls:
        return pattern.does(spec)
    point = "collective" if spec.point == "any" else spec.point
    share = "every" if spec.probability >= 100 else f"{percent_text(round(spec.probability * 10_000))} of"
    noun = "call" if share == "every" else "calls"
    words = [f"{share} {f'{spec.backend} ' if spec.backend else ''}{point} {noun}"]
    if spec.after:
        words.append(f"after the first {spec.after}")
    words.append(pattern.does(spec))
    if spec.count and not pattern.defaults.get("count"):
        words.append(f"at most {spec.count}")
    return ", ".join(words)


def whom(rank: int, job: str) -> str:
    """`rank 3 of job X`."""
    return f"rank {rank} of job {job}" if job else f"rank {rank}"


def _all_threads(fault: Fault) -> bool:
    return not wording.find(fault.spec.pattern).needs_calls


def _seconds(duration: float) -> str:
    return duration_text(round(duration * 1000))


def _name(fault: Fault) -> str:
    return f"fault {fault.id} ({fault.spec.pattern})"


def _whom(fault: Fault) -> str:
    return whom(fault.spec.rank, fault.job or fault.spec.job)


def _event(kind: str, fault: Fault, at: float, text: str, fields: dict[str, str], *, op: str = "") -> Event:
    return Event(
        kind=kind,
        at=at,
        text=text,
        job=fault.job or fault.spec.job,
        rank=fault.spec.rank,
        pid=fault.pid or None,
        backend=fault.spec.backend,
        op=op,
        fault=fault.id,
        fields={key: value for key, value in fields.items() if value},
    )
