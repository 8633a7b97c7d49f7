"""Nodes in this process behind doors, for tests of the threads' client, and pages that belong to keys."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from tests.support.kvpool.clients import config_of, doors_of
from tests.support.kvpool.door import DoorConnector
from tests.support.kvpool.node_model import KIB, key
from tests.support.waiting import until

PAGE_BYTES = 6 * KIB
SEGMENTS = (4 * KIB, 2 * KIB)


class Pool:
    """Some nodes behind doors, and clients of theirs. At its end these are closed, and it is checked."""

    def __init__(self, nodes: int = 3, **limits: float) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pdserve-doors-")
        self.doors = doors_of(Path(self._directory.name), nodes, **limits)
        self.nodes = [door.node for door in self.doors]
        self.connector = DoorConnector(self.doors)
        self._clients: list[PoolClient] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.close()
        try:
            if error[0] is None:
                self.check()
        finally:
            for door in self.doors:
                door.close()
            self._directory.cleanup()

    def config(self, **options: float) -> PoolClientConfig:
        return config_of(self.doors, **{"retry_after_s": 0.01, **options})

    def client(self, namespace: str = "ns", **options: Any) -> PoolClient:
        limit = {"connections": options.pop("connections")} if "connections" in options else {}
        config = self.config(**options)
        client = PoolClient(config, namespace, {}, connector=self.connector, **limit)
        self._clients.append(client)
        return client

    def check(self) -> None:
        """Every node's books are in order, and soon nothing is held."""
        for node in self.nodes:
            if not node.stopped:
                until(lambda node=node: node.held == (0, 0, 0))  # type: ignore[misc]
                node.check()


def keys(count: int) -> list[bytes]:
    return [key(n) for n in range(count)]


def page_of(page_key: bytes) -> list[Bytes1D]:
    """The bytes that belong to a key, in segments."""
    whole = np.frombuffer((page_key * (PAGE_BYTES // 32))[:PAGE_BYTES], np.uint8)
    return [whole[: SEGMENTS[0]], whole[SEGMENTS[0] :]]


def empty_page() -> list[Bytes1D]:
    return [np.zeros(size, np.uint8) for size in SEGMENTS]


def holds(page: Sequence[Bytes1D], page_key: bytes) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(page, page_of(page_key), strict=True))


def put(client: PoolClient, wanted: list[bytes]) -> list[bool]:
    return client.put(wanted, [page_of(one) for one in wanted])


def get(client: PoolClient, wanted: list[bytes]) -> list[bool]:
    """Which were read; fails when one that was has wrong bytes."""
    pages = [empty_page() for _ in wanted]
    found = client.get(wanted, pages)
    assert all(holds(page, k) for page, k, hit in zip(pages, wanted, found, strict=True) if hit)
    return found
