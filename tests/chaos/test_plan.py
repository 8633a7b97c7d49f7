"""The pure parts of a chaos run: plans and pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.plan import DISTURBING, KINDS, LAST_CALM_S, Kind, make_plan
from tests.support.kvpool import made_pages as p


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_a_plan_ends_in_calm_and_disturbs_a_node_once_at_a_time(seed: int, nodes: int) -> None:
    plan = make_plan(seed, 3.0, nodes)
    heavy = [fault for fault in plan.faults if fault.kind in DISTURBING]
    assert all(fault.at_s + fault.for_s + LAST_CALM_S <= plan.minutes * 60 for fault in heavy)
    assert all(0 <= fault.node < nodes for fault in plan.faults)
    for one in heavy:
        at_once = [o for o in heavy if o.node == one.node and o.at_s <= one.at_s < o.at_s + o.for_s]
        assert at_once == [one]


@given(st.integers(0, 2**24), st.integers(0, 2**24), st.integers(0, 65535), st.integers(0, 7))
def test_one_wrong_bit_and_anothers_page_are_seen(page: int, other: int, place: int, bit: int) -> None:
    size = sum(p.segments_of(page))
    right = p.content(p.key_of(1, page), size)
    assert right.shape == (size,)
    damaged = right.copy()
    damaged[place % size] ^= 1 << bit
    assert not np.array_equal(damaged, p.content(p.key_of(1, page), size))
    if page != other:
        lanes = (right == p.content(p.key_of(1, other), size)).reshape(-1, 32)
        assert not lanes.all(axis=1).any()  # they differ in every 32 bytes


@pytest.mark.parametrize(("minutes", "kinds"), [(2.0, KINDS), (2.0, ("kill", "flip")), (0.1, ("flip",))])
def test_a_plan_has_each_kind_that_it_is_given_and_no_other(minutes: float, kinds: tuple[Kind, ...]) -> None:
    for seed in range(10):
        plan = make_plan(seed, minutes, kinds=kinds)
        assert plan == make_plan(seed, minutes, kinds=kinds)
        assert {fault.kind for fault in plan.faults} == set(kinds)
