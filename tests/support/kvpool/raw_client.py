"""A client of one transport that does one step at a time, for the contract of transports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.pools import KIB, ProcessPool
from tests.support.waiting import soon

R = TypeVar("R")


LAYERS = 28


PAGE_BYTES = 2 * LAYERS * 4 * KIB
LAYOUTS = [[PAGE_BYTES], [PAGE_BYTES // 2] * 2, [PAGE_BYTES // (2 * LAYERS)] * (2 * LAYERS)]


_ids = itertools.count(1)


TIMEOUT_S = 10.0


def keys(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng([seed, next(_ids)])
    return [rng.bytes(32) for _ in range(count)]


def pages_of(layout: list[int], count: int, seed: int | None = None) -> list[PageBuffers]:
    """Random pages, or empty ones without a seed; each segment lies apart from the others."""
    rng = np.random.default_rng(seed)
    pages: list[PageBuffers] = []
    for _ in range(count):
        page: list[Bytes1D] = []
        for size in layout:
            block = np.full(size + 64, 0xEE, np.uint8)
            if seed is not None:
                block[32:-32] = np.frombuffer(rng.bytes(size), np.uint8)
            page.append(block[32:-32])
        pages.append(page)
    return pages


def same(a: PageBuffers, b: PageBuffers) -> bool:
    return np.array_equal(np.concatenate(list(a)), np.concatenate(list(b)))


class Client:
    """A connection with a namespace, and the steps of a put and a get."""

    def __init__(self, connection: Connection, name: str, layout: list[int] | None = None) -> None:
        self.connection = connection
        self.layout = layout or LAYOUTS[1]
        self.namespace = self.ask(m.OpenNamespace(next(_ids), name, {"layout": "test"}), m.Opened).namespace

    def ask(self, request: m.Request, kind: type[R], timeout_s: float = TIMEOUT_S) -> R:
        reply = self.connection.call(request, soon(timeout_s))
        assert isinstance(reply, kind), reply
        return reply

    def reserve(self, names: list[bytes]) -> list[m.Grant]:
        return self.ask(m.Reserve(next(_ids), self.namespace, names, self.layout), m.Reserved).grants

    def commit(self, grants: list[m.Grant], checksums: list[int]) -> list[int]:
        slots, sequences = [grant.slot for grant in grants], [grant.sequence for grant in grants]
        return list(self.ask(m.Commit(next(_ids), slots, sequences, checksums), m.Committed).mask)

    def put(self, names: list[bytes], pages: list[PageBuffers]) -> list[m.Grant]:
        grants = self.reserve(names)
        assert [grant.status for grant in grants] == [m.GRANTED] * len(names)
        checksums = self.connection.write_pages(grants, pages, soon())
        assert self.commit(grants, checksums) == [1] * len(names)
        return grants

    def pin(self, names: list[bytes]) -> list[m.Pin]:
        return self.ask(m.Get(next(_ids), self.namespace, names, self.layout), m.Got).pins

    def release(self, pins: list[m.Pin]) -> None:
        self.connection.post(m.Release([pin.slot for pin in pins], [pin.sequence for pin in pins]))

    def abort(self, grants: list[m.Grant]) -> None:
        self.connection.post(m.Abort([grant.slot for grant in grants], [grant.sequence for grant in grants]))

    def get(self, names: list[bytes]) -> tuple[list[int], list[PageBuffers]]:
        """Outcome (or -1 for a miss) and bytes of each page."""
        pins = self.pin(names)
        pages = pages_of(self.layout, len(names))
        held = [i for i, pin in enumerate(pins) if pin.status == m.HIT]
        read = self.connection.read_pages([pins[i] for i in held], [pages[i] for i in held], soon())
        self.release([pins[i] for i in held])
        outcomes = [-1] * len(names)
        for i, outcome in zip(held, read, strict=True):
            outcomes[i] = outcome
        return outcomes, pages

    def exists(self, names: list[bytes]) -> list[int]:
        return list(self.ask(m.Exists(next(_ids), self.namespace, names), m.Present).mask)

    def status(self) -> m.StatusReport:
        return self.ask(m.Status(next(_ids)), m.StatusReport)


@contextmanager
def client(
    pool: ProcessPool, name: str, *, layout: list[int] | None = None, checksum: bool = True
) -> Iterator[Client]:
    connection = pool.connect(checksum=checksum)
    try:
        yield Client(connection, name, layout)
    finally:
        connection.close()
        connection.close()  # idempotent


# HiCache's page layouts: one block; K and V (page_first_direct); K and V of each layer (layer_first)
