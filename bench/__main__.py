"""The measurements. usage: python -m bench [--quick] [NAME...]; exit 1 when a target is missed."""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Row

NAMES = ("footprint", "cost", "dying", "arm", "faults", "counts", "symbols")


def machine() -> str:
    """For the head of every table."""
    models = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {len(models)} cores, Linux {platform.release()}"


def table(rows: list[Row]) -> str:
    width = max(len(row.what) for row in rows)
    aim = max(len(row.target) for row in rows)
    return "\n".join(f"{row.what:{width}}  {row.target:{aim}}  {'ok' if row.ok else 'NO':2}  {row.measured}" for row in rows)


def main() -> int:
    quick = "--quick" in sys.argv
    names = [word for word in sys.argv[1:] if not word.startswith("-")] or list(NAMES)
    rows: list[Row] = []
    for name in names:
        print(f"{name} ...", flush=True)
        rows.extend(importlib.import_module(name).run(quick))
    print(f"\n{machine()}\n{table(rows)}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
