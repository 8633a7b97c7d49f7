"""What every eviction policy does. To add one, name it here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.policies.base import EvictionPolicy, Links
from pdserve.kvpool.policies.lru import Lru

SLOTS = 16
POLICIES: dict[str, Callable[[Links], EvictionPolicy]] = {"lru": Lru}
STEPS = st.lists(st.tuples(st.sampled_from("ihr"), st.integers(0, SLOTS - 1)), max_size=60)


@pytest.fixture(params=sorted(POLICIES))
def make(request: pytest.FixtureRequest) -> Callable[[Links], EvictionPolicy]:
    return POLICIES[request.param]


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(steps=STEPS)
def test_the_victims_are_exactly_the_slots_held(name: str, steps: list[tuple[str, int]]) -> None:
    links = Links(SLOTS)
    policy, other = POLICIES[name](links), POLICIES[name](links)
    held: set[int] = set()
    others: set[int] = set()
    for now_s, (step, slot) in enumerate(steps):
        mine = slot % 2 == 0  # two policies share the links
        chosen, members = (policy, held) if mine else (other, others)
        if step == "i" and slot not in members:
            chosen.on_insert(slot, now_s)
            members.add(slot)
        elif step == "h" and slot in members:
            chosen.on_hit(slot, now_s)
        elif step == "r" and slot in members:
            chosen.on_remove(slot)
            members.discard(slot)
        assert sorted(policy.victims()) == sorted(held)
        assert sorted(other.victims()) == sorted(others)
        assert (len(policy), len(other)) == (len(held), len(others))


def test_a_policy_can_be_restored_and_goes_on(make: Callable[[Links], EvictionPolicy]) -> None:
    policy = make(Links(SLOTS))
    policy.restore([5, 3, 8], 0.0)
    policy.on_hit(5, 1.0)
    policy.on_remove(3)
    policy.on_insert(1, 2.0)
    assert sorted(policy.victims()) == [1, 5, 8]
    empty = make(Links(SLOTS))
    empty.restore([], 0.0)
    assert list(empty.victims()) == []


def test_lru_evicts_in_order_of_last_use() -> None:
    lru = Lru(Links(SLOTS))
    for slot in (4, 2, 9, 1):
        lru.on_insert(slot, 0.0)
    lru.on_hit(4, 1.0)
    lru.on_hit(9, 2.0)
    assert list(lru.victims()) == [2, 1, 4, 9]
