"""Node processes that form a pool, for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kvpool.clustered import Processes
from tests.support.kvpool.pools import arena_dir


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()
    if arena_dir().exists():
        arena_dir().rmdir()
