"""Call the real NCCL without a GPU: the wheel's libnccl.so.2 loads, and ncclAllReduce on a null communicator answers 4.

It is a rank of a job of its own (RANK and WORLD_SIZE as torchrun sets them) and knows nothing of the daemon. A call that is held comes
back late, with the same answer.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

RESULTS = {0: "success", 1: "unhandled cuda error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage"}
FLOAT, SUM = 7, 0


def library() -> Path:
    """libnccl.so.2 of the wheel nvidia-nccl-cu12."""
    package = importlib.util.find_spec("nvidia.nccl")
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder, "lib", "libnccl.so.2")
        if path.exists():
            return path
    raise SystemExit("nvidia-nccl-cu12 is not installed: pip install --no-deps nvidia-nccl-cu12")


def load(path: Path) -> ctypes.CDLL:
    """The library with the two calls declared."""
    nccl = ctypes.CDLL(str(path))
    nccl.ncclGetVersion.argtypes = (ctypes.POINTER(ctypes.c_int),)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    nccl.ncclAllReduce.argtypes = (pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer)
    return nccl


def version(nccl: ctypes.CDLL) -> str:
    """For example 2.32.3."""
    code = ctypes.c_int()
    nccl.ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def tell(call: int, result: int, seconds: float, as_json: bool) -> None:
    """One line for each call."""
    if as_json:
        print(json.dumps({"call": call, "result": result, "seconds": round(seconds, 6)}), flush=True)
    else:
        print(f"call {call:5d}   result {result} ({RESULTS.get(result, 'unknown')})   {seconds * 1000:9.3f} ms", flush=True)


def main() -> None:
    """Call until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="stop after so many seconds")
    parser.add_argument("--interval", type=float, default=0.2, help="seconds between calls")
    parser.add_argument("--library", type=Path, help="another libnccl.so.2")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    options = parser.parse_args()
    path = options.library or library()
    nccl = load(path)
    if options.json:
        print(json.dumps({"nccl": version(nccl), "library": str(path)}), flush=True)
    else:
        print(f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}: NCCL {version(nccl)} from {path}", flush=True)
    started, call = time.monotonic(), 0
    while time.monotonic() - started < options.seconds:
        begun = time.monotonic()
        result = nccl.ncclAllReduce(None, None, 1024, FLOAT, SUM, None, None)
        tell(call, result, time.monotonic() - begun, options.json)
        call += 1
        time.sleep(options.interval)


if __name__ == "__main__":
    sys.exit(main())
