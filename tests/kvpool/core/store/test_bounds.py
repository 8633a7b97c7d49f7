"""What a namespace, a session and a request may take: quotas, times to live, pins, transfers, policies."""

from __future__ import annotations

import pytest

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import BUSY, FULL, GRANTED, HIT, MISS, PRESENT
from tests.support.kvpool.node_model import KIB, Node, answers, key, opened, statuses

# --- quota


def test_a_namespace_at_its_quota_evicts_its_own_pages_though_the_node_has_room() -> None:
    node = Node()
    c = node.connect()
    a, b = node.open(c, "a"), node.open(c, "b")
    node.state.store.configure_namespace(a, quota_bytes=12 * KIB)
    node.put(c, b, 100)
    node.put(c, a, 1, 2, 3)
    node.get(c, a, 1)
    node.release(c, *node.get(c, a, 1))
    node.put(c, a, 4)
    assert node.exists(c, a, 1, 2, 3, 4) == [1, 0, 1, 1]
    assert node.exists(c, b, 100) == [1]
    status = {found.name: found for found in node.status().namespaces}
    assert (status["a"].slot_bytes, status["a"].counters["evicted_quota"]) == (12 * KIB, 1)
    assert status["b"].evictions == 0


def test_a_lowered_quota_is_reached_by_itself() -> None:
    node, c, ns = opened()
    node.put(c, ns, *range(8))
    node.state.store.configure_namespace(ns, quota_bytes=12 * KIB)
    node.send(c, m.Ping(1))
    assert node.state.next_deadline_s <= node.now_s
    node.pass_time(0.1)
    assert node.exists(c, ns, *range(8)) == [0] * 5 + [1] * 3
    assert node.state.next_deadline_s > node.now_s


# --- time to live


def test_pages_that_end_together_are_freed_in_chunks() -> None:
    node, c, ns = opened(slabs=3, slab_bytes=4096 * KIB)
    node.state.store.configure_namespace(ns, ttl_s=10)
    out: list[object] = []
    store = node.state.store
    for n in range(2500):
        [slot] = store.take(store.index.namespace(ns), [key(n)], 4 * KIB, 4 * KIB, out)  # type: ignore[arg-type]
        store.commit([slot], [0], node.now_s, out)  # type: ignore[arg-type]
    node.pass_time(10)
    assert node.exists(c, ns, *range(100)) == [0] * 100
    assert node.status().pages == 2500 - 1024
    ticks = 0
    while node.status().pages:
        node.pass_time(node.state.next_deadline_s - node.now_s)
        ticks += 1
    assert ticks == 2
    assert node.state.next_deadline_s > node.now_s


def test_a_time_to_live_set_later_counts_from_the_commit() -> None:
    node, c, ns = opened()
    node.put(c, ns, 1)
    node.now_s += 8
    node.put(c, ns, 2)
    node.state.store.configure_namespace(ns, ttl_s=10)
    node.now_s += 2
    assert node.exists(c, ns, 1, 2) == [0, 1]
    node.state.store.configure_namespace(ns, ttl_s=None)
    assert node.exists(c, ns, 1, 2) == [1, 1]  # not freed yet, and now it may stay


# --- policies


@pytest.mark.parametrize(("policy", "gone"), [("lru", 2), ("fifo", 1), ("lfu", 3), ("arc", 3)])
def test_each_namespace_is_evicted_by_its_own_policy(policy: str, gone: int) -> None:
    node, c, ns = opened(slabs=1, slab_bytes=16 * KIB)
    node.state.store.configure_namespace(ns, policy=policy)
    node.put(c, ns, 1, 2, 3, 4)
    for k in (2, 2, 4, 1):
        node.release(c, *node.get(c, ns, k))
    node.release(c, *node.get(c, ns, 3)) if policy == "lru" else None
    node.put(c, ns, 5)
    assert [k for k in range(1, 5) if not node.exists(c, ns, k)[0]] == [gone]


# --- sessions and requests


def test_a_client_that_has_pinned_its_share_misses_and_others_do_not() -> None:
    node, c, ns = opened(max_pinned_bytes=8 * KIB)
    other = node.connect()
    node.put(c, ns, 1, 2, 3)
    pins = node.get(c, ns, 1, 2, 1, 3)
    assert [pin.status for pin in pins] == [HIT, HIT, HIT, MISS]
    assert node.status().counters["pins_refused"] == 1
    assert [pin.status for pin in node.get(other, ns, 3)] == [HIT]
    node.release(c, pins[1])
    assert [pin.status for pin in node.get(c, ns, 3)] == [HIT]


def test_one_connection_may_reserve_only_its_share() -> None:
    node, a, ns = opened(max_reserved_bytes=8 * KIB)
    b = node.connect()
    grants = node.reserve(a, ns, 1, 2, 3)
    assert statuses(grants) == [GRANTED, GRANTED, FULL]
    assert statuses(node.reserve(b, ns, 3)) == [GRANTED]
    node.commit(a, grants[0])
    assert statuses(node.reserve(a, ns, 4)) == [GRANTED]


def test_ucx_messages_under_way_are_bounded_per_connection() -> None:
    node = Node(max_messages=4)
    c = node.connect("ucx")
    ns = node.open(c)
    request = m.Reserve(1, ns, [key(1), key(2), key(3)], [KIB, KIB])
    grants = answers(node.send(c, request), c)[0].grants  # type: ignore[union-attr]
    assert statuses(grants) == [GRANTED, GRANTED, FULL]
    for grant in grants[:2]:
        node.done(c, grant.tag, True)
    node.send(c, m.Commit(2, [g.slot for g in grants[:2]], [g.sequence for g in grants[:2]], [0, 0]))
    get = m.Get(3, ns, [key(1), key(2), key(1)], [KIB, KIB])
    pins = answers(node.send(c, get), c)[0].pins  # type: ignore[union-attr]
    assert [pin.status for pin in pins] == [HIT, HIT, MISS]
    node.done(c, pins[0].tag, True)
    again = m.Get(4, ns, [key(1)], [KIB, KIB])
    assert answers(node.send(c, again), c)[0].pins[0].status == HIT  # type: ignore[union-attr]


def test_a_request_for_more_than_there_is_room_for_gets_what_there_is() -> None:
    node, c, ns = opened(slabs=1, slab_bytes=16 * KIB)
    node.put(c, ns, 1, 2, 3)
    node.get(c, ns, 1, 2)
    assert statuses(node.reserve(c, ns, 4, 1, 5, 6, 4, 6)) == [GRANTED, PRESENT, GRANTED, FULL, BUSY, FULL]
    node.state.check()
    node.pass_time(60)  # leases and reservations end
    assert statuses(node.reserve(c, ns, 7, 8, 9, 10, 11)) == [GRANTED] * 2 + [FULL] * 3
