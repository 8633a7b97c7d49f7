"""The order of requests in a node: shares, rates, back-pressure; with a scripted loop, and for real."""

from __future__ import annotations

import pytest

from pdserve.kvpool.core.events import Answer, LoadPages, PagesFound, PagesLoaded
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.node.serving.fair_queue import MAX_QUEUED, MAX_QUEUED_S
from pdserve.kvpool.node.serving.scheduler import TURN_KEYS
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.kvpool.tiers.base import GONE, TierPage
from tests.support.kvpool.node_model import KIB, Node, key
from tests.support.kvpool.served import KEYS, Client, Served


def test_a_turn_serves_so_much_and_a_quiet_neighbour_comes_next() -> None:
    served = Served()
    loud, loud_ns = served.client("loud")
    quiet, quiet_ns = served.client("quiet")
    for _ in range(100):
        served.ask(loud, loud_ns)
    in_a_turn = len(served.order)
    assert in_a_turn * len(KEYS) <= TURN_KEYS
    served.ask(quiet, quiet_ns)
    assert not quiet.sent
    served.loop.turn()
    assert served.order[in_a_turn : in_a_turn + 2].count(quiet.number) == 1
    while len(served.order) < 101:
        before = len(served.order)
        served.loop.turn()
        assert before < len(served.order) <= before + TURN_KEYS // len(KEYS)


# --- large requests

MANY_KEYS = [key(n) for n in range(m.MAX_PAGES)]
MANY_SLABS = m.MAX_PAGES // 16 + 1


@pytest.mark.parametrize(
    ("kind", "tiers", "at_once"), [("Reserve", (), 1), ("Get", (), 3), ("Get", (TierSpec("s", "ssd", 1),), 1)]
)
def test_what_may_have_to_be_wiped_counts(kind: str, tiers: tuple[TierSpec, ...], at_once: int) -> None:
    page_bytes = m.MAX_BATCH_BYTES // 2
    served = Served(node=Node(8, 2 * page_bytes, page_bytes, tiers=tiers, max_reserved_bytes=1 << 40))
    a, ns = served.client("a")
    for number in range(3):
        keys = MANY_KEYS[2 * number : 2 * number + 2]
        served.serving.received(a, getattr(m, kind)(number, ns, keys, [page_bytes]))
    assert len(served.order) == at_once
    served.loop.turns()
    assert len(served.order) == 3


@pytest.mark.parametrize("slots", [1, TURN_KEYS, TURN_KEYS + 1, m.MAX_PAGES])
def test_after_a_large_commit_its_client_is_read_from_in_the_next_turn(slots: int) -> None:
    served = Served(MANY_SLABS)
    a, ns = served.client("a")
    granted = served.node.reserve(a.number, ns, *range(slots))
    served.serving.received(
        a, m.Commit(1, [grant.slot for grant in granted], [grant.sequence for grant in granted], [7] * slots)
    )
    assert a.sent == [m.Committed(1, b"\1" * slots)]
    assert a.pauses == (slots > TURN_KEYS)
    assert not a.paused


@pytest.mark.parametrize("kind", [m.Abort, m.Release, m.Discard])
def test_what_frees_many_pages_is_charged_and_its_client_read_from_in_the_next_turn(kind: type) -> None:
    served = Served(MANY_SLABS)
    (a, a_ns), (b, b_ns) = served.client("a"), served.client("b")
    keys = [key(n) for n in range(m.MAX_PAGES)]
    slots = [one.slot for one in served.node.reserve(a.number, a_ns, *range(m.MAX_PAGES))]
    for _ in range(6):  # both wait
        served.ask(a, a_ns)
        served.ask(b, b_ns)
    before = list(served.order)
    freed = m.Discard(9, a_ns, keys, []) if kind is m.Discard else kind(slots, [0] * len(slots))
    served.serving.received(a, freed)
    assert (a.pauses, a.paused) == (1, False)
    served.loop.turns()
    after = [number for number in served.order[len(before) + 1 :] if number in (a.number, b.number)]
    assert after.index(a.number) >= after.count(b.number) - 1, "b goes first: a has had its share"


