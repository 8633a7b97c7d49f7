"""Nodes for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.protocol.messages import DataPathChoice
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import Start, StartProcess, small_config
from tests.support.kvpool.pools import ProcessPool, remove_arena, remove_arena_dir


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a node in this process, with these options over small ones; it ends after the test."""
    nodes: list[LocalNode] = []

    def make(**options: Any) -> LocalNode:
        nodes.append(LocalNode(small_config(**options), tmp_path))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
        remove_arena(node.config)
    remove_arena_dir()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[StartProcess]:
    """Start a node process with these options over small ones, and this data path; killed after the test."""
    pools: list[ProcessPool] = []

    def make(data_path: DataPathChoice = "shm", **options: Any) -> ProcessPool:
        pools.append(ProcessPool(small_config(**options), tmp_path, data_path))
        return pools[-1]

    yield make
    for pool in pools:
        pool.kill()
        remove_arena(pool.config)
    remove_arena_dir()
