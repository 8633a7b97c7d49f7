"""Clients of a real pool that changes under them: a node joins, another is drained, one is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from pdserve.kvpool.admin.node_client import ask
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol.cluster_messages import Drain
from pdserve.kvpool.protocol.messages import Done
from tests.support.kvpool.clustered import Processes
from tests.support.kvpool.faulty import keys
from tests.support.kvpool.pools import KIB

PAGE_BYTES = 16 * KIB
COUNT = 200
SOON_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # between looks at other processes' work


def page_of(key: bytes) -> list[np.ndarray]:
    return [np.frombuffer(key * (PAGE_BYTES // 32), np.uint8)]


class Reader(threading.Thread):
    """Reads all pages again and again."""

    def __init__(self, client: PoolClient) -> None:
        super().__init__()
        self.client = client
        self.rounds = self.missed = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        wanted = keys(COUNT)
        while not self.stopping.is_set():
            pages = [[np.zeros(PAGE_BYTES, np.uint8)] for _ in wanted]
            found = self.client.get(wanted, pages)
            self.missed += found.count(False)
            for key, hit, page in zip(wanted, found, pages, strict=True):
                assert not hit or np.array_equal(page[0], page_of(key)[0])
            self.rounds += 1

    def progress(self) -> None:
        before = self.rounds
        until(lambda: self.rounds >= before + 3)


def test_a_client_of_one_node_misses_nothing_while_others_join_and_drain_and_goes_on_by_the_next(
    processes: Processes,
) -> None:
    processes.start("a", "b")
    processes.until("ab")
    refs = [PoolNodeRef(node=name, address=processes.nodes[name].address) for name in "ab"]
    config = PoolClientConfig(nodes=refs, get_timeout_s=SOON_S, put_timeout_s=SOON_S, exists_timeout_s=10.0)
    client = PoolClient(config, "ns", {"page_size": "64"})
    assert client.put(keys(COUNT), [page_of(key) for key in keys(COUNT)]) == [True] * COUNT
    reader = Reader(client)
    reader.start()
    try:
        reader.progress()
        processes.start("c")
        processes.until("abc")
        reader.progress()
        ask(processes.nodes["a"].address, Drain, Done)  # the node that is asked
        processes.until("bc", at="bc")
        reader.progress()
        assert reader.missed == 0
        processes.nodes["a"].kill()
        reader.progress()
        missed = reader.missed
        assert missed <= 2 * COUNT  # until it was known
        reader.progress()
        assert reader.missed == missed
        processes.nodes["c"].kill()
        processes.until("b", at="b")
        assert client.put(keys(COUNT), [page_of(key) for key in keys(COUNT)]) == [True] * COUNT
    finally:
        reader.stopping.set()
        reader.join(SOON_S)
    assert client.exists(keys(COUNT)) == [True] * COUNT
    client.close()
