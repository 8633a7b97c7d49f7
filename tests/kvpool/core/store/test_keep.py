"""The policy "keep": pages of such a namespace are evicted for nobody. And pages that are removed by name."""

from __future__ import annotations

import pytest

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import FULL, GRANTED
from tests.support.kvpool.node_model import KIB, Node, key, opened, statuses


def two(**options: int) -> tuple[Node, int, int, int]:
    """A node, a client, a namespace that is kept and one that is not."""
    node = Node(**options)
    c = node.connect()
    kept, other = node.open(c, "kept"), node.open(c, "other")
    node.state.store.configure_namespace(kept, policy="keep")
    return node, c, kept, other


def capacity(node: Node) -> int:
    """In pages of 4 KiB."""
    return node.state.store.slots.capacity_bytes // (4 * KIB)


@pytest.mark.parametrize(("slabs", "length"), [(4, 4 * KIB), (2, 8 * KIB)], ids=["same", "another"])
def test_pages_that_are_kept_outlast_all_others_of_any_size(slabs: int, length: int) -> None:
    node, c, kept, other = two(slabs=slabs)
    node.put(c, kept, 1, 2, 3)
    for n in range(100, 100 + 3 * capacity(node)):
        reserved = node.reserve(c, other, n, length=length)
        if statuses(reserved) == [GRANTED]:
            node.commit(c, *reserved)
    assert node.exists(c, kept, 1, 2, 3) == [1, 1, 1]


def test_kept_pages_may_displace_others_and_then_there_is_no_more_room() -> None:
    node, c, kept, other = two()
    node.put(c, other, *range(100, 100 + capacity(node)))
    for n in range(capacity(node)):
        node.put(c, kept, n)
    assert statuses(node.reserve(c, kept, 9999)) == [FULL]
    assert statuses(node.reserve(c, other, 9999)) == [FULL]
    assert all(node.exists(c, kept, *range(capacity(node))))


def test_a_kept_namespace_at_its_quota_is_refused_more_and_keeps_what_it_has() -> None:
    node, c, kept, _ = two()
    node.state.store.configure_namespace(kept, policy="keep", quota_bytes=8 * KIB)
    node.put(c, kept, 1, 2)
    assert statuses(node.reserve(c, kept, 3)) == [FULL]
    node.state.store.configure_namespace(kept, policy="keep", quota_bytes=4 * KIB)
    node.pass_time(1.0)
    assert node.exists(c, kept, 1, 2) == [1, 1]
    assert node.state.next_deadline_s > node.now_s


def test_a_policy_that_is_changed_counts_for_the_pages_that_are_there() -> None:
    node, c, kept, other = two()
    node.put(c, other, 1)
    node.state.store.configure_namespace(other, policy="keep")
    node.put(c, kept, 2)
    node.state.store.configure_namespace(kept, policy="lru")
    third = node.open(c, "third")
    for n in range(100, 100 + 2 * capacity(node)):
        node.put(c, third, n)
    assert node.exists(c, other, 1) == [1]
    assert node.exists(c, kept, 2) == [0]


def test_pages_are_removed_by_name_whichever_filling_they_are() -> None:
    node, c, ns = opened()
    node.put(c, ns, 1, 2, 3)
    assert node.ask(c, m.Discard(7, ns, [key(1), key(3), key(9)], []), m.Done) == m.Done(7, 2)
    assert node.exists(c, ns, 1, 2, 3) == [0, 1, 0]
