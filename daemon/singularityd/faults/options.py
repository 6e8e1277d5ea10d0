"""Options that several patterns share. Each reads its text into fields of FaultSpec and writes them back."""

from __future__ import annotations

from singularityd.errors import BadOption
from singularityd.faults import points, quantity, results
from singularityd.faults.pattern import Option
from singularityd.kernel import abi
from singularityd.kernel.ptrace.plan import DISTRIBUTIONS
from singularityd.model import FaultSpec

LARGEST_COUNT = 2**32 - 1
SHORTEST_PERIOD, LONGEST_PERIOD = 10, 1000
"""Milliseconds."""
LARGEST_SEED = 2**63 - 1


def _read_point(text: str) -> dict[str, str]:
    op, backend = points.resolve(text)
    return {"point": op, "backend": backend} if backend else {"point": op}


def _read_backend(text: str) -> dict[str, str]:
    if text not in abi.BACKEND_CODES:
        raise BadOption(f"backend {quantity.shown(text)} is not known", hint=f"allowed: {', '.join(abi.BACKEND_CODES)}")
    return {"backend": text}


def _read_hold(text: str) -> dict[str, int]:
    # The unit is in the option's own name, so here, and only here, a bare number is clear.
    number = text if not text.isascii() or not text.isdigit() else f"{text}ms"
    return {"milliseconds": quantity.milliseconds("ms", number)}


def _read_distribution(text: str) -> dict[str, str]:
    if text not in DISTRIBUTIONS:
        raise BadOption(f"distribution {quantity.shown(text)} is not known", hint=f"allowed: {', '.join(DISTRIBUTIONS)}")
    return {"distribution": text}


def _read_mode(text: str) -> dict[str, str]:
    if text not in ("hold", "return"):
        raise BadOption(f"mode {quantity.shown(text)} is not known", hint="allowed: hold, return")
    return {"result": results.TIMEOUT} if text == "return" else {}


def _read_percent(text: str) -> dict[str, float]:
    parts = quantity.ppm("percent", text)
    if not quantity.PPM // 100 < parts < quantity.PPM:
        raise BadOption(
            f"percent {quantity.shown(text)} is out of range", hint="write more than 1% and less than 100%; `hang` stops a rank altogether"
        )
    return {"percent": parts * 100 / quantity.PPM}


def _read_period(text: str) -> dict[str, int]:
    value = quantity.milliseconds("period", text)
    if not SHORTEST_PERIOD <= value <= LONGEST_PERIOD:
        raise BadOption(f"period {quantity.shown(text)} is out of range", hint=f"write {SHORTEST_PERIOD}ms to {LONGEST_PERIOD}ms")
    return {"period": value}


def _write_hold(spec: FaultSpec) -> str:
    return str(spec.milliseconds) if spec.milliseconds else ""


def _read_probability(text: str) -> dict[str, float]:
    return {"probability": quantity.ppm("probability", text) * 100 / quantity.PPM}


def _write_probability(spec: FaultSpec) -> str:
    parts = round(spec.probability * quantity.PPM / 100)
    return "" if parts == quantity.PPM else quantity.percent_text(parts)


