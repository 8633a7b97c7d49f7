"""Nodes in this process behind connections whose every step can be made to fail. For tests of the client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.protocol.messages import Abort, Grant, Pin, Release, Reply, Request, Welcome
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.slot_table import TableLayout
from pdserve.kvpool.transports.base import Connection, PageOutcome
from tests.support.kvpool.inproc import InprocConnector, InprocNode

KIB = 1024
PAGE_BYTES = 6 * KIB
SEGMENTS = (4 * KIB, 2 * KIB)


class FaultyConnector:
    """`before(node, step)` is called before every step: connect, call, post, read_pages, write_pages. What it
    raises, the step raises. `answer(node, request)` may answer in the node's place.
    """

    def __init__(self, nodes: Sequence[InprocNode]) -> None:
        self._inner = InprocConnector(nodes)
        self.before: Callable[[str, str], None] = lambda node, step: None
        self.answer: Callable[[str, Request], Reply | None] = lambda node, request: None

    def connect(self, address: str, deadline: float) -> Connection:
        self.before(address.removeprefix("inproc:"), "connect")
        return FaultyConnection(self._inner.connect(address, deadline), self)


class FaultyConnection:
    def __init__(self, inner: Connection, owner: FaultyConnector) -> None:
        self.welcome: Welcome = inner.welcome
        self.is_mapped = inner.is_mapped
        self._inner = inner
        self._owner = owner

    def call(self, request: Request, deadline: float) -> Reply:
        self._owner.before(self.welcome.node, "call")
        return self._owner.answer(self.welcome.node, request) or self._inner.call(request, deadline)

    def call_all(self, requests: Sequence[Request], deadline: float) -> list[Reply]:
        return [self.call(request, deadline) for request in requests]

    def post(self, message: Abort | Release) -> None:
        self._owner.before(self.welcome.node, "post")
        self._inner.post(message)

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline: float
    ) -> list[int]:
        self._owner.before(self.welcome.node, "write_pages")
        return self._inner.write_pages(grants, pages, deadline)

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline: float
    ) -> list[PageOutcome]:
        self._owner.before(self.welcome.node, "read_pages")
        return self._inner.read_pages(pins, pages, deadline)

    def close(self) -> None:
        self._inner.close()


class Pool:
    """Some nodes, and clients of theirs. At its end these are closed, and it is checked."""

    def __init__(self, nodes: int = 3, **limits: float) -> None:
        layout = TableLayout(1024 * KIB, 64 * KIB, 4 * KIB)
        self.nodes = [InprocNode(f"n{i}", layout, Limits(**limits)) for i in range(nodes)]  # type: ignore[arg-type]
        self.connector = FaultyConnector(self.nodes)
        self._clients: list[PoolClient] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.close()
        if error[0] is None:
            self.check()

    def config(self, **options: float) -> PoolClientConfig:
        refs = [PoolNodeRef(node=node.name, address=f"inproc:{node.name}") for node in self.nodes]
        return PoolClientConfig(nodes=refs, **{"retry_after_s": 0.01, **options})  # type: ignore[arg-type]

    def client(self, namespace: str = "ns", **options: Any) -> PoolClient:
        limit = {"connections": options.pop("connections")} if "connections" in options else {}
        config = self.config(**options)
        client = PoolClient(config, namespace, {}, connector=self.connector, **limit)
        self._clients.append(client)
        return client

    def check(self) -> None:
        """Every node's books are in order and nothing is held."""
        for node in self.nodes:
            if not node.stopped:
                node.state.check()
                status = node.state.status(0, 0.0)
                assert (status.pins, status.reserved_bytes, status.waiters) == (0, 0, 0)


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


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
