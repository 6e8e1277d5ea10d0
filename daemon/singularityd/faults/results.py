"""Results that a call can be made to return, by the names and numbers people write. Pure."""

from __future__ import annotations

import difflib
import errno
import re

from singularityd.errors import BadOption
from singularityd.faults import quantity
from singularityd.kernel.libraries import nccl, tables
from singularityd.model import Rank

TIMEOUT = nccl.TIMEOUT
_ERRNOS = {
    "ETIMEDOUT": TIMEOUT,
    "EIO": "ncclSystemError",
    "ENOMEM": "ncclSystemError",
    "EINVAL": "ncclInvalidArgument",
    "ECONNRESET": "ncclRemoteError",
    "EPIPE": "ncclRemoteError",
}
"""What NCCL says where a system call of its own failed so; NCCL never returns an errno."""


def returned_by(backend: str) -> bool:
    """Whether calls of a library return a result at all."""
    return any(table.backend == backend and table.result_of(TIMEOUT, "") is not None for table in tables())


def names() -> tuple[str, ...]:
    """As nccl.h spells them."""
    return tuple(nccl.RESULT_CODES)


def read(text: str) -> str:
    """The name of `ncclSystemError`, `2`, `timeout` or `-ETIMEDOUT`. Raises BadOption."""
    if text in nccl.RESULT_CODES or text == TIMEOUT:
        return text
    if re.fullmatch(r"-?[0-9]{1,9}", text):
        return _by_number(int(text))
    name = text.removeprefix("-").upper()
    if name in _ERRNOS:
        return _ERRNOS[name]
    if text in ("ncclSuccess", "success", "ok"):
        raise _success()
    near = difflib.get_close_matches(text, nccl.RESULT_CODES, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise BadOption(f"code {quantity.shown(text)} is not a result of NCCL", hint=f"{meant}allowed: {_allowed()}")


def _by_number(number: int) -> str:
    if number == 0:
        raise _success()
    if number < 0:
        name = _ERRNOS.get(errno.errorcode.get(-number, ""))
    else:
        name = next((name for name, code in nccl.RESULT_CODES.items() if code == number), None)
    if name is None:
        raise BadOption(f"code {number} is not a result of NCCL", hint=f"allowed: {_allowed()}")
    return name


def _allowed() -> str:
    numbers = ", ".join(f"{name} ({code})" for name, code in nccl.RESULT_CODES.items())
    return f"{numbers}, timeout, -{', -'.join(_ERRNOS)}"


def _success() -> BadOption:
    text = "a skipped call that reports success leaves data unreduced, and nobody would notice"
    return BadOption(text, hint=f"allowed: {_allowed()}")


def code(name: str, rank: Rank) -> int:
    """The number that this rank's NCCL has for a result. Raises BadOption where its version has none."""
    versions = sorted({library.version for library in rank.libraries if library.backend == "nccl"}) or [""]
    found = {nccl.result_of(name, version) for version in versions}
    if None in found or len(found) > 1:
        there = " and ".join(version or "of unknown version" for version in versions)
        raise BadOption(f"{name} has no one number in the NCCL {there} of this rank", hint="write code=ncclSystemError or code=timeout")
    (number,) = found
    assert number is not None
    return number
