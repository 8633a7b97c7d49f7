"""A node against a model, driven by random clients: see client_machine."""

from __future__ import annotations

import tracemalloc

from hypothesis import settings

from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.client_machine import Clients
from tests.support.kvpool.node_model import KIB, Node, key
from tests.support.suite.extended import examples

TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=examples(140), stateful_step_count=60, deadline=None)


def test_memory_per_page_is_bounded() -> None:
    pages = 1 << 14
    tracemalloc.start()
    try:
        node = Node(slabs=pages // 1024 + 1, slab_bytes=4 << 20, follows_places=False)
        c = node.connect()
        ns = node.open(c)
        store, out = node.state.store, []  # type: ignore[var-annotated]
        for first in range(0, pages, 128):
            keys = [key(n) for n in range(first, first + 128)]
            slots = store.take(store.index.namespace(ns), keys, 4 * KIB, 4 * KIB, out)
            store.commit(slots, [1] * 128, 0.0, out)
            out.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after / pages <= 260, f"{after / pages:.0f} bytes per page"
    assert TableLayout(4 << 30, 32 << 20, 16 << 10).table_bytes < 0.01 * (4 << 30)
