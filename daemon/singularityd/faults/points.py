"""Injection points: operations by our name, or a library's function by its own, both led to (operation, backend).

The functions are those of kernel.libraries, so a library added there can be named here at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache

from singularityd.errors import BadOption
from singularityd.faults.quantity import shown
from singularityd.kernel import abi, libraries

ANY = "any"

# NCCL's functions are found by listing a file's symbols, so its table cannot name them. These are for suggestions; others that
# the table knows are taken as well.
_NCCL = (
    *("ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclBcast", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclGather"),
    *("ncclScatter", "ncclSend", "ncclRecv", "ncclPutSignal", "ncclSignal", "ncclWaitSignal", "ncclGroupStart", "ncclGroupEnd"),
    *("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommInitAll", "ncclCommSplit", "ncclCommShrink"),
    *("ncclCommGrow", "ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "ncclCommRevoke"),
)


def resolve(text: str) -> tuple[str, str]:
    """(operation or `any`, backend or empty for each that has it) of `any`, `allreduce`, `ncclAllReduce`, `gloo::allreduce`.

    Raises BadOption with the operations there are and the nearest name.
    """
    if text == ANY or text in operations():
        return text, ""
    found = functions().get(text) or _described(text)
    if found is not None:
        return found
    near = difflib.get_close_matches(text.lower(), {name.lower(): name for name in _names()}, n=1)
    suggestion = next((f"did you mean {name}? " for name in _names() if near and name.lower() == near[0]), "")
    allowed = f"allowed: {ANY}, {', '.join(operations())}, or a function such as ncclAllReduce or gloo::allreduce"
    raise BadOption(f"point {shown(text)} is not known", hint=suggestion + allowed)


def operations(backend: str = "") -> tuple[str, ...]:
    """The operations that have a place to be disturbed at, of one backend or of any, in the order of kernel.abi.OPS."""
    having = {op for op, owner in functions().values() if backend in ("", owner)}
    return tuple(op for op in abi.OPS.values() if op in having)


@cache
def functions() -> Mapping[str, tuple[str, str]]:
    """Function name -> (operation, backend), with `BACKEND::OPERATION` as a name that every backend's operations have."""
    found: dict[str, tuple[str, str]] = {}
    for table in libraries.tables():
        names = [name.decode() for name in table.exact] or list(_NCCL)
        for symbol, op in _sites(table, names):
            found[_demangled(symbol)] = (op, table.backend)
            found[f"{table.backend}::{op}"] = (op, table.backend)
    return found


def _described(name: str) -> tuple[str, str] | None:
    """A function that only its library's table knows, such as one of a later release; `pncclX` is `ncclX`."""
    if re.fullmatch(r"[A-Za-z0-9_]{1,100}", name) is None:
        return None
    for table in libraries.tables():
        for _, op in _sites(table, [name.removeprefix("p") if name.startswith("pnccl") else name]):
            return op, table.backend
    return None


def _sites(table: libraries.Table, names: Iterable[str]) -> list[tuple[str, str]]:
    """(symbol, operation) of the names that are entry sites of the library; ends of a call are no place to inject."""
    numbered = {name: place for place, name in enumerate(names)}
    entries = (abi.SITE_CALL, abi.SITE_POST)
    return [(spec.symbol, abi.OPS[spec.site.op]) for spec in table.sites(numbered, "") if spec.site.kind in entries]


def _demangled(symbol: str) -> str:
    """`gloo::allreduce` of `_ZN4gloo9allreduceE...`; C names are returned as they are."""
    if not symbol.startswith("_ZN"):
        return symbol
    parts, rest = [], symbol[3:]
    while match := re.match(r"[0-9]+", rest):
        end = match.end() + int(match.group())
        parts.append(rest[match.end() : end])
        rest = rest[end:]
    return "::".join(parts)


@cache
def _names() -> tuple[str, ...]:
    return (ANY, *operations(), *functions())
