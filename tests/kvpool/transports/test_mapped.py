"""Pages to and from an arena that is mapped, by ordinary copies and by those that stream past the cache."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.protocol.messages import GRANTED, HIT, Grant, Pin
from pdserve.kvpool.protocol.page_bytes import Bytes1D, checksum_page
from pdserve.kvpool.transports import mapped
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK
from pdserve.kvpool.transports.mapped import STREAMED_READ_BYTES, STREAMED_WRITE_BYTES, MappedPages

OFFSET = 4096
SIZES = [[1], [300_000, 5], [STREAMED_WRITE_BYTES + 1, STREAMED_WRITE_BYTES], [STREAMED_READ_BYTES + 7]]


class Rows:
    """A slot table in which every slot holds what it held, or none does."""

    count = 1
    is_refilled = False

    def still_holds(self, slot: int, sequence: int) -> bool:
        return not self.is_refilled


@pytest.fixture(params=[False, True], ids=["ordinary", "streaming"])
def arena(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Bytes1D, Rows, MappedPages]:
    monkeypatch.delenv(mapped.VARIABLE, raising=False)
    if request.param:
        monkeypatch.setenv(*mapped.streaming_environment({}).popitem())
    memory, rows = np.zeros(STREAMED_READ_BYTES * 2, np.uint8), Rows()
    return memory, rows, MappedPages(memory, rows, checksum=True)  # type: ignore[arg-type]


def a_page(sizes: list[int]) -> list[Bytes1D]:
    random = np.random.default_rng(7)
    return [random.integers(0, 256, size, np.uint8) for size in sizes]


def an_empty(page: list[Bytes1D]) -> list[Bytes1D]:
    return [np.zeros_like(segment) for segment in page]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_page_written_is_read_with_the_checksum_of_its_bytes_in_order(
    arena: tuple[Bytes1D, Rows, MappedPages], sizes: list[int]
) -> None:
    memory, _, pages = arena
    page = a_page(sizes)
    [checksum] = pages.write([Grant(GRANTED, slot=0, offset=OFFSET, sequence=1)], [page], math.inf)
    assert checksum == checksum_page(page)
    assert memory[OFFSET : OFFSET + sum(sizes)].tobytes() == b"".join(one.tobytes() for one in page)
    assert not memory[:OFFSET].any()
    assert not memory[OFFSET + sum(sizes) :].any()
    copy = an_empty(page)
    assert pages.read([Pin(HIT, slot=0, offset=OFFSET, checksum=checksum, sequence=1)], [copy], math.inf) == [
        OK
    ]
    assert all(map(np.array_equal, copy, page))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_byte_changed_anywhere_is_found(arena: tuple[Bytes1D, Rows, MappedPages], sizes: list[int]) -> None:
    memory, _, pages = arena
    page = a_page(sizes)
    [checksum] = pages.write([Grant(GRANTED, slot=0, offset=OFFSET, sequence=1)], [page], math.inf)
    for place in (0, sum(sizes) // 2, sum(sizes) - 1):
        memory[OFFSET + place] ^= 1
        assert pages.read(
            [Pin(HIT, slot=0, offset=OFFSET, checksum=checksum, sequence=1)], [an_empty(page)], math.inf
        ) == [CORRUPT]
        memory[OFFSET + place] ^= 1


def test_a_slot_that_was_refilled_during_the_copy_is_lost(arena: tuple[Bytes1D, Rows, MappedPages]) -> None:
    _, rows, pages = arena
    page = a_page([100])
    [checksum] = pages.write([Grant(GRANTED, slot=0, offset=OFFSET, sequence=1)], [page], math.inf)
    rows.is_refilled = True
    assert pages.read(
        [Pin(HIT, slot=0, offset=OFFSET, checksum=checksum, sequence=1)], [an_empty(page)], math.inf
    ) == [LOST]


def test_a_slot_outside_the_arena_is_not_touched(arena: tuple[Bytes1D, Rows, MappedPages]) -> None:
    memory, _, pages = arena
    with pytest.raises(PoolUnavailable, match="outside its memory"):
        pages.write([Grant(GRANTED, slot=0, offset=memory.size - 99, sequence=1)], [a_page([100])], math.inf)


def test_a_users_own_tunables_stay() -> None:
    variable, tunable = mapped.VARIABLE, mapped.TUNABLE
    assert mapped.streaming_environment({"A": "b"}) == {"A": "b", variable: f"{tunable}=0x8000"}
    assert mapped.streaming_environment({variable: "x=1"})[variable] == f"x=1:{tunable}=0x8000"
    assert mapped.streaming_environment({variable: f"{tunable}=9"})[variable] == f"{tunable}=9"
