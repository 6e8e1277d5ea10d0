from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .host import Host, serving


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A served API with ranks 0 to 3 of one job."""
    async with serving(tmp_path) as one:
        for rank in range(4):
            one.add_rank(rank)
        yield one
