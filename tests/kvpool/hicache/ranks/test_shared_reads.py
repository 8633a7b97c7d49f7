"""Two ranks that hold the same bytes: a page comes over the network once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.hicache.host_pool import HostPool
from pdserve.kvpool.hicache.page_access import RankPages
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.pages import KV
from pdserve.security.tokens import Secret
from tests.support.kvpool import host_pool
from tests.support.kvpool.faulty import key
from tests.support.kvpool.host_pool import indices
from tests.support.kvpool.nodes import small_config, soon
from tests.support.kvpool.pools import ProcessPool, arena_dir, running_node
from tests.support.up.cluster import wait_until

STATES = "mamba"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    with running_node(small_config(arena_dir=arena_dir()), tmp_path_factory.mktemp("node")) as pool:
        yield pool


class Rank:
    """Host pools of KV, which all ranks hold alike, and of states, which are each rank's own."""

    def __init__(self, node: ProcessPool, number: int, group: str, namespace: str, **options: object) -> None:
        refs = [PoolNodeRef(node=node.config.name, address=node.address)]
        config = replace(PoolClientConfig(nodes=refs), **options)
        self.kv = host_pool.HostPool("page_first", shared=True)
        self.states = host_pool.HostPool("page_first", shared=True)
        pools = {
            KV: HostPool(self.kv, (b"",), is_replicated=True),
            STATES: HostPool(self.states, (b"tp%d" % number,)),
        }
        self.access = RankPages(config, namespace, {"test": "ranks"}, pools, ranks=group)

    def read(self, names: list[str], part: str = KV) -> list[bool]:
        """Into the first pages of the host pool, which are empty before."""
        pool = self.kv if part == KV else self.states
        pool.kv[:] = 0
        return self.access.get(part, names, indices(list(range(len(names)))))

    def close(self) -> None:
        self.access.close()
        for pool in (self.kv, self.states):
            pool.close()


class Ranks:
    """A leader, a follower, and a rank apart that writes. Names of pages are new for each test."""

    def __init__(self, node: ProcessPool, namespace: str, **options: object) -> None:
        self.node = node
        self.namespace = namespace
        self.group = f"ranks-{os.getpid()}-{next(_numbers)}"
        self.writer = Rank(node, 0, "", namespace, **{**options, "data_path": "shm"})
        self.leader = Rank(node, 0, self.group, namespace, **options)
        wait_until(lambda: self.sockets == 1, "the first rank leads")
        self.follower = Rank(node, 1, self.group, namespace, **options)
        wait_until(lambda: self.sockets == 2, "the second follows")
        wait_until(self.shares, "it has the leader's memory")

    @property
    def sockets(self) -> int:
        """The group's socket, and one for each follower."""
        return Path("/proc/net/unix").read_text().count(f"@pdserve-ranks-{self.group}\n")

    def store(self, count: int, part: str = KV) -> list[str]:
        """Random pages under new names, in the writer's first host pages."""
        names = [key(next(_numbers) + 10_000).hex() for _ in range(count)]
        pool = self.writer.kv if part == KV else self.writer.states
        pool.fill(list(range(count)), seed=next(_numbers))
        assert all(self.writer.access.put(part, names, indices(list(range(count)))))
        return names

    def are_right(self, rank: Rank, count: int) -> bool:
        pairs = ((self.writer.kv.segments(n), rank.kv.segments(n)) for n in range(count))
        return all(np.array_equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))

    @property
    def hits(self) -> int:
        """Pages that the node has given to readers."""
        with_status = self.node.connect()
        try:
            report = with_status.call(m.Status(1), soon())
        finally:
            with_status.close()
        assert isinstance(report, m.StatusReport)
        return sum(one.hits for one in report.namespaces if one.name == self.namespace)

    def cost(self, names: list[str], first: Rank, second: Rank) -> int:
        """The pages that the node gives when one rank reads after the other."""
        before = self.hits
        for rank in (first, second):
            assert rank.read(names) == [True] * len(names)
            assert self.are_right(rank, len(names))
        return self.hits - before

    def shares(self) -> bool:
        names = self.store(1)
        return self.cost(names, self.leader, self.follower) == 1

    def close(self) -> None:
        for rank in (self.writer, self.leader, self.follower):
            rank.close()


Make = Callable[..., Ranks]


@pytest.fixture
def ranks(node: ProcessPool, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Ranks] = []

    def make(data_path: DataPathChoice = "tcp", **options: object) -> Ranks:
        made.append(Ranks(node, request.node.name, data_path=data_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("page_key", ["", "of these workers"])
def test_two_ranks_take_a_page_from_another_host_once(ranks: Make, page_key: str) -> None:
    both = ranks(page_key=Secret(page_key))
    names = both.store(100)
    assert both.cost(names, both.leader, both.follower) == 100


def test_pages_of_one_rank_alone_are_read_by_it_alone(ranks: Make) -> None:
    both = ranks()
    names = both.store(3, STATES)
    assert both.follower.read(names, STATES) == [False] * 3  # other names than those of rank 0
    assert both.leader.read(names, STATES) == [True] * 3


def test_pages_of_this_hosts_memory_are_copied_from_it_by_each_rank(node: ProcessPool, ranks: Make) -> None:
    both = ranks()
    local = Rank(node, 1, both.group, both.namespace)
    try:
        wait_until(lambda: both.sockets == 3, "it follows too")
        names = both.store(10)
        assert both.cost(names, both.leader, local) == 20
    finally:
        local.close()


def test_pages_that_the_leader_has_given_away_are_read_from_the_pool(ranks: Make) -> None:
    both = ranks()
    names = both.store(20)
    before = both.hits
    assert both.leader.read(names) == [True] * 20
    both.leader.kv.fill(list(range(0, 20, 2)), seed=99)
    assert both.follower.read(names) == [True] * 20
    assert both.are_right(both.follower, 20)
    assert both.hits - before == 30


def test_another_rank_leads_after_the_leader_has_left(ranks: Make) -> None:
    both = ranks()
    both.leader.close()
    names = both.store(20)
    assert both.follower.read(names) == [True] * 20
    assert both.are_right(both.follower, 20)
    third = Rank(both.node, 1, both.group, both.namespace, data_path="tcp")
    orders = ((both.follower, third), (third, both.follower))
    wait_until(lambda: any(both.cost(both.store(5), *pair) == 5 for pair in orders), "one of them leads")
    third.close()
