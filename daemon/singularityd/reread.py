"""`python -m singularityd.reread`: reads the settings again as the daemon's start did, and tells the executor what to change.

Started by the executor on SIGHUP. The flags of the start and the settings in force come in the environment; the answer is one JSON object
on standard output, of the fields of `kernel.reload.Answer`.
"""

from __future__ import annotations

import json
import os
import sys

import msgspec

from singularityd.__main__ import slim
from singularityd.config import FRONT_SETTINGS, Settings
from singularityd.config_changes import Flags, differences, with_values
from singularityd.errors import SingularityError

_LONGEST = 120_000
"""Characters of all settings; a variable of the environment has at most 128 KiB."""


def answer(before: Settings, after: Settings) -> dict[str, object]:
    """What changes at once, what waits for a restart, and the settings in force once the first has happened."""
    changed, restart = differences(before, after)
    effective = with_values(before, after, changed)
    front = msgspec.json.encode(effective).decode()
    if len(front) > _LONGEST:
        return refusal(f"the settings have {len(front)} characters in all, more than {_LONGEST}")
    return {"error": "", "changed": changed, "restart": restart, "slim": slim(effective), "front": front}


def refusal(why: str) -> dict[str, object]:
    """Nothing changes."""
    return {"error": why, "changed": [], "restart": [], "slim": {}, "front": ""}


def main() -> None:
    """Answer once."""
    before = msgspec.json.decode(os.environ[FRONT_SETTINGS], type=Settings)
    flags = Flags.from_environment(os.environ)
    try:
        said = answer(before, flags.load())
    except SingularityError as error:
        said = refusal(error.text)
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
