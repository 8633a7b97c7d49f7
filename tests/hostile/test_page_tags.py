"""Someone who writes a node's memory, or into a namespace, without the workers' page key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.memory.placement import SLOT_ALIGN_BYTES
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_tag import TAG_BYTES
from pdserve.security.tokens import Secret
from tests.support.kvpool.faulty import PAGE_BYTES, empty_page, get, keys, page_of, put
from tests.support.kvpool.nodes import small_config
from tests.support.kvpool.pools import ProcessPool, arena_dir, running_node

PAGE_KEY = Secret("the workers' own page key")
OTHER_KEY = Secret("somebody else's page key")
Connect = Callable[..., PoolClient]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    config = small_config(arena_dir=arena_dir())
    with running_node(config, tmp_path_factory.mktemp("node")) as pool:
        yield pool


@pytest.fixture
def connect(node: ProcessPool, request: pytest.FixtureRequest) -> Iterator[Connect]:
    """A client of this test's namespace."""
    made: list[PoolClient] = []

    def client(page_key: Secret = PAGE_KEY, namespace: str = request.node.name, **options: Any) -> PoolClient:
        refs = [PoolNodeRef(node=node.config.name, address=node.address)]
        config = replace(PoolClientConfig(nodes=refs, page_key=page_key), **options)
        made.append(PoolClient(config, namespace[:60], {}, name="test"))
        return made[-1]

    yield client
    for one in made:
        one.close()


@pytest.mark.parametrize("data_path", ["shm", "tcp", "ucx"])
def test_tags_travel_on_every_data_path(connect: Connect, data_path: str) -> None:
    assert put(connect(data_path=data_path, connect_timeout_s=10.0), keys(20)) == [True] * 20
    assert get(connect(data_path=data_path, connect_timeout_s=10.0), keys(20)) == [True] * 20


def test_a_page_written_without_the_page_key_is_a_miss_and_no_fault_of_the_node(connect: Connect) -> None:
    """The writer's token may write the namespace; checksums and lengths are right."""
    wanted = keys(3)
    forger = connect(Secret(""))
    forged = [[*page_of(key), np.zeros(TAG_BYTES, np.uint8)] for key in wanted]
    assert forger.put(wanted, forged) == [True] * 3
    honest = connect()
    assert get(honest, wanted) == [False] * 3
    assert (honest.counters.pages_forged, honest.counters.pages_corrupt, honest.is_up) == (3, 0, True)
    assert put(honest, wanted) == [True] * 3  # they were dropped, so that the right ones have room
    assert get(honest, wanted) == [True] * 3


def test_a_page_with_the_tag_of_another_page_key_is_a_miss(connect: Connect) -> None:
    assert put(connect(OTHER_KEY), keys(3)) == [True] * 3
    assert get(connect(), keys(3)) == [False] * 3


def test_a_right_page_under_another_key_is_a_miss(connect: Connect) -> None:
    """A node, or who writes its index, cannot give one prompt's page for another's."""
    honest, forger = connect(), connect(Secret(""))
    one, other = keys(2)
    assert put(honest, [one]) == [True]
    copy = [np.zeros(PAGE_BYTES + TAG_BYTES, np.uint8)]
    assert forger.get([one], [copy]) == [True]
    assert forger.put([other], [copy]) == [True]
    assert get(honest, [one, other]) == [True, False]


def test_bytes_changed_in_the_arena_are_a_miss_whatever_their_checksum(
    connect: Connect, node: ProcessPool
) -> None:
    """XXH3 has no key: other bytes of the same checksum can be computed. Here checksums are off."""
    honest, plain = connect(checksum=False), connect(Secret(""), checksum=False)
    one, other = keys(2)
    assert put(honest, [one]) == [True]
    assert put(plain, [other]) == [True]
    arena = np.memmap(node.arena_path, np.uint8, "r+")
    pages = arena.reshape(-1, SLOT_ALIGN_BYTES)
    begin = [page[:KEY_BYTES].tobytes() in (one, other) for page in pages]
    assert sum(begin) >= 2
    pages[begin, 40] ^= 1
    assert plain.get([other], [empty_page()]) == [True]  # without a page key wrong bytes are believed
    assert honest.get([one], [empty_page()]) == [False]
    assert honest.counters.pages_forged == 1
