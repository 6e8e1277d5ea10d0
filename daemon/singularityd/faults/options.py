"""Options that several patterns share. Each reads its text into fields of FaultSpec and writes them back."""

from __future__ import annotations

from singularityd.errors import BadOption
from singularityd.faults import points, quantity
from singularityd.faults.pattern import Option
from singularityd.kernel import abi
from singularityd.model import FaultSpec

LARGEST_COUNT = 2**32 - 1
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
