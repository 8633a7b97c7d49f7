"""The synchronous client while the pool changes: nodes come and go, and pages move."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import GetView, View
from tests.support.kvpool.clients import SOON_S, until
from tests.support.kvpool.faulty import Pool, get, keys, put

COUNT = 60


def held(pool: Pool) -> list[int]:
    return [len(node.state.store.index) for node in pool.nodes]


def answering(view: View) -> Callable[[str, m.Request], m.Reply | None]:
    """Nodes that answer GetView with this."""

    def answer(node: str, request: m.Request) -> m.Reply | None:
        return (
            View(request.id, view.epoch, view.nodes, view.previous) if isinstance(request, GetView) else None
        )

    return answer


def test_one_seed_is_enough_to_find_all_nodes(pool: Pool) -> None:
    pool.tell(pool.view(3, [0, 1, 2]))
    client = pool.client(seeds=[1])
    put(client, keys(1))  # the first connection brings the view
    assert put(client, keys(COUNT)) == [True] * COUNT
    assert get(client, keys(COUNT)) == [True] * COUNT
    assert min(held(pool)) > 0
    assert sum(held(pool)) in (COUNT, COUNT + 1)  # the first write came before the view
    assert client.nodes_up == 3


def test_a_node_that_joined_is_used_and_what_has_not_moved_is_read_where_it_was(pool: Pool) -> None:
    pool.tell(pool.view(2, [0, 1]))
    client = pool.client(seeds=[0, 1])
    put(client, keys(COUNT))
    pool.tell(pool.view(3, [0, 1, 2], previous=[0, 1]))
    client.exists(keys(COUNT))  # whichever answer comes first brings the view
    assert client.rings.epoch == 3
    assert client.exists(keys(COUNT)) == [True] * COUNT
    assert get(client, keys(COUNT)) == [True] * COUNT
    owned = len(client.rings.split(keys(COUNT))["n2"])
    assert client.counters.pages_fallback == owned > 0
    assert client.counters.pages_read == COUNT
    assert client.counters.pages_missed == 0
    assert put(client, keys(COUNT)) == [True] * COUNT
    assert held(pool)[2] == owned


@pytest.mark.parametrize("kind", [m.Exists, m.Get])
def test_pages_that_move_between_two_questions_are_found(pool: Pool, kind: type[m.Exists | m.Get]) -> None:
    """The new owner is asked just before it has them, the earlier owner just after it dropped them."""
    pool.tell(pool.view(2, [0, 1]))
    client = pool.client(seeds=[0, 1])
    put(client, keys(COUNT))
    pool.tell(pool.view(3, [0, 1, 2], previous=[0, 1]))
    client.exists(keys(1))
    moved = []

    def answer(node: str, request: m.Request) -> m.Reply | None:
        if node != "n2" or not isinstance(request, kind) or moved:
            return None
        moved.extend(request.keys)
        pool.connector.answer = lambda node, request: None
        new_owner = pool.client(seeds=[2])
        assert all(put(new_owner, moved))
        new_owner.close()
        pool.tell(pool.view(3, [0, 1, 2]))
        for i in (0, 1):
            earlier_owner = pool.client(seeds=[i], namespace="ns")
            earlier_owner.clear()
            put(earlier_owner, [key for key in keys(COUNT) if key not in moved])
            earlier_owner.close()
        if kind is m.Exists:
            return m.Present(request.id, bytes(len(request.keys)))
        return m.Got(request.id, [m.Pin(m.MISS)] * len(request.keys))

    pool.connector.answer = answer
    look = client.exists if kind is m.Exists else lambda wanted: get(client, wanted)
    assert look(keys(COUNT)) == [True] * COUNT
    assert len(moved) > 0


def test_without_an_earlier_ring_nothing_is_asked_twice(pool: Pool) -> None:
    client = pool.client()
    calls: list[str] = []
    pool.connector.before = lambda node, step: calls.append(node) if step == "call" else None
    client.exists(keys(COUNT))
    assert sorted(calls) == ["n0", "n0", "n1", "n1", "n2", "n2"]  # with OpenNamespace


def test_a_node_that_left_is_not_asked_any_more_and_its_connections_end(pool: Pool) -> None:
    pool.tell(pool.view(2, [0, 1, 2]))
    client = pool.client()
    put(client, keys(COUNT))
    left = client._links.link("n2")
    pool.tell(pool.view(3, [0, 1]))
    client.exists(keys(COUNT))
    assert sorted(client._links.links) == ["n0", "n1"]
    assert not left.up
    assert put(client, keys(COUNT)) == [True] * COUNT
    assert get(client, keys(COUNT)) == [True] * COUNT
    assert client.nodes_up == 2


def test_an_operation_under_way_on_a_node_that_leaves_ends_as_usual(pool: Pool) -> None:
    pool.tell(pool.view(2, [0, 1, 2]))
    client = pool.client()
    put(client, keys(COUNT))
    reading, go_on = threading.Event(), threading.Event()

    def hold(node: str, step: str) -> None:
        if (node, step) == ("n2", "read_pages"):
            reading.set()
            assert go_on.wait(SOON_S)

    pool.connector.before = hold
    found: list[list[bool]] = []
    reader = threading.Thread(target=lambda: found.append(get(client, keys(COUNT))))
    reader.start()
    assert reading.wait(SOON_S)
    pool.tell(pool.view(3, [0, 1]))
    client.exists(keys(COUNT))
    assert client.rings.epoch == 3
    go_on.set()
    reader.join(SOON_S)
    assert found == [[True] * COUNT]


def test_a_write_to_a_node_that_does_not_own_it_goes_to_the_one_that_does(pool: Pool) -> None:
    view = pool.view(3, [1])
    client = pool.client(seeds=[0, 1])
    mistaken = client.rings.split(keys(COUNT))["n0"]

    def answer(node: str, request: m.Request) -> m.Reply | None:
        if node == "n0" and isinstance(request, m.Reserve):
            return m.Reserved(request.id, [m.Grant(m.MOVED)] * len(request.keys))
        return answering(view)(node, request)

    pool.connector.answer = answer
    assert put(client, keys(COUNT)) == [True] * COUNT
    assert len(mistaken) > 0
    assert held(pool) == [0, COUNT, 0]


def test_a_write_that_nobody_owns_up_to_is_unstored_and_not_asked_for_again(pool: Pool) -> None:
    client = pool.client()
    reserves: list[str] = []

    def answer(node: str, request: m.Request) -> m.Reply | None:
        if isinstance(request, m.Reserve):
            reserves.append(node)
            return m.Reserved(request.id, [m.Grant(m.MOVED)] * len(request.keys))
        return answering(pool.view(len(reserves) + 1, [0, 1]))(node, request)

    pool.connector.answer = answer
    assert put(client, keys(COUNT)) == [False] * COUNT
    assert len(reserves) <= 3 + 2


def test_after_a_failure_the_others_are_asked_for_their_view(pool: Pool) -> None:
    """Its connections are idle otherwise: nobody pushes anything that somebody would read."""
    pool.tell(pool.view(2, [0, 1, 2]))
    client = pool.client()
    put(client, keys(COUNT))
    pool.connector.answer = answering(pool.view(3, [0, 2]))
    pool.nodes[1].stop()
    client.exists(keys(COUNT))
    until(lambda: client.rings.epoch == 3)
    assert put(client, keys(COUNT)) == [True] * COUNT
    assert get(client, keys(COUNT)) == [True] * COUNT


def test_a_pool_without_membership_is_never_asked_for_a_view(pool: Pool) -> None:
    client = pool.client()
    asked: list[str] = []

    def answer(node: str, request: m.Request) -> m.Reply | None:
        if isinstance(request, GetView):
            asked.append(node)
        return None

    pool.connector.answer = answer
    pool.nodes[1].stop()
    client.exists(keys(COUNT))
    pool.nodes[1].restart()
    until(lambda: client.nodes_up == 3)
    assert asked == []


def test_a_pool_started_anew_with_other_nodes_is_found_through_the_seeds(pool: Pool) -> None:
    pool.tell(pool.view(50, [1]))
    client = pool.client(seeds=[0])
    client.exists(keys(1))
    assert client.rings.epoch == 50
    pool.tell(pool.view(2, [0, 2]))
    pool.nodes[0].restart()
    pool.nodes[1].stop()
    put(client, keys(3))
    until(lambda: client.rings.epoch == 2)
    assert put(client, keys(COUNT)) == [True] * COUNT


def test_nodes_without_membership_are_a_pool_that_shrinks_to_the_last_and_grows_again(pool: Pool) -> None:
    for i, node in enumerate(pool.nodes):
        node.view = pool.view(5 + i, [i])
    client = pool.client()
    assert put(client, keys(COUNT)) == [True] * COUNT
    assert min(held(pool)) > 0
    pool.nodes[0].stop()
    pool.nodes[2].stop()
    client.exists(keys(COUNT))
    until(lambda: len(client.rings.ring.nodes) == 1)
    assert put(client, keys(COUNT)) == [True] * COUNT
    pool.nodes[0].restart()
    pool.nodes[2].restart()
    until(lambda: client.nodes_up == 3)
    until(lambda: len(client.rings.ring.nodes) == 3)
    assert get(client, keys(COUNT)) == [True] * COUNT
