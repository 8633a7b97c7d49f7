"""What a node decides about pages that are others': under views put in by hand, without sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import (
    LOCAL,
    Action,
    AskReplicas,
    Connected,
    ReplicasMade,
    ViewChanged,
)
from pdserve.kvpool.core.sharding.coordinator import Sharding
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ListOwned, Owned
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
    node.do(Connected(LOCAL, "shm", "this node", 0, peer=True))
    client = node.connect()
    node.put(client, node.open(client), *ALL)
    node.do(ViewChanged(ring_of(3, 5), stable))
    return node


def peer(node: Node) -> int:
    node.do(Connected(99, "shm", "n1", 1, peer=True))
    return 99


def list_owned(node: Node, connection: int, name: str, epoch: int = 5, limit: int = 4096) -> list[Owned]:
    found, cursor = [], 0
    while True:
        request = ListOwned(node.next_id(), 1, name, epoch, cursor, limit)
        found.append(node.ask(connection, request, Owned))
        cursor = found[-1].cursor
        if not cursor:
            return found


# --- who may write what


def test_alone_there_is_neither_refusal_nor_deadline() -> None:
    node = Node()
    client = node.connect()
    node.do(ViewChanged(ring_of(1, 3), True))
    assert set(statuses(node.reserve(client, node.open(client), *range(9)))) == {m.GRANTED}
    assert node.state.sharding.next_deadline_s == float("inf")


# --- what a new owner is told


def test_open_reservations_of_a_new_owners_pages_are_counted() -> None:
    node = Node(slabs=8)
    client = node.connect()
    grants = node.reserve(client, node.open(client), *ALL)
    node.do(ViewChanged(ring_of(3, 5), False))
    expected = Counter(ring_of(3, 5).owner(key(n)).node for n in ALL)
    asker = peer(node)
    [part] = list_owned(node, asker, "n1")
    assert (part.keys, part.writing) == ([], expected["n1"])
    node.commit(client, *grants)
    [part] = list_owned(node, asker, "n1")
    assert (len(part.keys), part.writing) == (expected["n1"], 0)


@pytest.mark.parametrize("epoch", [4, 6])
def test_who_has_another_view_is_told_to_ask_again(epoch: int) -> None:
    node = node_of_three()
    fault = node.ask(peer(node), ListOwned(1, 1, "n1", epoch, 0, 10), m.Fault)
    assert fault.code == "stale_view"


@pytest.mark.parametrize("cursor", [-1, -(1 << 62), 1 << 62])
def test_a_cursor_that_no_answer_named_lists_nothing(cursor: int) -> None:
    node = node_of_three()
    owned = node.ask(peer(node), ListOwned(1, 1, "n1", 5, cursor, 10), Owned)
    assert (owned.keys, owned.cursor) == ([], 0)


def test_a_peer_that_fetches_pages_leaves_no_trace_in_the_hit_rate() -> None:
    node = node_of_three()
    asker = peer(node)
    node.release(asker, *node.get(asker, 1, *ALL))
    node.get(asker, 1, 999)
    [space] = node.status().namespaces
    assert (space.hits, space.misses) == (0, 0)


# --- dropping


def test_dropping_goes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_LOOKED_AT", 10)
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_DROPPED", 3)
    node = node_of_three(stable=True)
    steps = 0
    while node.state.sharding.ownership.next_step_s < float("inf"):
        before = node.status().counters["foreign_dropped"]
        node.pass_time(0.01)
        assert node.status().counters["foreign_dropped"] - before <= 3
        steps += 1
    client = node.connect()
    assert [n for n in ALL if node.exists(client, 1, n) == [1]] == owned_by(ring_of(3, 5), "n0")
    assert steps > len(ALL) // 10


def test_a_node_that_leaves_refuses_everything_and_drops_it_in_the_end() -> None:
    node = node_of_three()
    client = node.connect()
    rest = Ring(NODES[1:], 6)
    node.do(ViewChanged(rest, False))
    assert set(statuses(node.reserve(client, 1, *range(100, 110)))) == {m.MOVED}
    assert node.exists(client, 1, *ALL) == [1] * len(ALL)
    node.do(ViewChanged(rest, True))
    node.pass_time(0.01)
    assert node.status().pages == 0


# --- tiers below memory


class FakeTiers:
    """Tiers, as far as ownership is concerned: a dictionary of lengths by namespace and key."""

    def __init__(self) -> None:
        self.ready = True
        self.pages: dict[int, dict[bytes, int]] = {}

    def namespaces(self) -> list[int]:
        return list(self.pages)

    def own_keys(self, namespace: int) -> list[bytes]:
        return list(self.pages.get(namespace, {}))

    def length(self, namespace: int, key: bytes) -> int:
        return self.pages.get(namespace, {}).get(key, 0)

    def disown(self, namespace: int, keys: Sequence[bytes], out: list[Action]) -> None:
        for gone in keys:
            self.pages.get(namespace, {}).pop(gone, None)


def node_with_tiers(*, stable: bool = False) -> tuple[Node, FakeTiers]:
    """n0 with ALL in memory, 40 to 60 of them and 60 to 160 in a tier."""
    node, tiers = node_of_three(), FakeTiers()
    tiers.pages = {1: {key(n): 100 + n for n in range(40, 160)}}
    node.state.sharding = Sharding("n0", node.state.store, 10.0, tiers)
    node.do(ViewChanged(ring_of(3, 5), stable))
    return node, tiers


@pytest.mark.parametrize("limit", [1, 7, 4096])
@pytest.mark.parametrize("looked_at", [5, 8192])
def test_a_new_owner_is_told_of_pages_in_tiers_too(
    limit: int, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_LOOKED_AT", looked_at)
    node, _ = node_with_tiers()
    parts = list_owned(node, peer(node), "n1", limit=limit)
    told = {k: length for part in parts for k, length in zip(part.keys, part.lengths, strict=True)}
    ring = ring_of(3, 5)
    theirs = [n for n in range(160) if ring.owner(key(n)).node == "n1"]
    assert told == {key(n): 4 * KIB if n in ALL else 100 + n for n in theirs}
    assert sum(len(part.keys) for part in parts) == len(theirs)
    assert not node.state.sharding.ownership._listing._listings


def test_however_many_ask_at_once_each_is_told_of_all_that_tiers_still_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_LOOKED_AT", 7)
    node, tiers = node_with_tiers()
    names = [f"n{n}" for n in range(1, 31)]
    ring = Ring([m.NodeAddress(name, f"unix:/{name}") for name in ("n0", *names)], 6)
    node.do(ViewChanged(ring, False))
    asker = peer(node)
    cursors, told, going = dict.fromkeys(names, 0), set[bytes](), list(tiers.pages[1])
    while cursors:
        for name in list(cursors):
            request = ListOwned(node.next_id(), 1, name, 6, cursors[name], 4096)
            owned = node.ask(asker, request, Owned)
            told.update(owned.keys)
            cursors[name] = owned.cursor
            if not owned.cursor:
                del cursors[name]
        del tiers.pages[1][going.pop(0)]  # a full tier drops its oldest
    assert {k for k in tiers.pages[1] if ring.owner(k).node != "n0"} <= told


def test_who_comes_with_a_place_in_a_list_that_is_not_there_is_told_to_go_through_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_LOOKED_AT", 50)
    node, _ = node_with_tiers()
    slots, asker = node.state.store.slots.slots, peer(node)
    for name in ("n1", "n2"):
        last = max(list_owned(node, asker, name), key=lambda part: part.cursor).cursor
        assert last > slots
        again = node.ask(asker, ListOwned(9, 1, name, 5, last, 4096), Owned)  # the answer was lost
        assert (again.keys, again.cursor, again.writing) == ([], 0, 1)


def test_a_page_that_rises_into_memory_meanwhile_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.ownership.MAX_LOOKED_AT", 20)
    node, tiers = node_with_tiers()
    asker, slots = peer(node), node.state.store.slots.slots
    theirs = [n for n in range(60, 160) if ring_of(3, 5).owner(key(n)).node == "n1"]
    told, cursor = set[bytes](), 0
    while True:
        owned = node.ask(asker, ListOwned(node.next_id(), 1, "n1", 5, cursor, 4096), Owned)
        told.update(owned.keys)
        if cursor < slots <= owned.cursor:
            node.put(LOCAL, 1, *theirs)  # as when they are read here: into slots that were passed
        cursor = owned.cursor
        if not cursor:
            break
    assert {key(n) for n in theirs} <= told
    assert set(tiers.pages[1]) >= {key(n) for n in theirs}


def test_while_a_tier_is_still_being_read_the_asker_comes_again() -> None:
    node, tiers = node_with_tiers()
    tiers.ready = False
    assert list_owned(node, peer(node), "n1")[0].writing == 1
    tiers.ready = True
    assert list_owned(node, 99, "n1")[0].writing == 0


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
    grants = node.ask(LOCAL, request, m.Reserved).grants
    granted = [grant for grant in grants if grant.status == m.GRANTED]
    if granted:
        node.commit(LOCAL, *granted)
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
    node.do(ViewChanged(Ring([NODES[0], NODES[2]], 6), True))
    for _ in range(4):
        node.pass_time(10.0)
    assert node.exists(node.connect(), 1, *inherited[:3]) == [1] * 3
    assert node.status().counters["replicas"] == 0


def answer_all(node: Node, asks: list[object], ok: bool = True) -> None:
    for ask in asks:
        if isinstance(ask, AskReplicas):
            node.do(ReplicasMade(ask.node, ask.namespace, ask.keys, [ok] * len(ask.keys)))


def test_the_node_itself_and_peers_may() -> None:
    node = node_of_three()
    for connection, keys in ((LOCAL, range(100, 110)), (peer(node), range(110, 120))):
        assert set(statuses(node.reserve(connection, 1, *keys))) == {m.GRANTED}


def test_pages_that_moved_are_still_read_while_others_pull_them() -> None:
    node = node_of_three()
    node.pass_time(60)
    client = node.connect()
    assert node.exists(client, 1, *ALL) == [1] * len(ALL)
    assert {pin.status for pin in node.get(client, 1, *ALL)} == {m.HIT}


def test_replicas_are_not_swept_with_foreign_pages() -> None:
    node = holder()
    replica(node, FOREIGN[0])
    node.do(ViewChanged(ring_of(3, 5), True))
    node.pass_time(0.01)
    assert node.exists(node.connect(), 1, FOREIGN[0]) == [1]


def test_a_replica_that_comes_late_for_a_page_that_is_owned_here_by_now_stays() -> None:
    node = holder()
    mine = next(n for n in range(300, 400) if ring_of(3, 5).owner(key(n)).node == "n0")
    replica(node, mine)
    node.pass_time(30.0)
    assert node.exists(node.connect(), 1, mine) == [1]
    assert node.status().counters["replicas"] == 0


# --- namespaces with copies


def copied(copies: int = 2) -> tuple[Node, list[int]]:
    """n0 with pages of a namespace with copies, all of them its own; and their keys."""
    node = node_of_three(stable=True)
    for _ in range(10):
        node.pass_time(0.01)
    node.state.sharding.configure(1, copies)
    return node, owned_by(ring_of(3, 5), "n0")


def asked(node: Node, seconds: float = 1.0) -> list[AskReplicas]:
    return [action for action in node.pass_time(seconds) if isinstance(action, AskReplicas)]


def test_each_page_of_a_namespace_with_copies_is_asked_of_its_successor() -> None:
    node, mine = copied()
    found = {k: ask.node for ask in asked(node) for k in ask.keys}
    assert found == {key(n): ring_of(3, 5).successors([key(n)], 2)[0][1].node for n in mine}
    assert asked(node) == [], "until they have answered"


def test_copies_are_renewed_and_a_new_page_gets_one() -> None:
    node, mine = copied()
    answer_all(node, list(asked(node)))
    for _ in range(20):
        assert asked(node) == []
    (new, *_) = [n for n in range(1000, 1100) if ring_of(3, 5).owner(key(n)).node == "n0"]
    node.put(node.connect(), 1, new)
    (ask,) = asked(node)
    assert ask.keys == [key(new)]
    answer_all(node, [ask])
    renewed = {k for _ in range(40) for ask in asked(node) for k in ask.keys}
    assert {key(n) for n in mine} <= renewed


def test_what_a_successor_could_not_take_is_asked_again() -> None:
    node, mine = copied()
    asks = asked(node)
    answer_all(node, list(asks), ok=False)
    again = {k for _ in range(6) for ask in asked(node) for k in ask.keys}
    assert again == {key(n) for n in mine}


def test_copies_end_with_the_page_and_with_the_setting() -> None:
    node, mine = copied()
    answer_all(node, list(asked(node)))
    node.ask(node.connect(), m.Discard(node.next_id(), 1, [key(mine[0])], []), m.Done)
    renewed = {k for _ in range(40) for ask in asked(node) for k in ask.keys}
    assert renewed == {key(n) for n in mine[1:]}
    node.state.sharding.configure(1, 1)
    assert not any(asked(node) for _ in range(60))


def test_many_new_copies_are_asked_for_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kvpool.core.sharding.copies.ASKED_BYTES", 5 * 4 * KIB)
    monkeypatch.setattr("pdserve.kvpool.core.sharding.copies.NEW_A_LOOK", 7)
    node, mine = copied()
    found: set[bytes] = set()
    for _ in range(60):
        asks = asked(node)
        assert all(len(ask.keys) <= 5 for ask in asks)
        found |= {k for ask in asks for k in ask.keys}
        answer_all(node, list(asks))
    assert found == {key(n) for n in mine}
