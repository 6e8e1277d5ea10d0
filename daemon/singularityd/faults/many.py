"""One request for several ranks: all of them, or none."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from singularityd.errors import SingularityError
from singularityd.faults import selection
from singularityd.faults.limits import Caller
from singularityd.model import Fault, FaultSpec, Rank


class Service(Protocol):
    """What is asked of the fault service."""

    async def inject(self, spec: FaultSpec, who: str, caller: Caller) -> Fault:
        """Arm one."""

    async def clear(self, fault_id: str, who: str) -> list[Fault]:
        """End one."""


def numbers(members: Sequence[Rank], wanted: str, seed: int) -> list[int]:
    """The ranks that are meant. Raises BadOption, NoSuchRank."""
    here = [rank.rank for rank in members if rank.rank is not None]
    return selection.choose(wanted, here, seed=seed or secrets.randbits(63))


async def inject(
    service: Service, members: Sequence[Rank], wanted: str, spec_of: Callable[[int], FaultSpec], asking: tuple[str, Caller]
) -> list[Fault]:
    """Arm the same on each chosen rank. Where one is refused, those that were armed before it are cleared and its error is raised.

    `asking` is who, for the journal and for the limits. `random:K` draws by the fault's seed, or anew each time where it has none.
    """
    armed: list[Fault] = []
    try:
        for number in numbers(members, wanted, spec_of(0).seed):
            armed.append(await service.inject(spec_of(number), *asking))  # noqa: PERF401 - what is armed must be known when one is refused
    except BaseException as error:
        for fault in armed:
            with contextlib.suppress(SingularityError):  # its deadline ends it; the others are cleared all the same
                await service.clear(fault.id, asking[0])
        if isinstance(error, SingularityError) and armed:
            raise type(error)(f"{error.text}; the {len(armed)} faults armed before it are cleared", hint=error.hint) from error
        raise
    return armed
