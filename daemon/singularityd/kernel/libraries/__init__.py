"""Collective libraries the daemon knows, one table entry each: where calls begin and end, how errors are told, which faults fit.

A new library is one module with a TABLE and one line in TABLES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from singularityd.kernel import abi


class SiteSpec(NamedTuple):
    """One place to attach to."""

    symbol: str
    offset: int
    """In the file."""
    site: abi.Site


class Table(NamedTuple):
    """What is known of one library."""

    backend: str
    markers: tuple[bytes, ...]
    """Names of which any one, defined in a file, says that the file holds this library."""
    exact: tuple[bytes, ...]
    """Mangled names looked up one by one."""
    prefixes: tuple[bytes, ...]
    """Name prefixes looked up by listing: new releases add entry points."""
    version: bytes
    """A pattern searched in the read-only data; its first group is the version. Empty where the file does not carry one."""
    version_file: tuple[str, bytes]
    """A file relative to the library's folder and a pattern in it, for libraries that carry their version beside them."""
    sites: Callable[[Mapping[str, int], str], list[SiteSpec]]
    """(symbol -> file offset, version) -> sites."""
    structure: str
    """The structure behind a communicator's pointer, looked up in the file's debug information; empty: none."""
    faults: tuple[str, ...]
    """Patterns that can be done to its calls; the others are refused with `refusal`."""
    refusal: str
    """Why the patterns that are missing from `faults` are refused."""
    results: Mapping[int, str]
    """The library's result code -> the name shown as label `result`."""
    result_of: Callable[[str, str], int | None]
    """(name of a result, version) -> its code; None where this version has none, or calls return nothing."""


def tables() -> tuple[Table, ...]:
    """All of them, in the order in which a file is tried."""
    from singularityd.kernel.libraries import gloo, nccl

    return (nccl.TABLE, gloo.TABLE)


def result_name(backend: str, code: int) -> str:
    """The label for a result code; codes of later releases show as `code_N`."""
    for table in tables():
        if table.backend == backend:
            return table.results.get(code, f"code_{code}")
    return f"code_{code}"