POINT = Option(
    name="point",
    values="an operation (`allreduce`), a function (`ncclAllReduce`, `gloo::allreduce`), or `any` (where left out)",
    help="Which calls are meant",
    read=_read_point,
    write=lambda spec: "" if spec.point == points.ANY else spec.point,
)
BACKEND = Option(
    name="backend",
    values=f"{' or '.join(f'`{name}`' for name in abi.BACKEND_CODES)}; any library where left out",
    help="Which library's calls are meant",
    read=_read_backend,
    write=lambda spec: spec.backend,
)
HOLD = Option(
    name="ms",
    values="`500`, `500ms`, `2s`; until the fault's deadline where left out",
    help="How long each call that is hit is held, in milliseconds where no unit is written",
    read=_read_hold,
    write=_write_hold,
)
PROBABILITY = Option(
    name="probability",
    values="`25%`, `25` or `0.5%`: more than 0, at most 100, in steps of 0.0001; 100% where left out",
    help="Share of the meant calls that is hit",
    read=_read_probability,
    write=_write_probability,
)
SEED = Option(
    name="seed",
    values=f"0 to {LARGEST_SEED}; 0 where left out",
    help="Chooses which calls are hit when `probability` is below 100%: the same seed and rank choose the same calls again",
    read=lambda text: {"seed": quantity.whole("seed", text, least=0, most=LARGEST_SEED)},
    write=lambda spec: str(spec.seed) if spec.seed else "",
)
COUNT = Option(
    name="count",
    values=f"1 to {LARGEST_COUNT}; no limit where left out",
    help="At most so many calls are hit",
    read=lambda text: {"count": quantity.whole("count", text, least=1, most=LARGEST_COUNT)},
    write=lambda spec: str(spec.count) if spec.count else "",
)
AFTER = Option(
    name="after",
    values=f"1 to {LARGEST_COUNT}; 0 where left out",
    help="So many of the meant calls are left alone first",
    read=lambda text: {"after": quantity.whole("after", text, least=1, most=LARGEST_COUNT)},
    write=lambda spec: str(spec.after) if spec.after else "",
)
DELAY = Option(
    name="ms",
    values="`500`, `500ms`, `2s`; 100 where left out",
    help="How long each call that is hit is delayed, in milliseconds where no unit is written; the mean of a random delay",
    read=_read_hold,
    write=_write_hold,
)
JITTER = Option(
    name="jitter",
    values="`20`, `20ms`; 0 where left out",
    help="Half the width of a uniform delay, or the standard deviation of a normal one",
    read=lambda text: {"jitter": quantity.milliseconds("jitter", f"{text}ms" if text.isascii() and text.isdigit() else text)},
    write=lambda spec: str(spec.jitter) if spec.jitter else "",
)
DISTRIBUTION = Option(
    name="distribution",
    values=f"{', '.join(f'`{name}`' for name in DISTRIBUTIONS)}; `fixed` where left out, `uniform` with a jitter",
    help="How the delays are spread; the same seed gives the same delays again",
    read=_read_distribution,
    write=lambda spec: "" if spec.distribution == "fixed" else spec.distribution,
)
MODE = Option(
    name="mode",
    values="`hold` or `return`; `hold` where left out",
    help="Whether the call goes on after its time, or is skipped and returns its library's own time-out (or `code`)",
    read=_read_mode,
    write=lambda spec: "return" if spec.result else "",
)
CODE = Option(
    name="code",
    values=f"{', '.join(f'`{name}`' for name in results.names())}, their number, `timeout`, or an errno such as `-ETIMEDOUT`",
    help="What the call returns",
    read=lambda text: {"result": results.read(text)},
    write=lambda spec: spec.result,
)
ON = Option(
    name="on",
    values="`2s`, `500ms`; 1s where left out",
    help="How long calls are held in each turn",
    read=lambda text: {"on": quantity.milliseconds("on", text)},
    write=lambda spec: quantity.duration_text(spec.on) if spec.on else "",
)
OFF = Option(
    name="off",
    values="`3s`, `500ms`; 1s where left out",
    help="How long they are let alone in each turn",
    read=lambda text: {"off": quantity.milliseconds("off", text)},
    write=lambda spec: quantity.duration_text(spec.off) if spec.off else "",
)
PERCENT = Option(
    name="percent",
    values="`50%` or `50`: more than 1, less than 100; 50 where left out",
    help="Share of its speed that the rank keeps",
    read=_read_percent,
    write=lambda spec: quantity.percent_text(round(spec.percent * quantity.PPM / 100)) if spec.percent else "",
)
PERIOD = Option(
    name="period",
    values=f"`{SHORTEST_PERIOD}ms` to `{LONGEST_PERIOD}ms`; 20ms or, with many threads, longer where left out",
    help="One turn of running and standing still",
    read=_read_period,
    write=lambda spec: quantity.duration_text(spec.period) if spec.period else "",
)
