"""What the ranks of a job print."""

import json
import sys
from typing import Any


def say(**fields: Any) -> None:
    """A JSON line in one write: the ranks share a log, and print() may write the end of a line by itself, which tears them."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()
