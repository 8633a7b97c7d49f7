"""A client speaks with one node, and has the whole pool: three real nodes, connections to one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.kvpool.node.config import ClusterConfig, NamespaceDefaults
from pdserve.kvpool.node.peers import peer_link
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.moving_nodes import Client, Nodes
from tests.support.kvpool.nodes import keys, open_namespace
from tests.support.waiting import soon

NAMES = ("n0", "n1", "n2")


@pytest.fixture(params=["shm", "tcp"])
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    if request.param == "tcp":  # as if the other nodes were on other hosts
        hello = peer_link.make_hello
        monkeypatch.setattr(
            peer_link, "make_hello", lambda name, host, path, token: hello(name, "", "tcp", token)
        )
    nodes = Nodes(tmp_path)
    for name in NAMES:
        nodes.start(name, join=False)
    nodes.tell()
    nodes.settle()
    yield nodes
    nodes.close()


def owned(pool: Nodes, count: int, seed: int = 1) -> dict[str, list[bytes]]:
    """New keys by the node that owns them."""
    found, ring = keys(count, seed), pool.ring()
    return {name: [key for key in found if ring.owner(key).node == name] for name in NAMES}


def ask(client: Client, request: m.Request) -> m.Reply:
    return client.connection.call(request, soon())


def exists(client: Client, wanted: list[bytes]) -> bytes:
    reply = ask(client, m.Exists(7, client.namespace, wanted))
    assert isinstance(reply, m.Present)
    return reply.mask


def test_what_is_written_at_one_node_is_at_its_owners_when_it_is_acknowledged(pool: Nodes) -> None:
    wanted = owned(pool, 60)
    with pool.client("n0") as client:
        every = [key for own in wanted.values() for key in own]
        assert client.put(every) == every
        for name, own in wanted.items():
            assert all(name in pool.holders(key) for key in own)
    for name in NAMES:  # a reader at any node has all of it
        with pool.client(name) as client:
            assert exists(client, [*every, b"?" * 32]) == bytes([1] * len(every) + [0])
            assert client.get([*every, b"?" * 32]) == every
    pool.settle()


def test_a_page_that_is_damaged_at_its_owner_is_a_miss_and_is_dropped_there(pool: Nodes) -> None:
    wanted = owned(pool, 60)["n1"]
    with pool.client("n1") as writer, pool.client("n0") as client:
        assert writer.put(wanted) == wanted
        owner = pool.nodes["n1"]
        store = owner.state.store
        place = store.slots.offset(store.find(writer.namespace, wanted[0]))
        damaged = owner.arena.memory[place] ^ 1
        owner.arena.memory[place] = damaged
        assert client.get(wanted) == wanted[1:]
        assert pool.holders(wanted[0]) == []
        assert pool.counters("n0")["pages_fetched"] == len(wanted) - 1


def test_a_wait_ends_when_another_node_has_the_page(pool: Nodes) -> None:
    wanted = owned(pool, 60)
    some = [own[0] for own in wanted.values()]
    with pool.client("n0") as client, pool.client("n2") as writer, ThreadPoolExecutor(1) as thread:
        begun_s = time.monotonic()
        reply = thread.submit(ask, client, m.Wait(8, client.namespace, some, 15.0))
        assert writer.put(some) == some
        found = reply.result(20)
        assert isinstance(found, m.Present)
        assert found.mask == b"\1\1\1"
        assert time.monotonic() - begun_s < 14
        late = ask(client, m.Wait(9, client.namespace, [*some, b"?" * 32], 0.3))
        assert isinstance(late, m.Present)
        assert late.mask == b"\1\1\1\0"


def test_pages_are_dropped_everywhere(pool: Nodes) -> None:
    every = [key for own in owned(pool, 30).values() for key in own]
    with pool.client("n0") as client, pool.client("n1") as other:
        assert client.put(every) == every
        assert other.get(every) == every
        reply = ask(client, m.Discard(7, client.namespace, every[:10], []))
        assert isinstance(reply, m.Done)
        assert reply.count >= 10
        assert other.get(every) == every[10:]
        cleared = ask(other, m.Clear(8, other.namespace))
        assert isinstance(cleared, m.Done)
        assert cleared.count >= 20
        assert client.get(every) == []
        assert exists(client, every) == bytes(30)


def test_a_node_that_is_gone_costs_misses_of_its_pages_and_a_short_time(pool: Nodes) -> None:
    wanted = owned(pool, 60)
    with pool.client("n0") as client:
        every = [key for own in wanted.values() for key in own]
        assert client.put(every) == every
        pool.run("n0", pool.nodes["n0"].fetcher.drop_links)
        kept = [key for key in every if "n0" in pool.holders(key)]
        assert kept == every  # replicas of what it wrote
        fresh = owned(pool, 60, seed=2)
        with pool.client("n1") as writer:
            assert writer.put(fresh["n1"]) == fresh["n1"]
            assert writer.put(fresh["n2"]) == fresh["n2"]
        pool.stop("n1")
        begun_s = time.monotonic()
        assert client.get([*fresh["n1"], *fresh["n2"]]) == fresh["n2"]
        assert exists(client, fresh["n1"]) == bytes(len(fresh["n1"]))
        assert time.monotonic() - begun_s < 5


def test_what_is_erased_at_one_node_is_left_at_none(pool: Nodes) -> None:
    every = [key for own in owned(pool, 30).values() for key in own]
    with pool.client("n0") as client, pool.client("n1") as other:
        assert client.put(every) == every
        assert other.get(every) == every
        erased = ask(other, m.Erase(7, other.namespace, every[:10]))
        assert isinstance(erased, m.Done)
        assert erased.count >= 10
        assert [pool.holders(key) for key in every[:10]] == [[]] * 10
        assert client.get(every) == every[10:]
        name = "ns#alice"
        opened = ask(client, m.OpenNamespace(8, name, {"a": "b"}))
        assert isinstance(opened, m.Opened)
        tenant = client._replace(namespace=opened.namespace)
        assert tenant.put(every) == every
        assert exists(other, every) == bytes([0] * 10 + [1] * 20)
        dropped = ask(other, m.DropNamespace(9, name))
        assert isinstance(dropped, m.Done)
        assert dropped.count >= len(every)
        assert client.get(every) == every[10:]


@pytest.mark.parametrize("named", ["#alice", "ns#alice"])
def test_who_may_not_drop_a_tenants_pages_has_no_node_drop_them(tmp_path: Path, named: str) -> None:
    """The first node has the others do it with its own rights."""
    token = "the-token-of-the-operator"
    nodes = Nodes(
        tmp_path,
        admin_token=token,
        cluster=ClusterConfig(token="the-token-of-the-nodes"),
        namespace_defaults=NamespaceDefaults(read_token="the-token-of-the-readers"),
    )
    try:
        for name in ("n0", "n1"):
            nodes.start(name)
        nodes.settle()
        address = f"unix:{tmp_path}/n0.sock"
        operator, stranger = connect(address, soon(), token=token), connect(address, soon())
        with closing(operator), closing(stranger):
            open_namespace(operator, "ns", a="b")
            client = Client(operator, open_namespace(operator, "ns#alice", a="b"))
            every = keys(30)
            assert client.put(every) == every
            refused = stranger.call(m.DropNamespace(5, named), soon())
            assert isinstance(refused, m.Fault)
            assert refused.code == "access_denied"
            assert client.get(every) == every
            dropped = operator.call(m.DropNamespace(6, named), soon())
            assert isinstance(dropped, m.Done)
            assert dropped.count > 0
            again = Client(operator, open_namespace(operator, "ns#alice", a="b"))
            assert again.get(every) == []
    finally:
        nodes.close()
