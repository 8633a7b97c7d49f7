"""A real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import small_config
from tests.support.kvpool.pools import remove_arena, remove_arena_dir


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    """It keeps its memory when it is killed."""
    local = LocalNode(small_config(), tmp_path)
    yield local
    local.close()
    remove_arena(local.config)
    remove_arena_dir()
