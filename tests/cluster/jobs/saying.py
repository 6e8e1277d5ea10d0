"""What the ranks of a job print, and what they wait for."""

import json
import os
import sys
import time
from typing import Any


def say(**fields: Any) -> None:
    """A JSON line in one write: the ranks share a log, and print() may write the end of a line by itself, which tears them."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def wait_at_gate() -> None:
    """Until the test lets the job go, which it does once the daemon watches all ranks."""
    while not os.path.exists(os.environ["TEST_GATE"]):
        time.sleep(0.01)
