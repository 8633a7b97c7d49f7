"""What a node decides about pages that are others': under views put in by hand, without sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.pending_gets import PendingGets
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.sharding import handover
from pdserve.kvpool.core.sharding.coordinator import DISPLACED_SHARE, Sharding
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import KIB, Node, key, statuses

NAMES = ("n0", "n1", "n2")
NODES = [m.NodeAddress(name, f"unix:/{name}") for name in NAMES]
ALL = range(60)


def ring_of(count: int, epoch: int) -> Ring:
    return Ring(NODES[:count], epoch)


def owned_by(ring: Ring, name: str) -> list[int]:
    return [n for n in ALL if ring.owner(key(n)).node == name]


def node_of_three(*, stable: bool = False, **limits: object) -> Node:
    """n0 with all pages, as if it had been alone until the two others came."""
    node = Node(slabs=8, **limits)  # type: ignore[arg-type]
    node.do(ev.Connected(ev.LOCAL, "shm", "this node", 0, peer=True))
    client = node.connect()
    node.put(client, node.open(client), *ALL)
    node.do(ev.ViewChanged(ring_of(3, 5), stable))
    return node


def peer(node: Node) -> int:
    node.do(ev.Connected(99, "shm", "n1", 1, peer=True))
    return 99


def pushes(actions: Sequence[ev.Action]) -> list[ev.PushPages]:
    return [action for action in actions if isinstance(action, ev.PushPages)]


def answer_all(node: Node, asks: list[ev.PushPages], end: int = ev.TAKEN) -> list[ev.Action]:
    ends = [ev.PagesPushed(ask, bytes([end] * len(ask.keys)), 0, 0) for ask in asks]
    return [action for event in ends for action in node.do(event)]


def move_all(
    node: Node, end: int = ev.TAKEN, seconds: float = 60.0, begun: Sequence[ev.Action] = ()
) -> tuple[list[ev.PushPages], list[int]]:
    """Answer all pushes, those `begun` or by the last event, until there are no more, each at once; the
    pushes, and the epochs that settled.
    """
    begun = list(begun) or node.actions
    asks, settled = pushes(begun), [action.epoch for action in begun if isinstance(action, ev.Settled)]
    done, until_s = 0, node.now_s + seconds
    while node.now_s < until_s:
        actions = answer_all(node, asks[done:], end)
        done = len(asks)
        if not actions:
            wake_s = node.state.sharding.handover.next_deadline_s
            if wake_s == float("inf"):
                break
            actions = node.pass_time(max(0.0, wake_s - node.now_s))
        asks += pushes(actions)
        settled += [action.epoch for action in actions if isinstance(action, ev.Settled)]
        node.state.sharding.handover.check()
    return asks, settled


# --- who may write what


def test_a_peer_that_fetches_pages_leaves_no_trace_in_the_hit_rate() -> None:
    node = node_of_three()
    asker = peer(node)
    node.release(asker, *node.get(asker, 1, *ALL))
    node.get(asker, 1, 999)
    [space] = node.status().namespaces
    assert (space.hits, space.misses) == (0, 0)


# --- pages that others own are pushed to them


def told(asks: list[ev.PushPages]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for ask in asks:
        found.setdefault(ask.node, []).extend(ask.keys)
    return {name: sorted(keys) for name, keys in found.items()}


def foreign(*, epoch: int = 5, keys: Sequence[int] = ALL) -> dict[str, list[bytes]]:
    ring = ring_of(3, epoch)
    return {
        name: sorted(key(n) for n in keys if ring.owner(key(n)).node == name)
        for name in NAMES
        if name != "n0"
    }


@pytest.mark.parametrize("looked_at", [7, 8192])
@pytest.mark.parametrize("batch_bytes", [4 * KIB, 1 << 20])
def test_pages_that_only_tiers_have_go_too(
    looked_at: int, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MAX_LOOKED_AT", looked_at)
    node, tiers = node_with_tiers(push_batch_bytes=batch_bytes)
    asks, settled = move_all(node)
    assert {name: set(keys) for name, keys in told(asks).items()} == {
        name: set(keys) for name, keys in foreign(keys=range(160)).items()
    }
    assert settled == [5]
    lengths = {k: length for ask in asks for k, length in zip(ask.keys, ask.lengths, strict=True)}
    assert all(lengths[k] == (4 * KIB if k in {key(n) for n in ALL} else tiers.pages[1][k]) for k in lengths)
    assert all(sum(ask.lengths) <= batch_bytes or len(ask.keys) == 1 for ask in asks)


def test_while_a_tier_is_still_being_read_the_node_has_not_settled() -> None:
    node, tiers = node_with_tiers(ready=False)
    asks, settled = move_all(node, seconds=5.0)
    assert told(asks) == foreign()
    assert not settled
    tiers.ready = True
    node.pass_time(0.0)
    assert move_all(node)[1] == [5]


def test_the_pages_last_read_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(slabs=8, push_batch_bytes=4 * KIB)
    client = node.connect()
    node.put(client, node.open(client), *ALL)
    read = [n for n in ALL if ring_of(2, 5).owner(key(n)).node == "n1"][:5]
    node.release(client, *node.get(client, 1, *read))
    node.do(ev.ViewChanged(ring_of(2, 5), False))
    asks, _ = move_all(node)
    assert {k for ask in asks[: len(read)] for k in ask.keys} <= {key(n) for n in range(40, 60)} | {
        key(n) for n in read
    }
    assert {key(n) for n in read} <= {k for ask in asks[: len(asks) // 2] for k in ask.keys}


def test_another_view_begins_anew_and_waits_for_the_push_under_way() -> None:
    node = node_of_three()
    first = {ask.node: ask for ask in pushes(node.actions)}
    node.do(ev.ViewChanged(ring_of(2, 6), False))
    assert not [ask for ask in pushes(node.pass_time(1.0)) if ask.node in first]
    asks, settled = move_all(node, begun=answer_all(node, list(first.values()), ev.FAILED))
    assert set(told(asks)) == {"n1"}
    assert settled == [6]
    moved = Counter(k for ask in asks for k in ask.keys)
    assert moved == Counter(key(n) for n in owned_by(ring_of(2, 6), "n1"))  # once, though they failed before


def test_an_owner_that_does_not_answer_is_tried_again_and_then_given_up() -> None:
    node = node_of_three()
    began_s = node.now_s
    asks, settled = move_all(node, ev.FAILED)
    assert settled == [5]
    assert Counter(ask.node for ask in asks) == dict.fromkeys(("n1", "n2"), handover.ATTEMPTS)
    assert node.now_s - began_s >= handover.RETRY_S * (2 ** (handover.ATTEMPTS - 1) - 1)
    counters = node.status().counters
    assert counters["peers_given_up"] == 2
    assert counters["pushes_failed"] == sum(len(ask.keys) for ask in asks)


def test_what_an_owner_cannot_take_now_is_pushed_again_for_a_while() -> None:
    node = node_of_three()
    asks, settled = move_all(node, ev.LATER, seconds=handover.LATER_PATIENCE_S / 2)
    assert not settled
    assert len(asks) > 100
    _, settled = move_all(node, ev.LATER, seconds=handover.LATER_PATIENCE_S)
    assert settled == [5]


@pytest.mark.parametrize("end", [ev.NO_ROOM, ev.REFUSED, ev.GONE])
def test_an_owner_that_is_full_or_takes_a_page_never_is_soon_left_alone(end: int) -> None:
    node = node_of_three()
    asks, settled = move_all(node, end)
    assert settled == [5]
    if end == ev.NO_ROOM:
        assert len(asks) <= 2 * handover.FULL_TRIES
    else:
        assert told(asks) == foreign(), "each once"


def test_pushes_keep_to_the_rate() -> None:
    page = 4 * KIB
    node = node_of_three(push_bytes_s=10.0 * page, push_batch_bytes=2 * page)
    began_s = node.now_s
    ends, done = [], pushes(node.actions)
    while done or node.state.sharding.handover.moving:
        for ask in done:
            ends.append((node.now_s, len(ask.keys)))
            node.do(ev.PagesPushed(ask, bytes(len(ask.keys)), len(ask.keys), sum(ask.lengths)))
        fresh = pushes(node.actions) if done else []
        if not fresh:
            wake_s = node.state.sharding.handover.next_deadline_s
            if wake_s == float("inf"):
                break
            fresh = pushes(node.pass_time(max(0.0, wake_s - node.now_s)))
        done = fresh
    pages = sum(count for _, count in ends)
    assert pages == sum(len(keys) for keys in foreign().values())
    assert ends[-1][0] - began_s >= (pages - 2 * 4 - 1) / 10


def test_a_node_takes_from_a_peer_what_it_owns_a_batch_at_a_time() -> None:
    node = node_of_three(push_batch_bytes=3 * 4 * KIB)
    mine = [n for n in range(100, 200) if ring_of(3, 5).owner(key(n)).node == "n0"][:5]
    others = [n for n in range(100, 200) if ring_of(3, 5).owner(key(n)).node == "n1"][:2]
    asker = peer(node)
    assert statuses(node.reserve(asker, 1, *mine[:3], *others, *mine[3:])) == [
        *[m.GRANTED] * 3, *[m.MOVED] * 2, *[m.BUSY] * 2
    ]  # fmt: skip
    assert statuses(node.reserve(asker, 1, owned_by(ring_of(3, 5), "n0")[0])) == [m.PRESENT]
    assert statuses(node.reserve(asker, 1, owned_by(ring_of(3, 5), "n1")[0])) == [m.MOVED], (
        "it may be dropped"
    )


def test_pushed_pages_displace_a_share_of_those_here_and_no_more() -> None:
    node, tiers = node_with_tiers()
    tiers.behind = True
    mine = [n for n in range(100, 1000) if ring_of(3, 6).owner(key(n)).node == "n0"]
    asker = peer(node)
    assert statuses(node.reserve(asker, 1, mine[0])) == [m.BUSY]
    tiers.behind = False
    node.do(ev.ViewChanged(ring_of(3, 6), False))
    status = node.status()
    allowed = (status.free_bytes + DISPLACED_SHARE * status.capacity_bytes) // (4 * KIB)
    taken = 0
    for n in mine:
        [grant] = node.reserve(asker, 1, n)
        if grant.status != m.GRANTED:
            assert grant.status == m.FULL
            break
        node.commit(asker, grant)
        taken += 1
    assert taken == allowed


# --- tiers below memory


class FakeTiers:
    """Tiers, as far as ownership is concerned: a dictionary of lengths by namespace and key."""

    def __init__(self) -> None:
        self.ready = True
        self.behind = False
        self.free_bytes = 0
        self.pages: dict[int, dict[bytes, int]] = {}

    def namespaces(self) -> list[int]:
        return list(self.pages)

    def own_keys(self, namespace: int) -> list[bytes]:
        return list(self.pages.get(namespace, {}))

    def length(self, namespace: int, key: bytes) -> int:
        return self.pages.get(namespace, {}).get(key, 0)

    def disown(self, namespace: int, keys: Sequence[bytes], out: list[ev.Action]) -> None:
        for gone in keys:
            self.pages.get(namespace, {}).pop(gone, None)


def node_with_tiers(*, stable: bool = False, ready: bool = True, **limits: Any) -> tuple[Node, FakeTiers]:
    """n0 with ALL in memory, 40 to 60 of them and 60 to 160 in a tier."""
    node, tiers = node_of_three(), FakeTiers()
    tiers.ready = ready
    tiers.pages = {1: {key(n): 100 + n for n in range(40, 160)}}
    gets = PendingGets(node.state.store, node.state._pin)
    limits_ = Limits(copy_lease_s=10.0, **limits)
    node.state.sharding = Sharding("n0", node.state.store, limits_, tiers, gets, lambda *_: None)
    node.do(ev.ViewChanged(ring_of(3, 5), stable))
    return node, tiers


def test_foreign_pages_are_dropped_from_the_tiers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_LOOKED_AT", 7)
    node, tiers = node_with_tiers(stable=True)
    steps = 0
    while node.state.sharding.ownership.next_step_s < float("inf"):
        node.pass_time(0.01)
        steps += 1
    ring = ring_of(3, 5)
    assert set(tiers.pages[1]) == {key(n) for n in range(40, 160) if ring.owner(key(n)).node == "n0"}
    assert steps > 120 // 7
    tiers.pages[1][key(9999)] = 5
    foreign = ring.owner(key(9999)).node != "n0"
    node.state.sharding.ownership.tiers_ready(node.now_s)
    for _ in range(60):
        node.pass_time(0.01)
    assert (key(9999) not in tiers.pages[1]) == foreign


def test_a_replica_that_sank_ends_in_its_tier_too() -> None:
    node, tiers = node_with_tiers(stable=True)
    for _ in range(20):
        node.pass_time(0.01)
    replica(node, FOREIGN[0])
    tiers.pages[1][key(FOREIGN[0])] = 4 * KIB
    node.pass_time(11.0)  # its lease ends
    assert key(FOREIGN[0]) not in tiers.pages[1]


# --- replicas held here


def replica(node: Node, *keys: int, length: int = 4 * KIB) -> list[m.Grant]:
    """As the puller makes one, all in one go."""
    request = m.Reserve(node.next_id(), 1, [key(k) for k in keys], [length], replica=True)
    grants = node.ask(ev.LOCAL, request, m.Reserved).grants
    granted = [grant for grant in grants if grant.status == m.GRANTED]
    if granted:
        node.commit(ev.LOCAL, *granted)
    return grants


def holder() -> Node:
    node = node_of_three(stable=True, copy_lease_s=10.0)
    node.pass_time(0.01)
    return node


FOREIGN = [n for n in range(200, 300) if ring_of(3, 5).owner(key(n)).node == "n1"]


def test_a_replica_stays_while_its_owner_renews_it_and_then_goes() -> None:
    node = holder()
    client = node.connect()
    replica(node, *FOREIGN[:4])
    for _ in range(5):
        node.pass_time(8.0)
        assert statuses(replica(node, *FOREIGN[:2])) == [m.PRESENT] * 2
    assert node.exists(client, 1, *FOREIGN[:4]) == [1, 1, 0, 0]
    assert node.status().counters["replicas"] == node.status().namespaces[0].replicas == 2
    node.pass_time(11.0)
    assert node.exists(client, 1, *FOREIGN[:4]) == [0] * 4
    assert node.status().counters["replica_bytes"] == 0


def test_a_replica_of_a_page_whose_owner_died_is_the_page() -> None:
    node = holder()
    inherited = [n for n in FOREIGN if Ring([NODES[0], NODES[2]]).owner(key(n)).node == "n0"]
    assert inherited
    replica(node, *inherited[:3])
    node.do(ev.ViewChanged(Ring([NODES[0], NODES[2]], 6), True))
    for _ in range(4):
        node.pass_time(10.0)
    assert node.exists(node.connect(), 1, *inherited[:3]) == [1] * 3
    assert node.status().counters["replicas"] == 0


def test_replicas_are_not_swept_with_foreign_pages() -> None:
    node = holder()
    replica(node, FOREIGN[0])
    node.do(ev.ViewChanged(ring_of(3, 5), True))
    node.pass_time(0.01)
    assert node.exists(node.connect(), 1, FOREIGN[0]) == [1]


# --- namespaces with copies


def copied(copies: int = 2) -> tuple[Node, list[int]]:
    """n0 with pages of a namespace with copies, all of them its own; and their keys."""
    node = node_of_three()
    move_all(node)
    node.do(ev.ViewChanged(ring_of(3, 5), True))
    for _ in range(10):
        node.pass_time(0.01)
    node.state.sharding.configure(1, copies)
    return node, owned_by(ring_of(3, 5), "n0")


def test_each_page_of_a_namespace_with_copies_is_pushed_to_its_successor_under_a_lease() -> None:
    node, mine = copied()
    asks = pushes(node.pass_time(1.0))
    assert all(push.replica for push in asks)
    found = {k: push.node for push in asks for k in push.keys}
    assert found == {key(n): ring_of(3, 5).successors([key(n)], 2)[0][1].node for n in mine}
    assert pushes(node.pass_time(1.0)) == [], "until they have answered"


def test_copies_are_renewed_and_a_new_page_gets_one() -> None:
    node, mine = copied()
    answer_all(node, pushes(node.pass_time(1.0)))
    for _ in range(20):
        assert pushes(node.pass_time(1.0)) == []
    (new, *_) = [n for n in range(1000, 1100) if ring_of(3, 5).owner(key(n)).node == "n0"]
    node.put(node.connect(), 1, new)
    (ask,) = pushes(node.pass_time(1.0))
    assert ask.keys == [key(new)]
    answer_all(node, [ask])
    renewed = {k for _ in range(40) for ask in pushes(node.pass_time(1.0)) for k in ask.keys}
    assert {key(n) for n in mine} <= renewed


@pytest.mark.parametrize("end", [ev.FAILED, ev.LATER, ev.NO_ROOM])
def test_what_a_successor_could_not_take_is_pushed_again(end: int) -> None:
    node, mine = copied()
    answer_all(node, pushes(node.pass_time(1.0)), end)
    again = {k for _ in range(6) for ask in pushes(node.pass_time(1.0)) for k in ask.keys}
    assert again == {key(n) for n in mine}


def test_copies_end_with_the_page_and_with_the_setting() -> None:
    node, mine = copied()
    answer_all(node, pushes(node.pass_time(1.0)))
    node.ask(node.connect(), m.Discard(node.next_id(), 1, [key(mine[0])], []), m.Done)
    renewed = {k for _ in range(40) for ask in pushes(node.pass_time(1.0)) for k in ask.keys}
    assert renewed == {key(n) for n in mine[1:]}
    node.state.sharding.configure(1, 1)
    assert not any(pushes(node.pass_time(1.0)) for _ in range(60))


def test_many_new_copies_are_pushed_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.copies.ASKED_BYTES", 5 * 4 * KIB)
    monkeypatch.setattr("pdserve.kvpool.core.sharding.copies.NEW_A_LOOK", 7)
    monkeypatch.setattr("pdserve.kvpool.core.sharding.copies.DUE_A_LOOK", 11)
    node, mine = copied()
    found: set[bytes] = set()
    for _ in range(60):
        asks = pushes(node.pass_time(1.0))
        assert all(len(ask.keys) <= 5 for ask in asks)
        found |= {k for ask in asks for k in ask.keys}
        answer_all(node, asks)
    assert found == {key(n) for n in mine}
