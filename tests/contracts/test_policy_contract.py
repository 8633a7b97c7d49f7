"""What every eviction policy does, the example of docs/extending/policy.md included. To add one, name it in
`pdserve.kvpool.policies`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.examples.eviction import ReadOnce
from pdserve.errors import ConfigError
from pdserve.kvpool.policies import POLICIES, make_policy
from pdserve.kvpool.policies.base import EvictionPolicy, Links
from tests.support.kvpool.profiled import calls_of

EXAMPLE = "the documents' example"
NAMES = (*POLICIES, EXAMPLE)
SLOTS = 16
KEYS = [bytes([n]) * 32 for n in range(24)]
STEPS = st.lists(st.tuples(st.sampled_from("ihred"), st.integers(0, SLOTS - 1)), max_size=60)


def make(name: str, links: Links) -> EvictionPolicy:
    if name == EXAMPLE:
        return ReadOnce(links)
    return make_policy(name, links, ttl_s=10.0 if name == "ttl" else None)


@pytest.mark.parametrize("name", NAMES)
@given(steps=STEPS)
def test_the_victims_are_exactly_the_slots_held(name: str, steps: list[tuple[str, int]]) -> None:
    links = Links(SLOTS)
    policy, other = make(name, links), make(name, links)
    held: set[int] = set()
    others: set[int] = set()
    for now_s, (step, slot) in enumerate(steps):
        mine = slot % 2 == 0  # two policies share the links
        chosen, members = (policy, held) if mine else (other, others)
        if step == "i" and slot not in members:
            chosen.on_insert(slot, KEYS[slot], now_s)
            members.add(slot)
        elif step == "h" and slot in members:
            chosen.on_hit(slot, now_s)
        elif step == "d" and slot in members:
            chosen.on_demote(slot)
        elif step == "r" and slot in members:
            chosen.on_remove(slot)
            members.discard(slot)
        elif step == "e" and slot in members:
            chosen.on_evict(slot, KEYS[slot])
            members.discard(slot)
        assert sorted(policy.victims()) == sorted(held)
        assert sorted(other.victims()) == sorted(others)
        assert (len(policy), len(other)) == (len(held), len(others))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ttl"])
def test_demoted_pages_go_first_the_last_demoted_before_the_others(name: str) -> None:
    policy = make(name, Links(SLOTS))
    for slot in range(6):
        policy.on_insert(slot, KEYS[slot], 0.0)
    policy.on_hit(3, 1.0)
    for slot in (1, 3, 5):
        policy.on_demote(slot)
    assert list(policy.victims())[:3] == [5, 3, 1]
    policy.on_hit(3, 2.0)
    assert list(policy.victims())[-1] == 3 or name == "fifo", "being read makes it as good as others"


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_can_be_restored_and_goes_on(name: str) -> None:
    policy = make(name, Links(SLOTS))
    policy.restore([5, 3, 8], np.zeros(3))
    assert list(policy.victims()) == [5, 3, 8]
    policy.on_hit(5, 1.0)
    policy.on_remove(3)
    policy.on_insert(1, KEYS[1], 2.0)
    assert sorted(policy.victims()) == [1, 5, 8]
    empty = make(name, Links(SLOTS))
    empty.restore([], np.zeros(0))
    assert list(empty.victims()) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_policy_lets_go_of_its_slots_one_by_one_while_they_go_elsewhere(name: str) -> None:
    links = Links(SLOTS)
    policy, heir = make(name, links), make(name, links)
    for slot in range(6):
        policy.on_insert(slot, KEYS[slot], 0.0)
    policy.on_hit(4, 0.0)
    policy.on_evict(2, KEYS[2])
    policy.close()
    for left in (4, 3):
        policy.on_remove(next(policy.victims()))
        assert len(policy) == len(list(policy.victims())) == left
    given = []
    for slot in policy.victims():
        given.append(slot)
        heir.on_insert(slot, KEYS[slot], 1.0)
    assert sorted(given) == sorted(heir.victims())
    assert len(given) == 3


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_restored_without_a_call_for_each(name: str) -> None:
    slots = np.random.default_rng(1).permutation(10_000)
    policy = make(name, Links(len(slots)))
    times_s = np.zeros(len(slots))
    assert calls_of(lambda: policy.restore(slots, times_s)) < 50
    assert list(policy.victims()) == slots.tolist()


def test_unknown_policies_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'LRUU' is no eviction policy: choose one of .*nearest is 'lru'"):
        make_policy("LRUU", Links(1))
    with pytest.raises(ConfigError, match="set ttl_s"):
        make_policy("ttl", Links(1))
    with pytest.raises(ConfigError, match="above 0"):
        make_policy("lru", Links(1), ttl_s=0.0)
