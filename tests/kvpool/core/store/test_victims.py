"""Victims are found past pages that somebody holds, however many these are, in bounded time."""

from __future__ import annotations

import pytest

from pdserve.kvpool.core.events import LOCAL, Connected
from pdserve.kvpool.policies import POLICIES
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import GRANTED, MAX_PAGES
from tests.support.kvpool.node_model import KIB, Node, key, statuses
from tests.support.kvpool.profiled import calls_of

PAGES, PINNED = 4096, 1300
ORDERS = [policy for policy in POLICIES if policy != "keep"]


def pinned_at_the_head(policy: str, pages: int = PAGES, pinned: int = PINNED) -> tuple[Node, int, int, int]:
    """A full node whose `pinned` first victims are held by a connection that moves no pages: its pins do not
    count as reads. The node, a writer, the holder, and the namespace.
    """
    node = Node(slabs=pages // 16, slab_bytes=64 * KIB, follows_places=False)
    ns = node.open(node.connect(), "ns")
    ttl_s = 1e6 if policy == "ttl" else None
    node.state.store.configure_namespace(ns, policy=policy, ttl_s=ttl_s)
    store, out = node.state.store, []  # type: ignore[var-annotated]
    for first in range(0, pages, MAX_PAGES):
        keys = [key(n) for n in range(first, first + MAX_PAGES)]
        slots = store.take(store.index.namespace(ns), keys, 4 * KIB, 4 * KIB, out)
        store.commit(slots, [1] * len(slots), 0.0, out)
    holder = LOCAL  # whose gets are no reads
    node.do(Connected(holder, "shm", "this node", 0, peer=True))
    for first in range(0, pinned, 100):
        assert [pin.status for pin in node.get(holder, ns, *range(first, first + 100))] == [m.HIT] * 100
    return node, node.connect(), holder, ns


@pytest.mark.parametrize("policy", ORDERS)
def test_a_writer_finds_room_behind_many_held_pages(policy: str) -> None:
    node, writer, holder, ns = pinned_at_the_head(policy)
    assert statuses(node.reserve(writer, ns, *range(PAGES, PAGES + 32))) == [GRANTED] * 32
    assert node.exists(holder, ns, *range(PINNED)) == [1] * PINNED
    assert node.exists(holder, ns, *range(PINNED, PINNED + 32)) == [0] * 32


@pytest.mark.parametrize("policy", ORDERS)
def test_pages_that_were_passed_are_the_first_victims_once_they_are_let_go(policy: str) -> None:
    node, writer, holder, ns = pinned_at_the_head(policy, 256, 100)
    node.put(writer, ns, 1000)
    node.disconnect(holder)
    node.put(writer, ns, *range(1001, 1011))
    assert sum(node.exists(writer, ns, *range(100))) == 90
    assert node.exists(writer, ns, *range(101, 256)) == [1] * 155


def test_a_page_that_is_read_while_it_is_passed_over_is_as_good_as_any_that_was_read() -> None:
    node, writer, holder, ns = pinned_at_the_head("lru", 256, 100)
    node.put(writer, ns, 1000)
    node.release(writer, *node.get(writer, ns, 7))
    node.disconnect(holder)
    node.put(writer, ns, *range(1001, 1101))
    assert node.exists(writer, ns, 7) == [1]
    assert sum(node.exists(writer, ns, *range(100))) == 1


def test_the_pages_of_a_changed_order_are_all_in_the_new_one() -> None:
    node, writer, _, ns = pinned_at_the_head("lru", 256, 100)
    node.put(writer, ns, 1000)
    node.state.store.configure_namespace(ns, policy="arc")
    node.put(writer, ns, 1001)  # each step checks that every page is in one order


def test_held_pages_are_passed_once_and_not_by_each_request() -> None:
    node, _, _, ns = pinned_at_the_head("lru")

    def calls_to_reserve(page: int) -> int:
        store = node.state.store
        return calls_of(lambda: store.take(store.index.namespace(ns), [key(page)], 4 * KIB, 4 * KIB, []))

    first, second = calls_to_reserve(PAGES), calls_to_reserve(PAGES + 1)
    assert second < first / 20


def test_one_request_passes_a_bounded_number_of_held_pages_and_the_next_goes_on_from_there() -> None:
    node, writer, _, ns = pinned_at_the_head("lru", 8192, 6000)
    answers = [statuses(node.reserve(writer, ns, 10_000 + n)) for n in range(4)]
    assert answers[0] == [m.FULL]
    assert answers[-1] == [GRANTED]
