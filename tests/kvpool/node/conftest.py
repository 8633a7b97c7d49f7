"""Nodes for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kvpool.nodes import StartProcess, small_config
from tests.support.kvpool.pools import ProcessPool, arena_dir, remove_arena


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[StartProcess]:
    """Start a node process with these options over small ones; killed after the test."""
    pools: list[ProcessPool] = []

    def make(**options: Any) -> ProcessPool:
        pools.append(ProcessPool(small_config(**options), tmp_path, "shm"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.kill()
        remove_arena(pool.config)
    if arena_dir().exists():
        arena_dir().rmdir()
