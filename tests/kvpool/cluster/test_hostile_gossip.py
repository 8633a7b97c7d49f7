"""What another node says may be garbage: it is refused whole, or can do no harm."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.errors import FrameError
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.cluster.ring import MAX_WEIGHT, Ring
from pdserve.kvpool.cluster.state import (
    AHEAD_MS,
    MAX_FOLDED,
    MAX_FORGOTTEN,
    MAX_HORIZON,
    MAX_VERSION,
    encoded,
)
from pdserve.kvpool.core.events import PublishNamespace, RecordsLearned
from pdserve.kvpool.namespaces.registry import MAX_GEOMETRY_CHARS, MAX_LEARNED_BYTES
from pdserve.kvpool.node.serving.fair_queue import FairQueue
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    DEAD,
    ClusterState,
    Gossip,
    Gossiped,
    Member,
    NamespaceRecord,
    NamespaceSettings,
    PutNamespace,
)
from pdserve.kvpool.protocol.frames import HEADER_BYTES, decode_reply, encode_frame
from tests.support.kvpool.node_model import Node
from tests.support.kvpool.odd_messages import INTS as ODD_INTS
from tests.support.kvpool.odd_messages import odd
from tests.support.suite.extended import examples

INTS = st.integers(-2, 70) | st.sampled_from(ODD_INTS)
WEIGHTS = st.sampled_from([-1, 0, 1, 2, 9000, MAX_WEIGHT, 1 << 40])
NAMES = st.sampled_from(["a", "b", "me", "", "a b", "x" * 65, "\0", "..", "é"])
ADDRESSES = st.sampled_from(["tcp:h:1", "unix:/x", "", "x" * 300, "tcp:h:1\n", "nonsense"])
NODES = st.builds(NodeAddress, NAMES, ADDRESSES, WEIGHTS)
MEMBERS = st.builds(Member, NAMES, ADDRESSES, WEIGHTS, INTS, INTS, st.integers(-1, 5), INTS)
STATES = st.builds(
    ClusterState,
    st.just("pool"),
    st.lists(MEMBERS, max_size=4),
    st.lists(odd(NamespaceRecord), max_size=3),
    INTS,
    st.lists(NODES, max_size=4),
)
# one thing wrong at a time gets further
GOOD = ClusterState(
    "pool", [Member("b", "tcp:b:1", 1, 2, 200)], [NamespaceRecord("ns", 3, 1, {"g": "1"})], 5, []
)
FIELDS = st.one_of(
    st.builds(lambda x: replace(GOOD, members=[x]), MEMBERS),
    st.builds(lambda x: replace(GOOD, namespaces=[x]), odd(NamespaceRecord)),
    st.builds(
        lambda x: replace(GOOD, namespaces=[replace(GOOD.namespaces[0], settings=x)]),
        odd(NamespaceSettings),
    ),
    st.builds(lambda e, x: replace(GOOD, stable_epoch=e, stable=x), INTS, st.lists(NODES, max_size=4)),
)


def cluster() -> Cluster:
    return Cluster("pool", NodeAddress("me", "tcp:me:1", 2), 77, 100)


def as_received(state: ClusterState) -> ClusterState | None:
    """What is left of it after the wire."""
    try:
        frame = encode_frame(Gossiped(1, state))
        gossiped = decode_reply(frame[HEADER_BYTES:])
    except (FrameError, OverflowError):
        return None
    assert isinstance(gossiped, Gossiped)
    return gossiped.state


@given(st.lists(st.one_of(STATES, FIELDS), min_size=1, max_size=4))
@settings(max_examples=examples(300), deadline=None)
def test_nothing_that_a_peer_can_say_makes_a_node_raise_or_believe_nonsense(said: list[ClusterState]) -> None:
    me, node = cluster(), Node()
    client = node.connect()
    opened = node.open(client, "ns", g="1")
    me.registry = node.state.namespaces.registry
    queue: FairQueue[Any] = FairQueue()
    for state in said:
        received, before = as_received(state), me.state
        if received is None:
            continue
        try:
            update = me.receive(received)
        except FrameError:
            assert me.state is before
            continue
        for view in (me.view.nodes, me.view.previous, me.state.stable):
            Ring(view)
        assert me.me.address == "tcp:me:1"
        assert me.me.status == 0
        for member in me.members.values():
            assert member.node.isprintable()
            assert 0 < len(member.node) <= 64
        other = Cluster("pool", NodeAddress("other", "tcp:o:1"), 78, 100)
        other.receive(me.whole)  # what it believes, every other node does
        node.do(RecordsLearned(list(update.namespaces)))
        node.pass_time(1.0)
        for number in node.state.namespaces.numbers:
            found = node.state.namespaces.settings(number)
            queue.configure(
                number,
                weight=found.weight,
                operations_s=found.operations_s,
                bytes_s=found.bytes_s,
                now_s=node.now_s,
            )
            queue.put(number, None, 1, 1, node.now_s)
            queue.next(node.now_s)
            assert queue.next_time_s() == float("inf") or queue.next_time_s() < 1e300
        node.send(client, m.Exists(9, opened, []))


@given(odd(PutNamespace), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_what_a_client_may_put_every_other_node_takes(request: PutNamespace, peer: bool) -> None:
    node = Node()
    actions = node.send(node.connect(peer=peer), request)
    for action in actions:
        if isinstance(action, PublishNamespace):
            cluster().receive(ClusterState("pool", [], [action.record]))


@pytest.mark.parametrize("generation", [2**63 - 1, 2**62, -5])
def test_a_client_cannot_open_a_namespace_that_splits_the_pool(generation: int) -> None:
    for peer in (False, True):
        node = Node()
        actions = node.send(node.connect(peer=peer), m.OpenNamespace(1, "ns", {}, generation))
        records = [action.record for action in actions if isinstance(action, PublishNamespace)]
        cluster().receive(ClusterState("pool", [], records))
        assert peer or [record.generation for record in records] == [1]


def test_namespaces_beyond_all_measure_are_refused_and_known_ones_may_change() -> None:
    me = cluster()
    size = MAX_GEOMETRY_CHARS - 10
    records = [NamespaceRecord(f"n{i}", 1, 1, {"k": "v" * size}) for i in range(200)]
    half = ClusterState("pool", [], records[:50])
    for record in me.receive(half).namespaces:
        me.registry.learn(record)
    with pytest.raises(FrameError, match="MiB"):
        me.receive(replace(half, namespaces=records[50:]))
    assert len(me.registry) == 50
    assert sum(len(encoded(record)) for record in me.registry) <= MAX_LEARNED_BYTES
    changed = replace(records[0], version=2, geometry={}, dropped=True)
    assert me.receive(ClusterState("pool", [], [changed])).namespaces == (changed,)


NOW_MS = 1_800_000_000_000


@pytest.mark.parametrize(
    "said",
    [
        ClusterState("pool", [Member("me", "tcp:me:1", 2, 77, MAX_VERSION, DEAD)], []),
        ClusterState("pool", [], [], 0, [NodeAddress("b", "tcp:b:1")], folded=MAX_FOLDED - 1),
        ClusterState("pool", [], [], 0, [NodeAddress("b", "tcp:b:1")], horizon=MAX_HORIZON),
        ClusterState("pool", [Member("me", "tcp:me:1", 2, 77, NOW_MS + AHEAD_MS, DEAD)], []),
        ClusterState("pool", [Member("gone", "tcp:g:1", 2, 77, NOW_MS + AHEAD_MS, DEAD)], []),
        ClusterState(
            "pool", [], [], 0, [NodeAddress("b", "tcp:b:1")], folded=(NOW_MS + AHEAD_MS) * MAX_FORGOTTEN - 1
        ),
    ],
)
def test_no_lie_of_a_peer_splits_the_pool_for_longer_than_clocks_differ(said: ClusterState) -> None:
    nodes = [Cluster("pool", NodeAddress(name, f"tcp:{name}:1"), 7, NOW_MS) for name in ("me", "b")]
    gone = ClusterState("pool", [Member("old", "tcp:old:1", 1, 1, 1000, DEAD)], [])
    for node in nodes:
        node.receive(gone, NOW_MS)
        with contextlib.suppress(FrameError):
            node.receive(said, NOW_MS)
        node.tidy(NOW_MS)  # forgets the old member
    me, b = nodes
    for _ in range(2):
        b.receive(me.state, NOW_MS + 10)
        me.receive(b.state, NOW_MS + 10)
    for node in nodes:
        assert {member.node for member in node.alive()} == {"me", "b"}


def test_news_of_a_member_whose_clock_is_ahead_say_what_is_wrong() -> None:
    news = ClusterState("pool", [Member("b", "tcp:b:1", 1, 2, NOW_MS + 2 * AHEAD_MS)], [])
    with pytest.raises(FrameError, match="clock"):
        cluster().receive(news, NOW_MS)


def test_a_gossip_of_any_size_of_names_fits_a_frame() -> None:
    many = [Member(f"n{i:063}", "tcp:" + "h" * 240, 1, 1, 1) for i in range(1000)]
    encode_frame(Gossip(1, "a", ClusterState("pool", many, [])))
