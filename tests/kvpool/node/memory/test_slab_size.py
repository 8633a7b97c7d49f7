"""How much of a node's memory pages leave unused, with slabs of the default size and of one that follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.kvpool.core.events import AssignSlab
from pdserve.kvpool.core.store.slot_allocator import SLOT_ALIGN_BYTES, SlotAllocator
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.memory.arena import Arena
from pdserve.kvpool.node.memory.placement import MIN_SLOT_BYTES, SLABS, least_slab
from pdserve.kvpool.protocol.slot_table import TableLayout

MIB = 1 << 20
SLAB = 32 * MIB
CAPACITY = 2048 * MIB


def unused(config: PoolNodeConfig, page_bytes: int) -> float:
    """The share of `capacity_bytes` that stays unused when the node is full of pages of this size."""
    slots = SlotAllocator(config.capacity, config.slab, MIN_SLOT_BYTES)
    slot_bytes = slots.class_of(page_bytes)
    assert slot_bytes is not None
    pages = slots.slabs * slots.slots_in(slot_bytes)
    assert isinstance(config.capacity_bytes, int)
    return 1 - pages * slot_bytes / config.capacity_bytes


@pytest.mark.parametrize(
    ("page_mib", "before", "after", "slab_mib"),
    [
        (0.3, 0.01, 0.01, 32),
        (1, 0.0, 0.0, 32),
        (4.5, 0.02, 0.02, 32),
        (8, 0.0, 0.0, 32),
        (9, 0.16, 0.02, 64),
        (16, 0.0, 0.0, 32),
        (20, 0.375, 0.0625, 64),
        (31, 0.03, 0.03, 32),
        (40, 1.0, 0.0625, 128),
    ],
)
def test_slabs_follow_the_size_of_pages(page_mib: float, before: float, after: float, slab_mib: int) -> None:
    page_bytes = int(page_mib * MIB)
    plain = PoolNodeConfig(capacity_bytes=CAPACITY)
    told = PoolNodeConfig(capacity_bytes=CAPACITY, page_bytes=page_bytes)
    if page_bytes <= plain.slab:
        assert unused(plain, page_bytes) == pytest.approx(before, abs=0.01)
    assert unused(told, page_bytes) == pytest.approx(after, abs=0.01)
    assert (plain.slab, told.slab) == (SLAB, slab_mib * MIB)


@given(
    page_bytes=st.integers(1, 200 * MIB),
    capacity_mib=st.sampled_from([2048, 5000, 64 << 10]),
    huge_pages=st.sampled_from(["off", "2MiB"]),
)
@example(page_bytes=20 * MIB, capacity_mib=64 << 10, huge_pages="1GiB")
def test_no_page_leaves_more_than_a_tenth_unused(page_bytes: int, capacity_mib: int, huge_pages: str) -> None:
    page_bytes = max(page_bytes, MIN_SLOT_BYTES)  # smaller ones take a slot of it
    config = PoolNodeConfig(
        capacity_bytes=capacity_mib * MIB,
        page_bytes=page_bytes,
        huge_pages=huge_pages,  # type: ignore[arg-type]
    )
    assert unused(config, page_bytes) <= 0.1
    assert config.slab % SLOT_ALIGN_BYTES == 0


@given(st.integers(MIN_SLOT_BYTES, 4096 * MIB))
def test_small_arenas_have_room_for_pages_of_several_sizes(capacity_bytes: int) -> None:
    slab = least_slab(capacity_bytes)
    assert slab % SLOT_ALIGN_BYTES == 0
    assert slab == SLAB or slab <= max(MIN_SLOT_BYTES, capacity_bytes / SLABS) < 2 * slab


def test_slabs_that_pages_use_badly_are_named_once_with_what_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = TableLayout(4 * MIB, MIB, 64 * 1024)
    arena = Arena("n", tmp_path / "n", layout, 1, fresh=True)
    arena.assign_slab(AssignSlab(0, MIB // 4))
    assert not caplog.messages
    for slab in (1, 2):
        arena.assign_slab(AssignSlab(slab, 5 * MIB // 8))
    [said] = caplog.messages
    assert "655,360 bytes leave 37 % of each slab of 1,048,576 bytes unused: set page_bytes = 655360" in said
    arena.close(keep=True)
