from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.core.store.slot_allocator import NONE, SlotAllocator

KIB = 1024


def test_classes_are_lengths_rounded_up_to_4_kib_and_at_least_the_smallest_slot() -> None:
    slots = SlotAllocator(256 * KIB, 64 * KIB, 8 * KIB)
    lengths = (1, 8192, 8193, 65536, 65537)
    assert [slots.class_of(n) for n in lengths] == [8192, 8192, 12288, 65536, None]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([4, 8, 12, 32]), st.integers(0, 60), st.integers(1, 20)), max_size=80)
)
def test_any_sequence_of_allocations_and_frees_conserves_slots(steps: list[tuple[int, int, int]]) -> None:
    slots = SlotAllocator(128 * KIB, 32 * KIB, 4 * KIB)
    taken: list[int] = []
    for kib, choice, count in steps:
        if choice < 25 and taken:
            slots.free(taken.pop(choice % len(taken)))
        else:
            found = slots.allocate(kib * KIB, count)
            while len(found) < count and slots.assign(kib * KIB) != NONE:
                found += slots.allocate(kib * KIB, count - len(found))
            assert len(found) <= count
            assert len({*taken, *found}) == len(taken) + len(found)
            taken += found
        slots.check(taken)
