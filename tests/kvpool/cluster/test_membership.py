"""The state that nodes gossip: its algebra, and what a node makes of it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdserve.errors import FrameError, PoolRefused
from pdserve.kvpool.cluster.membership import FORGET_MS, Cluster
from pdserve.kvpool.cluster.ring import MAX_WEIGHT
from pdserve.kvpool.cluster.state import check_state, epoch_of, merge
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    LEAVING,
    LEFT,
    MAX_MEMBERS,
    ClusterState,
    Member,
    NamespaceRecord,
)
from tests.support.suite.extended import examples

NAMES = ("a", "b", "c", "d")
small = st.integers(0, 3)
members = st.builds(
    Member,
    st.sampled_from(NAMES),
    st.sampled_from(["tcp:h:1", "tcp:h:2"]),
    st.integers(1, 2),
    small,
    st.integers(1, 3),
    small,
    small,
)
rings = st.lists(st.builds(NodeAddress, st.sampled_from(NAMES), st.just("tcp:h:1")), max_size=2)


def unique(items: list[Member]) -> list[Member]:
    return list({item.node: item for item in items}.values())


states = st.builds(
    ClusterState,
    st.just("pool"),
    st.lists(members, max_size=4).map(unique),
    st.just([]),
    small,
    rings,
)


@given(states, states, states)
@settings(max_examples=examples(100))
def test_merging_forms_a_semilattice(a: ClusterState, b: ClusterState, c: ClusterState) -> None:
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(merge(a, b), b) == merge(a, b)
    assert merge(merge(a, a), a) == merge(a, a)


@given(states, states)
def test_the_epoch_grows_with_knowledge(a: ClusterState, b: ClusterState) -> None:
    both = merge(a, b)
    for one in (a, b):
        grew = versions(both) != versions(one)
        assert epoch_of(both) > epoch_of(one) if grew else epoch_of(both) == epoch_of(one)


def versions(state: ClusterState) -> dict[str, int]:
    return {member.node: member.version for member in state.members}


def node(name: str, version: int = 100, *, weight: int = 1) -> Cluster:
    return Cluster("pool", NodeAddress(name, f"tcp:{name}:1", weight), ord(name[0]), version)


def exchange(*clusters: Cluster) -> None:
    """Everybody tells everybody until there is nothing new."""
    for _ in range(10):
        if len({cluster.digest for cluster in clusters}) == 1:
            return
        for a in clusters:
            for b in clusters:
                for record in a.receive(b.whole).namespaces:
                    a.registry.learn(record)
    raise AssertionError("they do not agree")


def settle(*clusters: Cluster) -> None:
    for cluster in clusters:
        cluster.settle(cluster.epoch)
    exchange(*clusters)


def ring_names(nodes: list[NodeAddress]) -> str:
    return "".join(n.node for n in nodes)


def seen(cluster: Cluster) -> tuple[str, str]:
    """The ring and the one before."""
    return ring_names(cluster.view.nodes), ring_names(cluster.view.previous)


def three() -> tuple[Cluster, Cluster, Cluster]:
    a, b, c = node("a"), node("b"), node("c")
    exchange(a, b, c)
    settle(a, b, c)
    return a, b, c


def test_a_node_that_joins_is_an_owner_at_once_and_the_ring_before_is_named_while_pages_move() -> None:
    a, b = node("a"), node("b")
    exchange(a, b)
    settle(a, b)
    assert seen(a) == ("ab", "")
    c = node("c")
    before = a.epoch
    c.receive(a.state)
    exchange(a, b, c)
    assert {seen(n) for n in (a, b, c)} == {("abc", "ab")}
    assert a.epoch > before
    settle(a, b)
    assert seen(a) == ("abc", "ab")
    settle(a, b, c)
    assert {seen(n) for n in (a, b, c)} == {("abc", "")}
    assert ring_names(a.state.stable) == "abc"


def test_the_last_node_cannot_leave() -> None:
    with pytest.raises(PoolRefused, match="last of the pool"):
        node("a").leave()
    a, b = node("a"), node("b")
    exchange(a, b)
    b.leave()
    exchange(a, b)
    with pytest.raises(PoolRefused, match="last of the pool"):
        a.leave()


def test_a_leaving_node_that_loses_sight_of_the_others_owns_its_pages_again() -> None:
    a, b = node("a"), node("b")
    exchange(a, b)
    settle(a, b)
    b.leave()
    assert (seen(b), b.settled) == (("a", "ab"), False)
    b.declare_dead("a", a.me.version)
    assert b.me.status == ACTIVE
    assert seen(b)[0] == "b"
    assert not b.settled, "its pages are not to be dropped"
    settle(b)
    exchange(a, b)
    assert {seen(n)[0] for n in (a, b)} == {"ab"}
    assert not a.settled, "b has yet to push what is a's"
    settle(a, b)
    b.leave()
    exchange(a, b)
    settle(a)
    exchange(a, b)
    assert b.me.status == LEAVING, "it has yet to push its pages"
    settle(a, b)
    assert b.me.status == LEFT


def test_a_ring_that_was_left_and_came_back_is_settled_anew() -> None:
    a, b, c = three()
    a.declare_dead("b", 100)
    b.receive(a.state)  # refutes
    a.receive(b.state)
    assert a.me.settled < a.epoch
    c.receive(a.state)  # saw neither the death nor the refutation, only the result
    assert c.me.settled < c.epoch


def test_news_of_another_cluster_are_refused() -> None:
    with pytest.raises(FrameError, match="'other', this is 'pool'"):
        node("a").receive(ClusterState("other", [], []))


@pytest.mark.parametrize(
    "member",
    [
        Member("b", "tcp:b:1", 0, 1, 1),
        Member("b", "tcp:b:1", MAX_WEIGHT + 1, 1, 1),
        Member("b", "tcp:b:1", 1, 1, -1),
        Member("b", "tcp:b:1", 1, 1, 1 << 60),
        Member("b", "tcp:b:1", 1, 1, 1, 9),
        Member("", "tcp:b:1", 1, 1, 1),
    ],
)
def test_impossible_members_are_refused_and_change_nothing(member: Member) -> None:
    a = node("a")
    before = a.state
    with pytest.raises(FrameError, match="impossible"):
        a.receive(ClusterState("pool", [member], []))
    assert a.state == before


def test_more_names_than_a_pool_may_ever_know_are_refused() -> None:
    a = node("a")
    many = [Member(f"n{i}", "tcp:h:1", 1, 1, 1) for i in range(MAX_MEMBERS)]
    with pytest.raises(FrameError, match="fixed names"):
        a.receive(ClusterState("pool", many, []))
    with pytest.raises(FrameError, match="at most"):
        check_state(ClusterState("pool", [*many, Member("x", "tcp:h:1", 1, 1, 1)], []))
    a.receive(ClusterState("pool", many[:-1], []))


# --- forgetting

DAY = FORGET_MS


def test_a_dead_node_is_forgotten_in_time_by_all_and_the_epoch_stays() -> None:
    a, b, _ = three()
    a.declare_dead("c", 100)
    exchange(a, b)
    settle(a, b)
    epoch, view = a.epoch, a.view
    assert not a.tidy(1000)
    a.tidy(2 * DAY)
    assert "c" in a.members, "b has not said yet that it is still there"
    b.receive(a.state)
    b.tidy(2 * DAY)
    assert "c" not in b.members
    a.receive(b.state)
    assert sorted(a.members) == ["a", "b"]
    assert a.digest == b.digest
    assert (a.epoch, a.view, b.epoch) == (epoch, view, epoch)
    assert a.settled
    check_state(a.state)


def test_more_names_than_a_pool_may_know_at_a_time_come_and_go() -> None:
    a = node("a")
    for i in range(MAX_MEMBERS + 100):
        now_ms = 1000 + i * 5_000  # a new node every five seconds
        a.receive(ClusterState("pool", [Member(f"pod-{i}", "tcp:h:1", 1, i, now_ms)], []))
        epoch = a.epoch
        a.declare_dead(f"pod-{i}", now_ms)
        a.tidy(now_ms)
        assert a.epoch > epoch
    assert len(a.members) < MAX_MEMBERS / 2


def stamps(state: ClusterState) -> list[int]:
    return [max(member.version, member.renewed) for member in state.members]


class Pool:
    """Nodes that gossip, restart, die, leave, settle and forget in any order, and old news that come late."""

    def __init__(self) -> None:
        self.clusters = {name: node(name) for name in "abc"}
        self.incarnation = 1000
        self.epochs = dict.fromkeys("abc", 0)
        self.now_ms = 1000
        self.letters: list[ClusterState] = []

    def step(self, what: int, x: str, y: str) -> None:
        one, other = self.clusters[x], self.clusters[y]
        if what == 0:
            one.receive(other.state)
        elif what == 1 and y in one.members:
            one.declare_dead(y, one.members[y].version)
        elif what == 2:
            one.settle(one.epoch)
        elif what == 3:
            self.incarnation += 1
            self.clusters[x] = Cluster("pool", NodeAddress(x, f"tcp:{x}:2", 1), self.incarnation, 101)
            self.epochs[x] = 0
        elif what == 4:
            one.registry.learn(NamespaceRecord(y, ord(x), 1, {}))
        elif what == 5 and x != "a":
            with contextlib.suppress(PoolRefused):  # the last node
                one.leave()
        elif what == 6:
            one.tidy(self.now_ms)
        elif what == 7:
            self.letters.append(one.state)
        elif what == 8 and self.letters:
            one.receive(self.letters[ord(y) % len(self.letters)])
        elif what == 9:
            name = f"pod{len(self.letters)}{y}"
            one.receive(ClusterState("pool", [Member(name, "tcp:h:1", 1, 1, self.now_ms)], []))
            one.declare_dead(name, self.now_ms)
        elif what == 10:
            self.now_ms += DAY // 3
        self.check(x)

    def check(self, x: str) -> None:
        cluster = self.clusters[x]
        assert cluster.epoch >= self.epochs[x]
        self.epochs[x] = cluster.epoch
        assert cluster.me.status in (ACTIVE, LEAVING, LEFT)
        assert cluster.me.incarnation in (ord(x), *range(1000, self.incarnation + 1))
        assert cluster.state == merge(cluster.state, cluster.state)
        assert cluster.view.epoch == epoch_of(cluster.state)
        assert {n.node for n in cluster.view.nodes} == {
            m.node for m in cluster.members.values() if m.status == ACTIVE
        }
        assert all(cluster.members[n.node].status < LEFT for n in cluster.view.previous)
        check_state(cluster.state)
        assert all(stamp >= cluster.state.horizon for stamp in stamps(cluster.state))


steps = st.tuples(st.integers(0, 10), st.sampled_from("abc"), st.sampled_from("abc"))


@pytest.mark.parametrize("forgetting", [False, True])
@given(st.lists(steps, max_size=40))
@settings(max_examples=examples(200), deadline=None)
def test_whatever_happens_nodes_that_talk_end_up_with_one_view_and_no_epoch_ever_falls(
    forgetting: bool, happened: list[tuple[int, str, str]]
) -> None:
    pool = Pool()
    for what, x, y in happened:
        pool.step(what if what < 6 or forgetting else what - 6, x, y)
    clusters = tuple(pool.clusters.values())
    exchange(*clusters)
    for _ in range(6 * forgetting):  # who talks to each other long enough forgets what is gone
        pool.now_ms += DAY // 2
        for cluster in clusters:
            cluster.tidy(pool.now_ms)
        exchange(*clusters)
    owners = {name for name, cluster in pool.clusters.items() if cluster.me.status == ACTIVE}
    assert owners, "a leaving node without others owns its pages again"
    assert {seen(cluster)[0] for cluster in clusters} == {"".join(sorted(owners))}
    leaving = {name for name, cluster in pool.clusters.items() if cluster.me.status == LEAVING}
    settle(*clusters)
    assert {seen(cluster) for cluster in clusters} == {("".join(sorted(owners)), "")}
    assert all(pool.clusters[name].me.status == LEFT for name in leaving)
    assert all(cluster.settled for cluster in clusters)
    assert len({cluster.epoch for cluster in clusters}) == 1
    for x in "abc":
        pool.check(x)


aged = st.builds(
    lambda state, horizon, folded: merge(
        replace(state, folded=folded), ClusterState("pool", [], [], horizon=horizon)
    ),
    states,
    small,
    small,
)


@given(aged, aged, aged)
@settings(max_examples=examples(100))
def test_what_two_states_forgot_is_forgotten_by_both_and_no_epoch_falls(
    a: ClusterState, b: ClusterState, c: ClusterState
) -> None:
    both = merge(a, b)
    assert both == merge(b, a)
    assert merge(both, a) == merge(both, b) == both
    assert epoch_of(both) >= max(epoch_of(a), epoch_of(b))
    assert all(stamp >= both.horizon for stamp in stamps(both))
    left = {member.node for member in both.members}
    if any(member.status < LEFT and member.node not in left for member in a.members):
        assert epoch_of(both) > epoch_of(a), "the ring changed"
    assert epoch_of(merge(both, c)) >= epoch_of(both)
