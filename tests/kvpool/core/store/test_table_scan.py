"""What a restarted node believes of the table it finds."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.store.table_scan import TableContents, restore, scan
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import (
    COMMITTED,
    FREE,
    HEADER_DTYPE,
    RESERVED,
    ROW_DTYPE,
    TableLayout,
    guards_of,
    row_words,
)
from tests.support.kvpool.node_model import KIB, Node, key
from tests.support.kvpool.profiled import calls_of
from tests.support.kvpool.table_model import LAYOUT, Table, following_table


def written_table(*keys: int, length: int = 5 * KIB) -> tuple[Node, Table, int]:
    table = Table()
    node = following_table(table)
    c = node.connect()
    ns = node.open(c)
    node.put(c, ns, *keys, length=length)
    return node, table, c


def restarted(contents: TableContents) -> NodeState:
    slots = SlotAllocator(LAYOUT.arena_bytes, LAYOUT.slab_bytes, LAYOUT.min_slot_bytes)
    state = NodeState("n0", 2, PageStore(slots, 10_000), Limits(quarantine_s=30), 0.0)
    state.restore(contents, 0.0)
    state.check()
    return state


def test_every_committed_page_comes_back_with_its_facts_and_order() -> None:
    node, table, c = written_table(*range(20))
    node.put(c, 1, 50, length=20 * KIB)
    contents = table.scan()
    assert (len(contents.slots), contents.quarantined, contents.dropped) == (21, [], [])
    state = restarted(contents)
    old = node.state.store
    for k in [*range(20), 50]:
        slot = state.store.find(1, key(k))
        assert slot == old.find(1, key(k))
        for column in ("length_bytes", "checksum", "sequence", "namespace"):
            assert getattr(state.store.facts, column)[slot] == getattr(old.facts, column)[slot]
        assert state.store.slots.offset(slot) == old.slots.offset(slot)
    out: list[object] = []
    state.store.clear(1, 2, out)  # type: ignore[arg-type]
    state.check()
    assert state.store.bytes_in_state[FREE] == LAYOUT.arena_bytes


@pytest.mark.parametrize(("length", "gone"), [(4, [0]), (20, list(range(16, 32)))], ids=["page", "slab"])
def test_after_a_restart_the_page_or_the_slab_unused_for_longest_goes_first(
    length: int, gone: list[int]
) -> None:
    _, table, _ = written_table(*range(64), length=4 * KIB)  # four slabs of 16
    state = restarted(table.scan())
    state.handle(ev.Connected(1, "shm", "x", 1), 1.0)
    state.handle(ev.Received(1, m.OpenNamespace(9, "ns", {})), 1.0)
    if length == 20:
        state.handle(ev.Received(1, m.Get(1, 1, [key(0)], [4 * KIB])), 1.0)  # the first slab is fresh now
    state.handle(ev.Received(1, m.Reserve(2, 1, [key(100)], [length * KIB])), 1.0)
    state.check()
    assert [k for k in range(64) if state.store.find(1, key(k)) < 0] == gone


def test_unfinished_writes_are_quarantined_and_then_free() -> None:
    node, table, c = written_table(1)
    node.reserve(c, 1, 2, 3, length=5 * KIB)
    contents = table.scan()
    assert len(contents.quarantined) == 2
    state = restarted(contents)
    assert state.next_deadline_s == 30.0
    assert state.status(0, 0.0).quarantined_bytes == 16 * KIB
    freed = state.handle(ev.Tick(), 30.0)
    assert [action.slots for action in freed if isinstance(action, ev.FreeRows)] == [contents.quarantined]
    state.check()


def test_freed_and_evicted_pages_do_not_come_back() -> None:
    node, table, c = written_table(1, 2, 3)
    pin = node.get(c, 1, 2, length=5 * KIB)[0]
    node.send(c, m.Discard(9, 1, [key(1), key(2)], [1, pin.sequence]))
    contents = table.scan()
    assert contents.keys == [key(3)] or set(contents.keys) == {key(1), key(3)}
    assert key(2) not in contents.keys  # though it is still pinned


def test_a_flipped_bit_anywhere_in_a_row_loses_that_page_alone_and_is_never_believed() -> None:
    _, table, _ = written_table(*range(8))
    start = LAYOUT.rows_at + 3 * ROW_DTYPE.itemsize
    facts = set(zip(*(c.tolist() for c in columns(table.scan())), strict=True))
    used_bytes = ROW_DTYPE.fields["spare"][1]  # type: ignore[index]
    for bit in range(8 * used_bytes):
        table.buffer[start + bit // 8] ^= 1 << (bit % 8)
        contents = table.scan()
        kept = set(zip(*(c.tolist() for c in columns(contents)), strict=True))
        assert kept < facts, f"bit {bit}"
        assert len(kept) == 7
        assert len(contents.dropped) + len(contents.quarantined) <= 1
        table.buffer[start + bit // 8] ^= 1 << (bit % 8)


def columns(contents: TableContents) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [contents.slots, contents.lengths, contents.checksums, contents.sequences, contents.namespaces]


@pytest.mark.parametrize(("slot", "left"), [(5, [key(1), key(2)]), (0, [key(2)])], ids=["free", "evicted"])
def test_a_slot_is_reserved_by_one_store_and_a_commit_torn_at_any_store_is_no_page(
    slot: int, left: list[bytes]
) -> None:
    _, table, _ = written_table(1, 2)
    row = LAYOUT.rows_at + slot * ROW_DTYPE.itemsize
    state_at = row + 80
    before = bytes(table.buffer)
    table.writer.reserve([slot], table.space)
    reserved = bytes(table.buffer)
    if slot == 0:
        changed = [at for at in range(len(before)) if before[at] != reserved[at]]
        assert set(changed) <= set(range(state_at, state_at + 8)), "only the state changes"
    write(table, slot, key(9), 123, 77)
    # the state is stored last; the other words may have arrived in any prefix, the state not yet
    for length in range(0, ROW_DTYPE.itemsize + 1, 4):
        torn = bytearray(reserved)
        torn[row : row + length] = table.buffer[row : row + length]
        for state in (RESERVED, FREE) if slot == 0 and length > 80 else (RESERVED,):
            torn[state_at : state_at + 8] = state.to_bytes(8, "little")
            contents = scan(LAYOUT, LAYOUT.slab_class(torn), LAYOUT.table_rows(torn), table.spaces)
            assert contents.quarantined == ([slot] if state == RESERVED else [])
            assert contents.keys == left


def write(table: Table, slot: int, k: bytes, checksum: int, sequence: int) -> None:
    table.writer.commit([slot], [k], [table.space], [5 * KIB], [checksum], [sequence], 3.5)


@pytest.mark.parametrize("slab_class", [0, 3, 4 * KIB, 12 * KIB, 1 << 40, (1 << 64) - 4096])
def test_a_wrong_slab_class_drops_the_pages_of_that_slab_alone(slab_class: int) -> None:
    _, table, _ = written_table(*range(16))  # 8 per slab
    table.classes[0] = slab_class
    contents = table.scan()
    assert len(contents.slots) == 8
    assert (contents.slots >= LAYOUT.slots_per_slab).all()
    restarted(contents)


def test_of_two_rows_with_one_key_the_newer_is_kept() -> None:
    _, table, _ = written_table(1, 2)
    write(table, 5, key(1), 42, 900)
    contents = table.scan()
    assert (len(contents.slots), contents.dropped) == (2, [0])
    assert restarted(contents).store.find(1, key(1)) == 5


def test_pages_of_an_unknown_namespace_are_dropped() -> None:
    _, table, _ = written_table(1, 2)
    contents = scan(LAYOUT, table.classes, table.rows, {2: 2, 3: 3})
    assert (len(contents.slots), sorted(contents.dropped)) == (0, [0, 1])


def test_random_bytes_are_no_pages() -> None:
    rng = np.random.default_rng(3)
    table = Table()
    table.buffer[HEADER_DTYPE.itemsize :] = rng.bytes(len(table.buffer) - HEADER_DTYPE.itemsize)
    assert len(table.scan().slots) == 0
    table.classes[:] = 8 * KIB
    contents = table.scan()
    assert len(contents.slots) == 0
    restarted(contents)


def test_a_batch_of_commits_writes_whole_rows_before_any_of_them_says_committed() -> None:
    table, slots = Table(), list(range(3, 15))
    table.classes[:] = 8 * KIB
    table.writer.reserve(slots, 1)
    words, kept = table.writer._words, []

    class Watched:
        def __setitem__(self, where: object, value: object) -> None:
            words[where] = value  # type: ignore[index]
            kept.append(table.rows["state"].copy())

    table.writer._words = Watched()  # type: ignore[assignment]
    columns = [[n] * len(slots) for n in (1, 5 * KIB, 7)]
    table.writer.commit(slots, [key(n) for n in slots], *columns, list(range(len(slots))), 1.0)
    assert [(state[slots] == COMMITTED).all() for state in kept] == [False, True]
    assert not (kept[0] == COMMITTED).any()


def test_pages_are_taken_over_without_a_call_for_each() -> None:
    pages = 1 << 15
    layout = TableLayout(pages * 4 * KIB, 32 << 20, 4 * KIB)
    rng = np.random.default_rng(1)
    rows = np.zeros(pages, ROW_DTYPE)
    rows["key"] = rng.integers(0, 1 << 63, (pages, 4))
    rows["space"], rows["length_bytes"], rows["state"] = 1, 4 * KIB, COMMITTED
    rows["sequence"] = rng.permutation(pages)
    rows["guard"] = guards_of(row_words(rows))
    classes = np.full(layout.slabs, 4 * KIB, np.uint64)
    store = PageStore(SlotAllocator(layout.arena_bytes, layout.slab_bytes, layout.min_slot_bytes), 1)
    calls = calls_of(lambda: restore(store, scan(layout, classes, rows, {1: 1}), 0.0))
    assert len(store.index) == pages
    assert calls < pages / 20, "a million pages would take longer than a second"
