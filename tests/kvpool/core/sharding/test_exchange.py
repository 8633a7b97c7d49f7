"""What a node decides about pages of other nodes that its clients read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.sharding.fetches import HOP_S, SHUN_S
from pdserve.kvpool.core.sharding.forwards import FORWARD_S
from pdserve.kvpool.core.tiering.tier_index import TieringLimits
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key, statuses

A = TypeVar("A")
NODES = [m.NodeAddress(name, "") for name in ("n0", "n1", "n2")]
ALL, PAIR = Ring(NODES, 5), Ring(NODES[:2], 4)
FETCH_S = TieringLimits().promotion_timeout_s + HOP_S


def of(owner: str, count: int, *, before: str = "") -> list[int]:
    """Pages that `owner` owns among the three, and `before` among the two."""
    found = (
        n
        for n in range(10_000)
        if ALL.owner(key(n)).node == owner and PAIR.owner(key(n)).node == (before or PAIR.owner(key(n)).node)
    )
    return [next(found) for _ in range(count)]


def member(*, previous: Ring | None = None, **limits: object) -> tuple[Node, int]:
    """n0 of three nodes, and a client of it."""
    node = Node(slabs=4, **limits)  # type: ignore[arg-type]
    node.do(ev.Connected(ev.LOCAL, "shm", "this node", 0, peer=True))
    node.do(ev.ViewChanged(ALL, previous is None, previous))
    client = node.connect()
    node.open(client)
    return node, client


def some(actions: Sequence[ev.Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def ask(node: Node, client: int, *keys: int, request_id: int = 50) -> list[ev.FetchPages]:
    """A Get; what it has fetched."""
    return some(node.send(client, m.Get(request_id, 1, [key(k) for k in keys], [4 * KIB])), ev.FetchPages)


def fetched(node: Node, fetch: ev.FetchPages, *ends: int) -> list[ev.Action]:
    count = len(fetch.keys)
    outcomes = bytes(ends * count if len(ends) == 1 else ends)
    return node.do(ev.PagesFetched(fetch, outcomes, [7] * count, [0.0] * count))


def pins(actions: Sequence[ev.Action], client: int) -> list[int]:
    [got] = answers(list(actions), client)
    assert isinstance(got, m.Got)
    return [pin.status for pin in got.pins]


# --- reading


def test_pages_are_fetched_once_from_their_owners_for_all_who_ask() -> None:
    node, client = member()
    first, second = of("n1", 2), of("n2", 1)
    fetches = ask(node, client, *first, *second)
    assert {fetch.node: fetch.keys for fetch in fetches} == {
        "n1": [key(k) for k in first],
        "n2": [key(k) for k in second],
    }
    other = node.connect()
    assert ask(node, other, first[0]) == []  # it waits for the same
    ended = fetched(node, fetches[0], ev.TAKEN, ev.GONE)
    assert pins(ended, other) == [m.HIT]
    assert pins(fetched(node, fetches[1], ev.TAKEN), client) == [m.HIT, m.MISS, m.HIT]
    assert [pin.status for pin in node.get(client, 1, first[0])] == [m.HIT]
    counters = node.status().counters
    assert (counters["pages_fetched"], counters["fetches_missed"], counters["replicas"]) == (2, 1, 2)


def test_for_nodes_nothing_is_fetched() -> None:
    node, _ = member()
    for connection in (node.connect(peer=True), ev.LOCAL):
        assert ask(node, connection, *of("n1", 1)) == []


def test_while_pages_move_the_owner_before_is_asked_next_and_a_new_view_begins_anew() -> None:
    node, client = member(previous=PAIR)
    [page] = of("n2", 1, before="n1")
    [fetch] = ask(node, client, page)
    assert fetch.node == "n2"
    [fetch] = some(fetched(node, fetch, ev.GONE), ev.FetchPages)
    assert fetch.node == "n1"
    node.do(ev.ViewChanged(ALL, True))  # it has moved meanwhile
    [fetch] = some(fetched(node, fetch, ev.GONE), ev.FetchPages)
    assert fetch.node == "n2"
    assert pins(fetched(node, fetch, ev.TAKEN), client) == [m.HIT]
    node.do(ev.ViewChanged(ALL, False, Ring(NODES[1:])))
    [fetch] = ask(node, client, *of("n0", 1))  # ours, and not here yet
    assert fetch.node in ("n1", "n2")


@pytest.mark.parametrize(
    "tier_s", [TieringLimits().promotion_timeout_s, 10.0], ids=["fast tiers", "slow tiers"]
)
def test_a_node_that_is_late_costs_one_deadline_and_its_page_is_kept_when_it_comes(tier_s: float) -> None:
    node, client = member(tiering=TieringLimits(promotion_timeout_s=tier_s))
    first, second = of("n1", 2)
    [fetch] = ask(node, client, first)
    assert answers(node.pass_time(tier_s + HOP_S / 2), client) == []
    ended = node.pass_time(HOP_S / 2)
    assert pins(ended, client) == [m.MISS]
    for page in (first, second):
        assert pins(node.send(client, m.Get(51, 1, [key(page)], [4 * KIB])), client) == [m.MISS]
    fetched(node, fetch, ev.TAKEN)
    assert [pin.status for pin in node.get(client, 1, first)] == [m.HIT]
    node.pass_time(SHUN_S)
    [fetch] = ask(node, client, second)
    assert pins(fetched(node, fetch, ev.FAILED), client) == [m.MISS]
    assert ask(node, client, second) == []


@pytest.mark.parametrize("commits", [True, False])
def test_a_page_that_is_being_written_here_is_waited_for(commits: bool) -> None:
    node, client = member()
    page, writer = of("n1", 1), node.connect()
    grants = node.reserve(writer, 1, *page)
    assert ask(node, client, *page) == []
    if commits:
        assert pins(node.send(writer, commit(60, *grants)), client) == [m.HIT]
    else:
        node.abort(writer, *grants)
        assert pins(node.pass_time(FETCH_S), client) == [m.MISS]


def test_fetches_under_way_have_a_bound_and_one_always_goes() -> None:
    node, client = member(exchange_bytes=8 * KIB)
    [fetch] = ask(node, client, *of("n1", 5))
    assert len(fetch.keys) == 2
    assert pins(fetched(node, fetch, ev.TAKEN), client) == [m.HIT] * 2 + [m.MISS] * 3
    assert node.status().counters["fetches_refused"] == 3


@pytest.mark.parametrize("ends", [ev.TAKEN, ev.GONE, ev.FAILED])
def test_what_comes_for_a_namespace_that_was_cleared_is_void(ends: int) -> None:
    node, client = member()
    page = of("n1", 1)
    [fetch] = ask(node, client, *page)
    assert pins(node.send(client, m.Clear(9, 1))[:1], client) == [m.MISS]
    fetched(node, fetch, ends)
    assert node.exists(client, 1, *page) == [0]
    assert node.status().quarantined_bytes == node.status().reserved_bytes == 0


def test_fetched_pages_make_room_first_and_those_that_are_read_stay() -> None:
    node, client = member()
    capacity = 4 * 64 // 4
    own, other = of("n0", capacity // 2), of("n1", capacity)
    node.put(client, 1, *own)
    for start in range(0, capacity, 8):
        [fetch] = ask(node, client, *other[start : start + 8])
        [got] = answers(fetched(node, fetch, ev.TAKEN), client)
        assert isinstance(got, m.Got)
        if start:
            node.release(client, *got.pins)  # the first eight are read for long
    assert node.exists(client, 1, *own) == [1] * len(own)
    assert node.exists(client, 1, *other[:16]) == [1] * 8 + [0] * 8
    node.put(client, 1, *of("n0", capacity // 2 + 8)[capacity // 2 :])
    assert node.exists(client, 1, *own) == [1] * len(own)


# --- writing


def write(node: Node, client: int, *keys: int) -> tuple[list[ev.Action], list[m.Grant]]:
    grants = node.reserve(client, 1, *keys)
    assert set(statuses(grants)) == {m.GRANTED}
    return node.send(client, commit(60, *grants)), grants


def pushed(node: Node, push: ev.PushPages, *ends: int) -> list[ev.Action]:
    outcomes = bytes(ends * len(push.keys) if len(ends) == 1 else ends)
    return node.do(ev.PagesPushed(push, outcomes, 0, 0))


def test_a_commit_is_answered_when_the_owners_have_its_pages() -> None:
    node, client = member()
    own, first, second = of("n0", 1), of("n1", 2), of("n2", 1)
    actions, _ = write(node, client, *own, *first, *second)
    pushes = {push.node: push for push in some(actions, ev.PushPages)}
    assert {name: push.keys for name, push in pushes.items()} == {
        "n1": [key(k) for k in first],
        "n2": [key(k) for k in second],
    }
    assert all(push.written for push in pushes.values())
    assert answers(actions, client) == []
    assert node.exists(client, 1, *first) == [1, 1]  # readable here from now on
    assert answers(pushed(node, pushes["n1"], ev.TAKEN, ev.NO_ROOM), client) == []
    assert answers(pushed(node, pushes["n2"], ev.TAKEN), client) == [m.Committed(60, bytes([1, 1, 0, 1]))]
    assert node.status().counters["replicas"] == 3


@pytest.mark.parametrize(("end", "ok"), [(ev.TAKEN, 1), (ev.NO_ROOM, 0), (ev.REFUSED, 0), (ev.GONE, 0)])
@pytest.mark.parametrize("before", [ev.LATER, ev.FAILED])
def test_what_an_owner_cannot_take_now_is_offered_again(before: int, end: int, ok: int) -> None:
    node, client = member()
    actions, _ = write(node, client, *of("n1", 1))
    [push] = some(actions, ev.PushPages)
    assert some(pushed(node, push, before), ev.PushPages) == []
    [push] = some(node.pass_time(0.1), ev.PushPages)
    assert answers(pushed(node, push, end), client) == [m.Committed(60, bytes([ok]))]


def test_a_commit_waits_for_a_silent_owner_no_longer_than_its_time_and_its_page_stays_as_a_replica() -> None:
    node, client = member()
    page = of("n1", 1)
    actions, _ = write(node, client, *page)
    [push] = some(actions, ev.PushPages)
    assert answers(node.pass_time(FORWARD_S - 0.01), client) == []
    assert answers(node.pass_time(0.01), client) == [m.Committed(60, b"\0")]
    pushed(node, push, ev.TAKEN)
    assert node.exists(client, 1, *page) == [1]
    assert some(node.pass_time(1.0), ev.PushPages) == []
    node.pass_time(200.0)  # a lease
    assert node.exists(client, 1, *page) == [0]


def test_pages_go_to_whom_owns_them_by_then() -> None:
    node, client = member()
    page = of("n2", 1, before="n1")
    actions, _ = write(node, client, *page)
    [push] = some(actions, ev.PushPages)
    again = node.do(ev.ViewChanged(Ring(NODES[:2], 6), False))
    assert [one.node for one in some(again, ev.PushPages) if one.written] == []  # n2 may still answer
    again = [*pushed(node, push, ev.FAILED), *node.pass_time(0.1)]
    [push] = [one for one in some(again, ev.PushPages) if one.written]
    assert push.node == "n1"
    assert answers(pushed(node, push, ev.TAKEN), client) == [m.Committed(60, b"\1")]
    actions, _ = write(node, client, *of("n1", 1))
    [push] = some(actions, ev.PushPages)
    alone = [*node.do(ev.ViewChanged(Ring(NODES[:1], 7), True)), *pushed(node, push, ev.FAILED)]
    alone += node.pass_time(0.1)
    assert answers(alone, client) == [m.Committed(60, b"\1")]  # it is this node's own


def test_a_page_that_was_put_off_is_offered_to_its_new_owner_at_once() -> None:
    node, client = member()
    actions, _ = write(node, client, *of("n2", 1, before="n1"))
    [push] = some(actions, ev.PushPages)
    assert some(pushed(node, push, ev.LATER), ev.PushPages) == []
    [push] = [one for one in some(node.do(ev.ViewChanged(PAIR, False)), ev.PushPages) if one.written]
    assert push.node == "n1"
    assert answers(pushed(node, push, ev.TAKEN), client) == [m.Committed(60, b"\1")]


def test_a_page_that_waits_for_its_owner_is_not_evicted_and_their_bytes_are_bounded() -> None:
    node, client = member(exchange_bytes=32 * KIB)
    actions, _ = write(node, client, *of("n1", 8))
    assert set(statuses(node.reserve(client, 1, *of("n1", 10)[8:]))) == {m.FULL}
    assert statuses(node.reserve(client, 1, *of("n0", 1))) == [m.GRANTED]
    own = of("n0", 200)[1:]
    for start in range(0, len(own), 20):
        grants = node.reserve(client, 1, *own[start : start + 20])
        node.commit(client, *[grant for grant in grants if grant.status == m.GRANTED])
    assert node.exists(client, 1, *of("n1", 8)) == [1] * 8
    [push] = some(actions, ev.PushPages)
    pushed(node, push, ev.TAKEN)
    assert statuses(node.reserve(client, 1, of("n1", 9)[8])) == [m.GRANTED]


def test_nobody_is_answered_when_the_client_is_gone() -> None:
    node, client = member()
    actions, _ = write(node, client, *of("n1", 1))
    node.disconnect(client)
    [push] = some(actions, ev.PushPages)
    assert answers(pushed(node, push, ev.TAKEN), client) == []
    assert node.status().counters["pages_forwarded"] == 1


# --- questions


def test_owners_are_asked_about_what_is_not_here_and_hints_go_to_all_of_them() -> None:
    node, client = member()
    own, first, second = of("n0", 1), of("n1", 2), of("n2", 1)
    [fetch] = ask(node, client, first[0])
    fetched(node, fetch, ev.TAKEN)
    names = [key(k) for k in (*own, *first, *second)]
    [asked] = some(node.send(client, m.Exists(9, 1, names)), ev.AskOwners)
    assert asked.others == {"n1": [2], "n2": [3]}
    assert asked.present.mask == b"\0\1\0\0"
    [asked] = some(node.send(client, m.Exists(9, 1, names, keep_s=5.0)), ev.AskOwners)
    assert asked.others == {"n1": [1, 2], "n2": [3]}
    assert some(node.send(client, m.Exists(9, 1, [key(first[0])])), ev.AskOwners) == []


def test_a_wait_is_answered_when_the_last_of_its_pages_is_seen_anywhere() -> None:
    node, client = member()
    [own], [first], [second] = of("n0", 1), of("n1", 1), of("n2", 1)
    names = [key(own), key(first), key(second)]
    [watch] = some(node.send(client, m.Wait(9, 1, names, 5.0)), ev.WatchOwners)
    assert watch.others == {"n1": [key(first)], "n2": [key(second)]}
    assert answers(node.do(ev.PagesSeen(1, [key(first)])), client) == []
    node.put(node.connect(), 1, own)
    assert answers(node.do(ev.PagesSeen(1, [key(second)])), client) == [m.Present(9, b"\1\1\1")]
    node.send(client, m.Wait(10, 1, [*names, key(77777)], 5.0))
    node.do(ev.PagesSeen(1, [key(first)]))
    assert answers(node.pass_time(5.0), client) == [m.Present(10, b"\1\1\0\0")]
