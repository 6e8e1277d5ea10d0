"""NCCL (and RCCL, which exports the same names): C functions that return a code, so begin by entry probe, end by return probe.

`pncclX` is the same address as `ncclX` and is left out. Argument places are those of the System V and AAPCS64 conventions for the
prototypes of nccl.h 2.0 to 2.32; the ...Config forms of 2.32 append one argument.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping

from singularityd.kernel import abi
from singularityd.kernel.libraries import SiteSpec, Table

# A 128-byte ncclUniqueId by value takes no register on x86-64 (it lies on the stack), one pointer register on aarch64.
_RANK_AFTER_ID = 4 if platform.machine() == "aarch64" else 3

_COUNTED: dict[str, tuple[str, int, int, int]] = {
    # function: op, argument number of count, datatype, communicator
    "ncclAllReduce": ("allreduce", 3, 4, 6),
    "ncclReduce": ("reduce", 3, 4, 7),
    "ncclBroadcast": ("broadcast", 3, 4, 6),
    "ncclBcast": ("broadcast", 2, 3, 5),
    "ncclAllGather": ("allgather", 3, 4, 5),
    "ncclReduceScatter": ("reduce_scatter", 3, 4, 6),
    "ncclAlltoAll": ("alltoall", 3, 4, 5),
    "ncclAllToAll": ("alltoall", 3, 4, 5),
    "ncclGather": ("gather", 3, 4, 6),
    "ncclScatter": ("scatter", 3, 4, 6),
    "ncclSend": ("send", 2, 3, 5),
    "ncclRecv": ("recv", 2, 3, 5),
    "ncclPutSignal": ("put_signal", 2, 3, 0),
    "ncclSignal": ("signal", 0, 0, 5),
    "ncclWaitSignal": ("wait_signal", 0, 0, 3),
}

_LIFE: dict[str, tuple[str, int]] = {
    "ncclGroupStart": ("group_start", 0),
    "ncclGroupEnd": ("group_end", 0),
    "ncclGroupSimulateEnd": ("group_end", 0),
    "ncclCommFinalize": ("comm_finalize", 1),
    "ncclCommDestroy": ("comm_destroy", 1),
    "ncclCommAbort": ("comm_abort", 1),
    "ncclCommRevoke": ("comm_revoke", 1),
}

_RESULTS = {
    0: "ok",
    1: "unhandled_cuda_error",
    2: "system_error",
    3: "internal_error",
    4: "invalid_argument",
    5: "invalid_usage",
    6: "remote_error",
    7: "in_progress",
    8: "timeout",
    250: "unknown",
}

RESULT_CODES = {
    "ncclUnhandledCudaError": 1,
    "ncclSystemError": 2,
    "ncclInternalError": 3,
    "ncclInvalidArgument": 4,
    "ncclInvalidUsage": 5,
    "ncclRemoteError": 6,
    "ncclInProgress": 7,
    "ncclTimeout": 8,
}
"""Without ncclSuccess: a call that was skipped must not report success on data that nobody has reduced."""
_TIMEOUT_SINCE = (2, 30)
TIMEOUT = "timeout"
"""The library's own time-out where its version has one, else its system error."""


def _site(op: str, **arguments: int) -> abi.Site:
    return abi.Site(backend=abi.BACKEND_CODES["nccl"], op=abi.OP_CODES[op], **arguments)


def _describe(name: str) -> abi.Site | None:
    """The site of an exported function, None where it is no call to watch."""
    plain = name.removesuffix("Config")
    if plain in _COUNTED:
        op, count, dtype, comm = _COUNTED[plain]
        source = abi.COMM_ARGUMENT if comm else abi.COMM_NONE
        return _site(op, count_arg=count, dtype_arg=dtype, comm_arg=comm, comm_source=source)
    if plain in _LIFE:
        op, comm = _LIFE[plain]
        return _site(op, comm_arg=comm, comm_source=abi.COMM_ARGUMENT if comm else abi.COMM_NONE)
    if plain == "ncclCommInitRank":
        return _site("comm_init", out_arg=1, size_arg=2, rank_arg=_RANK_AFTER_ID, id_arg=3, id_source=abi.ID_BY_VALUE)
    if plain == "ncclCommInitRankScalable":
        return _site("comm_init", out_arg=1, size_arg=2, rank_arg=3, id_arg=5, id_source=abi.ID_POINTER)
    if plain == "ncclCommInitAll":
        return _site("comm_init", size_arg=2)
    if plain == "ncclCommSplit":
        return _site("comm_split", comm_arg=1, out_arg=4, id_arg=2, id_source=abi.ID_SPLIT)
    if plain == "ncclCommShrink":
        return _site("comm_shrink", comm_arg=1, out_arg=4, id_arg=3, id_source=abi.ID_SPLIT)
    if plain == "ncclCommGrow":
        return _site("comm_grow", comm_arg=1, out_arg=5, size_arg=2, rank_arg=4, id_arg=3, id_source=abi.ID_POINTER)
    return None


def sites(symbols: Mapping[str, int], version: str) -> list[SiteSpec]:
    """Entry and return of every exported call; two names of one address give one site."""
    del version  # the prototypes have been stable
    found: list[SiteSpec] = []
    taken: set[int] = set()
    for name, offset in sorted(symbols.items()):
        described = _describe(name)
        if described is None or offset in taken:
            continue
        taken.add(offset)
        described.kind = abi.SITE_CALL
        found.append(SiteSpec(name, offset, described))
    return found


def result_of(name: str, version: str) -> int | None:
    """The code of a result, or of TIMEOUT; None where this version does not know it. An unknown version is taken for an old one."""
    numbers = tuple(int(part) for part in version.split(".")[:2]) if version else (0, 0)
    if name == TIMEOUT:
        name = "ncclTimeout" if numbers >= _TIMEOUT_SINCE else "ncclSystemError"
    if name == "ncclTimeout" and numbers < _TIMEOUT_SINCE:
        return None
    return RESULT_CODES.get(name)


TABLE = Table(
    backend="nccl",
    markers=(b"ncclAllReduce",),
    exact=(),
    prefixes=(b"nccl",),
    version=rb"NCCL version (\d+\.\d+\.\d+)",
    version_file=("", b""),
    sites=sites,
    structure="ncclComm",
    faults=("timeout", "delay", "error", "hang", "slow", "kill", "flap"),
    refusal="",
    results=_RESULTS,
    result_of=result_of,
)
