"""A namespace is cleared or dropped at once, however large; its slots are freed little by little."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.kvpool.core.events import Received
from pdserve.kvpool.core.store import lazy_free, room
from pdserve.kvpool.core.store import page_store as store_module
from pdserve.kvpool.core.store.lazy_free import CHUNK_SLOTS
from pdserve.kvpool.core.store.table_scan import scan
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import GRANTED
from tests.support.kvpool.node_model import KIB, Node, key, opened, statuses
from tests.support.kvpool.profiled import calls_of
from tests.support.kvpool.table_model import LAYOUT, Table, following_table

PAGES = 3 * CHUNK_SLOTS


def full_node(pages: int = PAGES) -> tuple[Node, int, int]:
    """A node full of pages of 4 KiB of one namespace."""
    node, c, ns = opened(slabs=pages // 256, slab_bytes=1024 * KIB)
    fill(node, ns, pages)
    return node, c, ns


def fill(node: Node, ns: int, pages: int) -> None:
    store = node.state.store
    for n in range(pages):
        out: list[object] = []
        [slot] = store.take(store.index.namespace(ns), [key(n)], 4 * KIB, 4 * KIB, out)  # type: ignore[arg-type]
        store.commit([slot], [0], node.now_s, out)  # type: ignore[arg-type]


def clear(node: Node, c: int, ns: int) -> None:
    node.send(c, m.Clear(9, ns))


def drop(node: Node, c: int, ns: int) -> None:
    node.send(c, m.DropNamespace(9, "ns"))


@pytest.mark.parametrize("end", [clear, drop])
def test_nothing_is_found_from_that_instant_and_the_space_counts_as_free(
    end: Callable[[Node, int, int], None],
) -> None:
    node, c, ns = full_node()
    [pin] = node.get(c, ns, 5)
    end(node, c, ns)
    if end is clear:
        assert node.exists(c, ns, *range(50)) == [0] * 50
    status = node.status()
    assert status.used_bytes == 4 * KIB  # the page that is being read
    assert status.free_bytes == status.capacity_bytes - 4 * KIB
    assert status.counters["sweeping_bytes"] == (PAGES - 1) * 4 * KIB
    assert node.state.next_deadline_s <= node.now_s
    ticks = 0
    while node.status().counters["sweeping_bytes"]:
        node.pass_time(max(0.0, node.state.next_deadline_s - node.now_s))
        ticks += 1
    assert ticks == 3
    node.release(c, pin)
    assert node.state.store.slots.allocated_bytes == 0


def test_whoever_needs_room_gets_it_at_once_in_every_size() -> None:
    node, c, ns = full_node()
    clear(node, c, ns)
    other = node.open(c, "other")
    assert statuses(node.reserve(c, other, *range(100), length=4 * KIB)) == [GRANTED] * 100
    assert statuses(node.reserve(c, other, 1000, 1001, length=1024 * KIB)) == [GRANTED] * 2
    assert node.status().counters["sweeping_bytes"] > 0
    while node.status().counters["sweeping_bytes"]:
        node.pass_time(0.01)
    assert node.status().reserved_bytes == 400 * KIB + 2048 * KIB
    assert node.status().counters["evictions"] == 0


def test_after_a_crash_in_the_middle_no_cleared_page_comes_back_and_new_ones_do() -> None:
    table = Table()
    node = following_table(table)
    c = node.connect()
    a, b = node.open(c, "a"), node.open(c, "b")
    node.put(c, a, *range(20))
    node.put(c, b, *range(5))
    with pytest.MonkeyPatch.context() as patch:
        for module in (lazy_free, room, store_module):
            patch.setattr(module, "CHUNK_SLOTS", 3)
        clear(node, c, a)
        node.pass_time(0.01)
        assert node.status().counters["sweeping_bytes"] == 17 * 4 * KIB
        node.put(c, a, 3, 100)
    namespaces = Namespaces.load(table.namespaces)
    contents = scan(LAYOUT, table.classes, table.rows, namespaces.numbers_of_spaces)
    found = sorted(zip(contents.namespaces.tolist(), contents.keys, strict=True))
    assert found == sorted([(a, key(3)), (a, key(100)), *((b, key(k)) for k in range(5))])


def test_clearing_pages_takes_no_call_for_each_and_the_next_request_sweeps_few() -> None:
    pages = 16 * CHUNK_SLOTS
    node, c, ns = full_node(pages)
    state, now_s = node.state, node.now_s
    assert calls_of(lambda: state.handle(Received(c, m.Clear(9, ns)), now_s)) < pages / 50
    reserve = m.Reserve(10, ns, [key(n) for n in range(32)], [4 * KIB])
    assert calls_of(lambda: state.handle(Received(c, reserve), now_s)) < 20 * CHUNK_SLOTS
