"""What a fault pattern is made of; the patterns themselves are one file each in `faults/patterns/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from singularityd.kernel import abi
from singularityd.model import FaultSpec


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One `KEY=VALUE` of a request."""

    name: str
    values: str
    """What may be written, for people: units, range, and what is meant where it is left out."""
    help: str
    read: Callable[[str], Mapping[str, Any]]
    """The text -> fields of FaultSpec. Raises BadOption."""
    write: Callable[[FaultSpec], str]
    """The text that `read` turns into the same fields; empty where they have their defaults."""


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """A named fault template."""

    name: str
    summary: str
    """What is done to the call, one sentence."""
    effect: str
    """What the rank and its peers will see."""
    options: tuple[Option, ...]
    backends: tuple[str, ...]
    """Libraries whose calls it can be done to."""
    mechanisms: tuple[str, ...]
    """The ladder, best rung first."""
    check: Callable[[FaultSpec], None]
    """Rules between options. Raises BadOption."""
    does: Callable[[FaultSpec], str]
    """What happens to each call that is hit, or to the process, for example `held for 500ms each`."""
    defaults: Mapping[str, Any] = {}
    """Fields of FaultSpec that the options begin with."""
    action: int = abi.ACTION_HOLD
    """What the executor is asked to do."""

    at_once: bool = False
    """A call that is to return a result does so without being held first."""

    @property
    def needs_calls(self) -> bool:
        """Whether it is done to calls; else to the process at once."""
        return self.action in (abi.ACTION_HOLD, abi.ACTION_KILL)
