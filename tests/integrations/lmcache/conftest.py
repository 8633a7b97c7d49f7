"""Adapters over a real node, as LMCache's controllers drive them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.integrations.lmcache import Controller, Open, importable
from tests.support.kvpool.local_node import LocalNode


@pytest.fixture
def open_adapter(node: LocalNode) -> Iterator[Open]:
    """An adapter of a server of its own; each is closed at the end."""
    with importable():
        from pdserve.integrations.lmcache import PdserveL2

        made: list[Any] = []

        def make(*, pool: dict[str, Any] | None = None, **params: Any) -> Controller:
            nodes = [{"node": node.config.name, "address": node.address}]
            made.append(PdserveL2({"pool": {"nodes": nodes, "retry_after_s": 0.02} | (pool or {}), **params}))
            return Controller(made[-1])

        yield make
        for adapter in made:
            adapter.close()
