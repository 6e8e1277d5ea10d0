"""gloo inside libtorch_cpu: C++ functions that throw, so entry probes only.

A return probe here turns a peer's death from a catchable RuntimeError into std::terminate: the unwinder cannot pass the return
trampoline. A call begins at gloo::X; it ends, with its result, where c10d's work finishes on the same thread. The functions return
void: an error cannot be returned, and skipping the call would report success on unreduced data. Holding is what gloo allows.

The options' layout is private to gloo; offsets are known for the torch releases listed and left out for others (bytes 0 and
sequence numbers of our own then). Every entry was checked against real calls of known size.
"""

from __future__ import annotations

from collections.abc import Mapping

from singularityd.kernel import abi
from singularityd.kernel.libraries import SiteSpec, Table

_BEGIN: dict[str, str] = {
    "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE": "allreduce",
    "_ZN4gloo6reduceERNS_13ReduceOptionsE": "reduce",
    "_ZN4gloo9broadcastERNS_16BroadcastOptionsE": "broadcast",
    "_ZN4gloo9allgatherERNS_16AllgatherOptionsE": "allgather",
    "_ZN4gloo10allgathervERNS_17AllgathervOptionsE": "allgather",
    "_ZN4gloo8alltoallERNS_15AlltoallOptionsE": "alltoall",
    "_ZN4gloo9alltoallvERNS_16AlltoallvOptionsE": "alltoall",
    "_ZN4gloo6gatherERNS_13GatherOptionsE": "gather",
    "_ZN4gloo7scatterERNS_14ScatterOptionsE": "scatter",
    "_ZN4gloo7barrierERNS_14BarrierOptionsE": "barrier",
}

_POST: dict[str, str] = {
    # (this, peer, slot, offset, bytes): c10d's send and recv go straight to the transport
    "_ZN4gloo9transport3tcp13UnboundBuffer4sendEimmm": "send",
    "_ZN4gloo9transport3tcp13UnboundBuffer4recvEimmm": "recv",
}

_END_OK = "_ZN4c10d16ProcessGroupGloo9AsyncWork14finishWorkGlooEv"
_END_ERROR = "_ZN4c10d16ProcessGroupGloo9AsyncWork19finishWorkGlooErrorERKNSt15__exception_ptr13exception_ptrE"

# function: offsets of the element count, the element size and the tag in its options; (buffer, 0, tag) where the size is that of an
# UnboundBuffer behind a pointer
_LAYOUTS: dict[str, dict[str, tuple[int, int, int]]] = {
    "2.13": {
        "_ZN4gloo9allreduceERKNS_16AllreduceOptionsE": (80, 88, 128),
        "_ZN4gloo6reduceERNS_13ReduceOptionsE": (32, 40, 88),
        "_ZN4gloo9broadcastERNS_16BroadcastOptionsE": (32, 40, 52),
        "_ZN4gloo9allgatherERNS_16AllgatherOptionsE": (16, 0, 40),
        "_ZN4gloo10allgathervERNS_17AllgathervOptionsE": (16, 0, 64),
        "_ZN4gloo8alltoallERNS_15AlltoallOptionsE": (16, 0, 40),
        "_ZN4gloo9alltoallvERNS_16AlltoallvOptionsE": (16, 0, 136),
        "_ZN4gloo6gatherERNS_13GatherOptionsE": (16, 0, 44),
        "_ZN4gloo7scatterERNS_14ScatterOptionsE": (40, 0, 60),
        "_ZN4gloo7barrierERNS_14BarrierOptionsE": (0, 0, 24),
    },
}

_RESULTS = {0: "ok", 1: "error", 2: "posted"}
_POSTED = 2


def _site(op: str, kind: int, **arguments: int) -> abi.Site:
    return abi.Site(backend=abi.BACKEND_CODES["gloo"], op=abi.OP_CODES[op], kind=kind, **arguments)


def sites(symbols: Mapping[str, int], version: str) -> list[SiteSpec]:
    """Begin sites, the two end sites, and the posts of point-to-point."""
    layout = _LAYOUTS.get(".".join(version.split(".")[:2]), {})
    found: list[SiteSpec] = []
    for name, op in _BEGIN.items():
        if name in symbols:
            elements, width, tag = layout.get(name, (0, 0, 0))
            described = _site(
                op, abi.SITE_CALL, comm_source=abi.COMM_GLOO_OPTIONS, elements_offset=elements, width_offset=width, tag_offset=tag
            )
            found.append(SiteSpec(name, symbols[name], described))
    for name, op in _POST.items():
        if name in symbols:
            found.append(SiteSpec(name, symbols[name], _site(op, abi.SITE_POST, count_arg=5, result=_POSTED)))
    for name, result in ((_END_OK, 0), (_END_ERROR, 1)):
        if name in symbols:
            found.append(SiteSpec(name, symbols[name], _site("other", abi.SITE_END, result=result)))
    return found


TABLE = Table(
    backend="gloo",
    markers=(b"_ZN4gloo9allreduceERKNS_16AllreduceOptionsE",),
    exact=tuple(name.encode() for name in (*_BEGIN, *_POST, _END_OK, _END_ERROR)),
    prefixes=(),
    version=b"",
    version_file=("../version.py", rb"__version__ = '([^']+)'"),
    sites=sites,
    structure="",
    faults=("timeout", "delay", "hang", "slow", "kill", "flap"),
    refusal="gloo's functions return void and throw: an error cannot be returned, and skipping a call would pass unreduced data as reduced",
    results=_RESULTS,
    result_of=lambda name, version: None,
)