def test_misses_take_no_bytes() -> None:
    page = 4 * KIB
    served = Served(a=NamespaceSettings(bytes_s=float(8 * page)))
    a, ns = served.client("a")
    served.node.put(a.number, ns, 0)
    for _ in range(10):  # each asks for four pages and gets one
        served.get(a, ns, KEYS[:4])
        served.loop.turn()
    assert len(a.sent) == 5


def test_pages_that_a_tier_turns_out_not_to_have_take_no_bytes() -> None:
    page = 4 * KIB
    rules = Rules(named={"a": NamespaceSettings(bytes_s=float(8 * page))})
    served = Served(node=Node(8, tiers=[TierSpec("s", "ssd", 1 << 30)], rules=rules))
    a, ns = served.client("a")
    space = served.node.state.namespaces[ns].space
    below = tuple(TierPage(space, each, page, 0, 1) for each in KEYS[:8])
    served.node.do(PagesFound(0, below, 0, last=True))
    served.get(a, ns, KEYS[:8])  # all that it may have in a second
    [load] = [action for action in served.actions if isinstance(action, LoadPages)]
    slots = tuple(loaded.slot for loaded in load.pages)
    for action in served.node.do(PagesLoaded(0, slots, (GONE,) * 8, (0,) * 8)):
        if isinstance(action, Answer):
            served.serving.answered(action.connection, action.message)
    assert not served.serving._loading
    served.loop.turn()
    served.get(a, ns, KEYS[8:])
    assert len(a.sent) == 1


def test_what_cannot_be_a_page_takes_no_more_of_a_rate_than_the_largest_page() -> None:
    slab = 64 * KIB
    served = Served(a=NamespaceSettings(bytes_s=float(8 * slab)))
    a, ns = served.client("a")
    served.serving.received(a, m.Get(1, ns, MANY_KEYS, [1 << 60]))
    served.serving.gone(a.number)
    flow = served.serving._queue._flows[ns]
    assert flow.bytes.ready_at_s(slab, served.loop.now_s) <= served.loop.now_s + m.MAX_PAGES


def test_the_client_that_fills_the_queue_is_not_read_from_until_half_is_gone() -> None:
    served = Served(a=NamespaceSettings(operations_s=16.0))
    a, ns = served.client("a")
    place = 0
    while not a.paused:
        served.ask(a, ns, KEYS[:1])
        served.loop.turn()
        place += 1
    assert place == 16 + MAX_QUEUED
    assert a.paused
    for _ in range(8):
        served.loop.pass_time(1.0)
    assert not a.paused


def test_what_waits_too_long_is_answered_and_its_client_read_from_again() -> None:
    served = Served(a=NamespaceSettings(operations_s=1.0))
    a, ns = served.client("a")
    while not a.paused:
        served.ask(a, ns, KEYS[:1])
    for _ in range(int(MAX_QUEUED_S) + 2):
        served.loop.pass_time(1.0)
    assert not a.paused
    faults = [reply for reply in a.sent if isinstance(reply, m.Fault)]
    assert len(faults) > MAX_QUEUED - 10
    assert faults[0].code == "overloaded"
    assert "namespace 'a'" in faults[0].message


def test_other_nodes_and_what_frees_or_ends_something_wait_for_no_rate() -> None:
    served = Served(a=NamespaceSettings(operations_s=1.0))
    a, ns = served.client("a")
    node, _ = served.client("a", peer=True)
    [grant] = served.node.reserve(a.number, ns, 1)
    for _ in range(2):
        served.ask(a, ns, KEYS[:1])
        served.ask(node, ns, KEYS[:1])
    assert (served.serving.counters()["requests_waiting"], len(node.sent)) == (1, 2)
    served.serving.received(a, m.Ping(100))
    served.serving.received(a, m.Commit(101, [grant.slot], [grant.sequence], [0]))
    assert a.sent[-2:] == [m.Done(100), m.Committed(101, b"\1")]


def test_a_stranger_cannot_use_up_a_namespaces_rate() -> None:
    served = Served(a=NamespaceSettings(operations_s=2.0, read_token="ab" * 32))
    _, ns = served.client("a", peer=True)
    stranger = Client(served.node.connect(token="guess"))
    served.clients[stranger.number] = stranger
    for _ in range(100):
        served.ask(stranger, ns, KEYS[:1])
    assert all(isinstance(reply, m.Fault) for reply in stranger.sent)
    assert len(stranger.sent) == 100
    assert served.serving.counters()["requests_waiting"] == 0
