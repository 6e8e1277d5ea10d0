"""Generate daemon/singularityd/api/v1/ from node.proto (`make proto`): messages, gRPC stubs, and the types of both for mypy.

The result is checked in, so that neither users nor the daemon need a compiler; a test compares it with the source.
usage: tools/proto.py [DIRECTORY]      another place for the result
"""

from __future__ import annotations

import os
import re
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

API = Path(__file__).resolve().parent.parent / "daemon/singularityd/api"


def generate(source: Path, target: Path) -> None:
    """Write the modules of `source` to `target`; raises SystemExit with protoc's code."""
    target.mkdir(exist_ok=True)
    # protoc finds its plugins on the path only; they lie beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    includes = [f"-I{source.parent}", f"-I{resources.files('grpc_tools') / '_proto'}"]
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    code = protoc.main(["protoc", *includes, *outputs, str(source)])
    if code:
        raise SystemExit(code)
    name = f"{source.stem}_pb2"
    # protoc writes `import node_pb2`, which only works where the directory itself is on the path.
    for path in target.glob(f"{source.stem}_pb2*.py*"):
        text = re.sub(rf"^import {name}\b( as \w+)?", rf"from singularityd.api.v1 import {name}\1", path.read_text(), flags=re.MULTILINE)
        path.write_text(text)


if __name__ == "__main__":
    generate(API / "node.proto", Path(sys.argv[1]) if len(sys.argv) > 1 else API / "v1")
