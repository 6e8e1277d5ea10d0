"""Rules and words that several patterns share. Pure."""

from __future__ import annotations

from singularityd.errors import BadOption
from singularityd.faults import results
from singularityd.faults.quantity import duration_text
from singularityd.model import FaultSpec


def within_life(name: str, value: int, spec: FaultSpec) -> None:
    """Raises BadOption for milliseconds that are longer than the fault lasts."""
    lasts = round(spec.duration * 1000)
    if value > lasts:
        text = f"{name}={value} is longer than the fault lasts ({duration_text(lasts)}): it would be cut short at the deadline"
        raise BadOption(text, hint=f"write --for {duration_text(value)}, or a shorter {name}")


def held(spec: FaultSpec) -> str:
    """How long a call is held."""
    return f"held for {duration_text(spec.milliseconds)} each" if spec.milliseconds else "held until the deadline"


def returned(spec: FaultSpec) -> str:
    """What a call returns."""
    name = "its library's own time-out" if spec.result == results.TIMEOUT else spec.result
    return f"skipped, returning {name}"
