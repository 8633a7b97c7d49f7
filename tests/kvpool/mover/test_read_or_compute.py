"""Pages that come more slowly than they are computed are left in the pool."""

from __future__ import annotations

import pytest

from pdserve.kvpool.mover.chain_client import ChainClient
from pdserve.kvpool.mover.read_or_compute import TRY_EVERY_S, ReadOrCompute
from pdserve.pages import KV
from tests.support.kvpool.faulty import PAGE_BYTES, Pool, keys, put

PAGE_TOKENS = 64


def test_without_a_rate_pages_are_always_read() -> None:
    assert ReadOrCompute(0.0, PAGE_TOKENS).reads(1, 1e9, 0.0)


def test_pages_are_read_where_that_is_sooner_done() -> None:
    rule = ReadOrCompute(1000.0, 100)  # a page takes 0.1 s
    assert rule.reads(10, 1.0, 0.0)
    assert rule.reads(10, 0.0, 0.0), "the speed is unknown"


def test_a_slow_way_is_tried_again_after_a_while_only() -> None:
    rule = ReadOrCompute(1000.0, 100)
    slow = [rule.reads(10, 1.1, at_s) for at_s in (0.0, 1.0, TRY_EVERY_S - 0.1, TRY_EVERY_S, TRY_EVERY_S + 1)]
    assert slow == [True, False, False, True, False]


def test_pages_of_a_slow_node_are_counted_and_left() -> None:
    with Pool(nodes=1) as pool:
        client = pool.client(compute_tokens_s=64_000.0)  # a page takes 1 ms
        client.page_bytes = PAGE_BYTES
        names = keys(3)
        assert put(client, names) == [True] * 3
        chains = ChainClient(client, {KV: (b"",)}, PAGE_TOKENS)
        hashes = [name.hex() for name in names]
        assert chains.present(hashes) == [[True] * 3]
        (link,) = client._links.links.values()
        link.speed.learn(1 << 20, 3600.0)
        assert chains.present(hashes) == [[True] * 3], "the first time it is tried"
        assert chains.present(hashes) == [[False] * 3]
        assert client.counters.pages_left == 3
        for _ in range(200):
            link.speed.learn(1 << 30, 1e-3)
        assert chains.present(hashes) == [[True] * 3]


@pytest.mark.parametrize("page_tokens", [0, PAGE_TOKENS])
def test_pages_are_read_from_a_node_whose_speed_nobody_knows(page_tokens: int) -> None:
    with Pool(nodes=1) as pool:
        client = pool.client(compute_tokens_s=1e9)
        client.page_bytes = PAGE_BYTES
        names = keys(2)
        put(client, names)
        chains = ChainClient(client, {KV: (b"",)}, page_tokens)
        assert chains.present([name.hex() for name in names]) == [[True, True]]
