"""Copies between an arena and a process's memory, by the compiled copier and by NumPy."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PoolTimeout, PoolUnavailable
from pdserve.kvpool.native import build, copying, plain
from pdserve.kvpool.protocol.messages import GRANTED, HIT, Grant, Pin
from pdserve.kvpool.protocol.page_bytes import Bytes1D, aligned, checksum_page
from pdserve.kvpool.protocol.slot_table import COMMITTED, RESERVED, TableLayout
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK
from pdserve.kvpool.transports.shm import MappedPages

MIB = 1 << 20
LAYOUT = TableLayout(arena_bytes=4 * MIB, slab_bytes=MIB, min_slot_bytes=MIB // 4)
OFFSET, SEQUENCE = 4096, 7
SIZES = [[1], [240], [241], [64, 64, 64, 64], [1024, 1024], [300_000, 5, 33_000], [MIB + 1, MIB]]

compiled = build.compiled()
COPIERS = [
    pytest.param(plain, id="plain"),
    pytest.param(compiled, id="compiled", marks=pytest.mark.skipif(compiled is None, reason="not built")),
]


class Memory:
    """An arena and its table; `pages` copies from and to them. Slot 0 holds filling SEQUENCE."""

    def __init__(self, *, checksum: bool = True) -> None:
        self.arena = aligned(LAYOUT.arena_bytes)
        self.arena[:] = 0
        self.table = bytearray(LAYOUT.table_bytes)
        self.rows = LAYOUT.table_rows(self.table)
        self.rows["state"], self.rows["sequence"] = COMMITTED, SEQUENCE
        self.pages = MappedPages(self.arena, memoryview(self.table), LAYOUT, checksum)

    def write(self, page: list[Bytes1D], offset: int = OFFSET, deadline_s: float = math.inf) -> int:
        [checksum] = self.pages.write([Grant(GRANTED, 0, offset, SEQUENCE)], [page], deadline_s)
        return checksum

    def read(
        self,
        into: list[Bytes1D],
        checksum: int,
        offset: int = OFFSET,
        slot: int = 0,
        sequence: int = SEQUENCE,
    ) -> int:
        pin = Pin(HIT, slot, offset, checksum, sequence)
        [outcome] = self.pages.read([pin], [into], math.inf)
        return outcome


@pytest.fixture(params=COPIERS)
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(copying, "compiled", lambda: request.param)
    return Memory()


def a_page(sizes: list[int], seed: int = 7) -> list[Bytes1D]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, np.uint8) for size in sizes]


def an_empty(page: list[Bytes1D]) -> list[Bytes1D]:
    return [np.zeros_like(segment) for segment in page]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_page_written_is_read_with_the_checksum_of_its_bytes_in_order(
    memory: Memory, sizes: list[int]
) -> None:
    page = a_page(sizes)
    checksum = memory.write(page)
    assert checksum == checksum_page(page)
    assert memory.arena[OFFSET : OFFSET + sum(sizes)].tobytes() == b"".join(one.tobytes() for one in page)
    assert not memory.arena[:OFFSET].any()
    assert not memory.arena[OFFSET + sum(sizes) :].any()
    copy = an_empty(page)
    assert memory.read(copy, checksum) == OK
    assert all(map(np.array_equal, copy, page))


@pytest.mark.parametrize("copier", COPIERS)
@given(
    sizes=st.lists(st.integers(1, 40_000) | st.sampled_from([64, 1024, 32_768]), min_size=1, max_size=6),
    offset=st.integers(0, 70_000),
    hashes=st.booleans(),
)
def test_any_cut_at_any_place_moves_these_bytes_alone(
    copier: ModuleType, sizes: list[int], offset: int, hashes: bool
) -> None:
    if hashes and sum(sizes) < copying.LEAST_HASHED_BYTES:
        sizes = [*sizes, copying.LEAST_HASHED_BYTES]
    arena, page = aligned(400_000), a_page(sizes)
    arena[:] = 0xEE
    [checksum] = copier.write(arena, [offset], [page], hashes, math.inf)
    assert checksum == (checksum_page(page) if hashes else 0)
    end = offset + sum(sizes)
    assert np.array_equal(arena[offset:end], np.concatenate(page))
    assert (arena[:offset] == 0xEE).all()
    assert (arena[end:] == 0xEE).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_a_byte_changed_anywhere_is_found(memory: Memory, sizes: list[int]) -> None:
    page = a_page(sizes)
    checksum = memory.write(page)
    for place in (0, sum(sizes) // 2, sum(sizes) - 1):
        memory.arena[OFFSET + place] ^= 1
        assert memory.read(an_empty(page), checksum) == CORRUPT
        memory.arena[OFFSET + place] ^= 1


def test_pages_without_a_checksum_are_taken_as_they_are(memory: Memory) -> None:
    page = a_page([300])
    memory.write(page)
    assert memory.read(copy := an_empty(page), checksum=0) == OK
    assert np.array_equal(copy[0], page[0])


@pytest.mark.parametrize(("state", "sequence"), [(RESERVED, SEQUENCE), (COMMITTED, SEQUENCE + 1)])
def test_a_slot_that_holds_another_filling_is_lost(memory: Memory, state: int, sequence: int) -> None:
    page = a_page([300])
    checksum = memory.write(page)
    memory.rows[0]["state"], memory.rows[0]["sequence"] = state, sequence
    assert memory.read(an_empty(page), checksum) == LOST


def test_a_slot_refilled_during_the_copy_is_never_read_as_the_page_it_was(
    memory: Memory, refilled: Refiller
) -> None:
    """Without checksums: the row alone tells. The bytes of each filling are its number."""
    seen = {OK: 0, LOST: 0}
    into = [np.zeros(Refiller.PAGE_BYTES, np.uint8)]
    while min(seen.values()) < 20:
        sequence = int(memory.rows[0]["sequence"])
        outcome = memory.read(into, 0, sequence=sequence)
        seen[outcome] += 1
        if outcome == OK:
            assert (into[0] == sequence % 256).all()


class Refiller:
    """A node that fills slot 0 again and again, as fast as it can."""

    PAGE_BYTES = MIB

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._fill(SEQUENCE)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        sequence = SEQUENCE
        while not self._ended.wait(0.001):
            sequence += 1
            self._fill(sequence)

    def _fill(self, sequence: int) -> None:
        row = self._memory.rows[0]
        row["state"] = RESERVED
        self._memory.arena[OFFSET : OFFSET + self.PAGE_BYTES] = sequence % 256
        row["sequence"] = sequence
        row["state"] = COMMITTED


@pytest.fixture
def refilled(memory: Memory) -> Iterator[Refiller]:
    refiller = Refiller(memory)
    refiller.start()
    yield refiller
    refiller.end()


@pytest.mark.parametrize(
    ("offset", "slot"),
    [
        (LAYOUT.arena_bytes - 299, 0),
        (LAYOUT.arena_bytes, 0),
        (1 << 63, 0),
        ((1 << 64) - 300, 0),
        (1 << 64, 0),
        (-1, 0),
        (0, LAYOUT.rows),
        (0, (1 << 64) - 1),
        (0, -1),
    ],
)
def test_a_place_outside_the_memory_is_not_touched(memory: Memory, offset: int, slot: int) -> None:
    into = an_empty(a_page([300]))
    memory.arena[:] = 0xEE
    with pytest.raises(PoolUnavailable, match="outside its memory"):
        memory.read(into, 1, offset, slot)
    assert not into[0].any()
    if slot == 0:
        with pytest.raises(PoolUnavailable, match="outside its memory"):
            memory.write(a_page([300]), offset)
        assert (memory.arena == 0xEE).all()


def test_one_bad_place_of_a_batch_stops_it_before_the_first_byte(memory: Memory) -> None:
    pages = [a_page([300]), a_page([300])]
    grants = [Grant(GRANTED, 0, OFFSET, 1), Grant(GRANTED, 0, LAYOUT.arena_bytes, 1)]
    with pytest.raises(PoolUnavailable, match="outside its memory"):
        memory.pages.write(grants, pages, math.inf)
    assert not memory.arena.any()


def test_nothing_is_copied_after_the_deadline(memory: Memory) -> None:
    with pytest.raises(PoolTimeout):
        memory.write(a_page([300]), deadline_s=-math.inf)
    assert not memory.arena.any()


@pytest.mark.parametrize("copier", COPIERS)
def test_memory_that_may_only_be_read_is_not_written(copier: ModuleType) -> None:
    arena, page = np.zeros(4096, np.uint8), a_page([300])
    arena.flags.writeable = False
    with pytest.raises((ValueError, BufferError, TypeError)):
        copier.write(arena, [0], [page], True, math.inf)
    page[0].flags.writeable = False
    table = bytearray(LAYOUT.table_bytes)
    with pytest.raises((ValueError, BufferError, TypeError)):
        copier.read(arena, table, LAYOUT.rows_at, [0], [0], [0], [0], [page], False, math.inf)


@pytest.mark.skipif(compiled is None, reason="not built")
@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.write(np.zeros(4096, np.uint8), [], [a_page([300])], True, math.inf),
        lambda c: c.write(np.zeros(4096, np.uint8), [0], [a_page([100])], True, math.inf),
        lambda c: c.write(np.zeros(4096, np.uint8), (0,), [a_page([300])], True, math.inf),
        lambda c: c.write(np.zeros(4096, np.uint8), ["0"], [a_page([300])], True, math.inf),
        lambda c: c.write(np.zeros(4096, np.uint8), [0], [3], True, math.inf),
        lambda c: c.write(np.zeros(4096, np.uint8), [0], [[3]], True, math.inf),
        lambda c: c.write(np.zeros(4096, np.uint8), [0], [[np.zeros(600, np.uint8)[::2]]], True, math.inf),
        lambda c: c.read(
            np.zeros(999, np.uint8), b"", 9, [0], [0], [0], [0], [a_page([300])], True, math.inf
        ),
    ],
)
def test_what_makes_no_sense_is_an_error_and_no_memory_is_touched(call: object) -> None:
    with pytest.raises((ValueError, TypeError, BufferError, IndexError)):
        call(compiled)  # type: ignore[operator]


def test_a_process_without_the_c_module_says_so_once_and_copies_with_numpy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pdserve.kvpool.native._native", None)
    build.compiled.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            memories = Memory(), Memory()
        assert ["NumPy" in record.message for record in caplog.records] == [True]
        page = a_page([300])
        assert memories[0].write(page) == checksum_page(page)
    finally:
        build.compiled.cache_clear()
