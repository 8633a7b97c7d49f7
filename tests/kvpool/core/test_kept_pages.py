"""Pages that clients want kept: evicted last, for their time, within bounds, and never in the way."""

from __future__ import annotations

import math

import pytest

from pdserve.kvpool.core.kept_pages import TOUCH_S, TOUCHED_AT_ONCE
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, Node, key

SLOTS = 64


def keep(node: Node, client: int, ns: int, *keys: int, keep_s: float = 60.0) -> bytes:
    request = m.Exists(node.next_id(), ns, [key(k) for k in keys], keep_s=keep_s)
    return node.ask(client, request, m.Present).mask


def there(node: Node, ns: int, *keys: int) -> list[int]:
    return [k for k in keys if node.state.store.find(ns, key(k)) >= 0]


def churn(node: Node, client: int, ns: int, seconds: float, first: int) -> None:
    """Fill half of the memory with new pages in each `TOUCH_S`."""
    for step in range(math.ceil(seconds / TOUCH_S)):
        node.put(client, ns, *range(first + 32 * step, first + 32 * (step + 1)))
        node.pass_time(TOUCH_S)


@pytest.fixture
def full() -> tuple[Node, int, int]:
    node = Node()
    client = node.connect()
    ns = node.open(client)
    node.put(client, ns, *range(SLOTS))
    return node, client, ns


def test_kept_pages_outlive_others_for_their_time_and_no_longer(full: tuple[Node, int, int]) -> None:
    node, client, ns = full
    assert keep(node, client, ns, 0, 1, 2, 999) == b"\1\1\1\0"
    assert node.state.kept.slot_bytes == 3 * 4 * KIB
    churn(node, client, ns, 55.0, 1000)
    assert there(node, ns, *range(SLOTS)) == [0, 1, 2]
    churn(node, client, ns, 30.0, 2000)
    assert there(node, ns, *range(SLOTS)) == []
    assert (len(node.state.kept), node.state.kept.slot_bytes) == (0, 0)
    assert node.state.kept.next_deadline_s == math.inf


@pytest.mark.parametrize("no_longer", [-1.0, -math.inf, math.nan])
def test_a_later_word_counts_instead_of_an_earlier_one(full: tuple[Node, int, int], no_longer: float) -> None:
    node, client, ns = full
    keep(node, client, ns, 0, 1)
    keep(node, client, ns, 0, keep_s=no_longer)
    keep(node, client, ns, 1, keep_s=1e9)
    churn(node, client, ns, 100.0, 1000)
    assert there(node, ns, 0, 1) == [1]
    churn(node, client, ns, 24 * 3600.0 // 100, 9000)
    assert len(node.state.kept) == 1


def test_writers_find_room_though_all_is_kept(full: tuple[Node, int, int]) -> None:
    node, client, ns = full
    keep(node, client, ns, *range(SLOTS))
    assert len(node.state.kept) == SLOTS
    granted = node.put(client, ns, *range(1000, 1032))
    assert [grant.status for grant in granted] == [m.GRANTED] * 32
    node.pass_time(TOUCH_S)
    assert len(node.state.kept) == SLOTS - 32


def test_the_bytes_of_kept_pages_are_bounded() -> None:
    node = Node(max_kept_bytes=10 * 4 * KIB)
    client = node.connect()
    ns = node.open(client)
    node.put(client, ns, *range(20))
    keep(node, client, ns, *range(20))
    assert (len(node.state.kept), node.state.kept.refused) == (10, 10)
    keep(node, client, ns, 0, keep_s=-1)
    keep(node, client, ns, 15)
    assert (len(node.state.kept), node.state.kept.refused) == (10, 10)
    report = node.ask(client, m.Status(node.next_id()), m.StatusReport)
    assert (report.counters["kept_bytes"], report.counters["kept_refused"]) == (40 * KIB, 10)


def test_a_slot_that_has_another_page_by_now_is_not_kept(full: tuple[Node, int, int]) -> None:
    node, client, ns = full
    keep(node, client, ns, 0, 1)
    [pin] = node.get(client, ns, 0)
    node.release(client, pin)
    node.send(client, m.Discard(node.next_id(), ns, [key(0)], [pin.sequence]))
    node.put(client, ns, 500)
    node.pass_time(TOUCH_S)
    assert len(node.state.kept) == 1
    node.send(client, m.Clear(node.next_id(), ns))
    node.pass_time(TOUCH_S)
    assert len(node.state.kept) == 0


def test_who_may_only_read_keeps_and_demotes_nothing() -> None:
    settings = NamespaceSettings(read_token=digest("r"), write_token=digest("w"))
    node = Node(rules=Rules(defaults=settings))
    writer, reader = node.connect(token="w"), node.connect(token="r")
    ns = node.open(writer)
    assert node.open(reader) == ns
    node.put(writer, ns, *range(SLOTS))
    assert keep(node, reader, ns, 1) == b"\1"
    assert len(node.state.kept) == 0
    keep(node, writer, ns, 1)
    assert len(node.state.kept) == 1
    demote(node, reader, ns, 50)
    node.put(writer, ns, 100)
    assert there(node, ns, 0, 50) == [50]


def test_one_message_and_one_tick_do_a_bounded_amount_of_work() -> None:
    node = Node(slabs=64)
    client = node.connect()
    ns = node.open(client)
    for start in range(0, 1000, 100):
        node.put(client, ns, *range(start, start + 100))
    keep(node, client, ns, *range(1000))
    assert len(node.state.kept) == m.MAX_KEPT_KEYS
    for start in range(0, 1000, 200):
        keep(node, client, ns, *range(start, start + 200))
    assert len(node.state.kept) == 1000
    assert node.state.kept.next_deadline_s - node.now_s <= TOUCH_S
    touched = node.state.store.uses
    node.pass_time(TOUCH_S)
    assert node.state.store.uses - touched == TOUCHED_AT_ONCE
    assert node.state.kept.next_deadline_s - node.now_s == pytest.approx(TOUCH_S * TOUCHED_AT_ONCE / 1000)


def demote(node: Node, client: int, ns: int, *keys: int) -> None:
    node.ask(client, m.Exists(node.next_id(), ns, [key(k) for k in keys], move=m.DOWN), m.Present)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "arc"])
def test_demoted_pages_go_before_others_unless_they_are_kept(policy: str) -> None:
    node = Node()
    client = node.connect()
    ns = node.open(client)
    node.state.store.configure_namespace(ns, policy=policy)
    node.put(client, ns, *range(SLOTS))
    keep(node, client, ns, 60)
    demote(node, client, ns, 50, 55, 60, 999)
    node.put(client, ns, 100)
    assert there(node, ns, 50, 55, 60) == [50, 60], "the last of the prompt first"
    node.put(client, ns, 101)
    assert there(node, ns, 50, 55, 60) == [60]
    node.put(client, ns, 102)
    assert there(node, ns, 0, 60) == [60]
