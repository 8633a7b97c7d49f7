"""The blocking pool client: it moves batches of pages to and from the pool, by way of one node. Thread-safe.
SGLang's storage threads, LMCache's adapter, weights and exact turns use it.

The node is the one of this host, where there is one (doors.py). It has the whole pool to give: the client
knows nothing of who owns a page.

Operations do not raise for faults of the pool. The keys of an absent, late or full node are misses (reads) or
unstored (writes), and are counted. Every call ends within its configured time-out, or at most
`restart_wait_s` later while the node is being upgraded (deadline.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, TypeVar

from pdserve.errors import PageMismatch, PoolError, PoolUnavailable
from pdserve.kvpool.client import operations
from pdserve.kvpool.client.batch import Batch, BatchRunner
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.client.connection_pool import NodeLink, OpenConnection
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.doors import Doors
from pdserve.kvpool.client.operations import FULL, STORED, UNSTORED, ClientCounters, Tally
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, PageBuffers
from pdserve.kvpool.protocol.page_tag import TAG_BYTES, PageTags
from pdserve.kvpool.transports.base import Connection, Connector
from pdserve.security.tokens import reveal

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTIONS: Final = 4
"""Operations of one client at a time."""


class PoolClient:
    """One namespace of the pool."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: dict[str, str],
        *,
        connector: Connector | None = None,
        name: str = "client",
        page_bytes: int = 0,
        connections: int = CONNECTIONS,
    ) -> None:
        """Connects lazily. Raises ConfigError.

        `connector` replaces the configured transport (for tests). `page_bytes`: a node that can never hold
        pages of this size is refused; 0: unknown. `connections`: operations at a time.
        """
        self.config = config
        self.namespace = namespace
        self.page_bytes = page_bytes
        self._tally = Tally()
        key = reveal(config.page_key)
        self._tags = PageTags(key, namespace) if key else None
        if page_bytes and key:
            page_bytes += TAG_BYTES
        self._connector = connector or connector_for(config, name)

        def link(ref: PoolNodeRef) -> NodeLink:
            return NodeLink(
                ref.node,
                lambda deadline_s: self._connect(ref.address, deadline_s),
                namespace=namespace,
                geometry=geometry,
                page_bytes=page_bytes,
                limit=connections,
                connect_timeout_s=config.connect_timeout_s,
                retry_after_s=config.retry_after_s,
                restart_wait_s=config.restart_wait_s,
            )

        self._doors = Doors(config.nodes, link)
        self._runner = BatchRunner(self._tally, connections)

    @property
    def counters(self) -> ClientCounters:
        """The totals of this client."""
        return self._tally.counters

    # -- reading

    def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        """For each key: whether it is committed, at any node. `tenant`: whose pages are asked for, here and
        below; empty: those of nobody.
        """
        deadline = self._within(self.config.exists_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[bool]:
            return operations.exists(opened, [keys[i] for i in indices], deadline.at_s)

        batch = Batch(keys, [False] * len(keys), deadline, part, tenant=tenant)
        self._run(batch, range(len(keys)))
        return batch.result

    def get(
        self,
        keys: Sequence[bytes],
        pages: Sequence[PageBuffers],
        checksums: list[int] | None = None,
        tenant: str = "",
    ) -> list[bool]:
        """Read pages into the caller's buffers. True: the buffers hold the page, and its checksum is right;
        with a page key, its tag too.

        `pages`: for each key its segments, each uint8, shape [segment bytes]. Raises PageMismatch if the
        pages differ in their segments' lengths. The contents of the other buffers (False) are undefined.
        Nothing writes into the buffers after the return.
        `checksums`: one for each key; those of pages that were read are set to what their bytes were found to
        have, if they were checked, their writer made one, and no tag is among them.
        """
        page_bytes = check_pages(keys, pages)
        deadline = self._within(self.config.get_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[bool]:
            chosen = [keys[i] for i in indices], [pages[i] for i in indices]
            read = operations.read(opened, *chosen, deadline.at_s, self._tally, self._tags)
            if checksums is not None and self.config.checksum and self._tags is None:
                for index, checksum in zip(indices, read, strict=True):
                    checksums[index] = checksum or NO_CHECKSUM
            return [checksum is not None for checksum in read]

        batch = Batch(keys, [False] * len(keys), deadline, part, page_bytes=page_bytes, tenant=tenant)
        self._run(batch, range(len(keys)))
        read = sum(batch.result)
        self._tally.add(pages_read=read, pages_missed=len(keys) - read, bytes_read=read * page_bytes)
        return batch.result

    def raise_pages(self, keys: Sequence[bytes]) -> None:
        """Have those that only tiers have loaded into memory, the first ones first, as far as nodes do it
        ahead of reads. Does not wait for it; nothing rests on it.
        """
        deadline = self._within(self.config.exists_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[bool]:
            return operations.raise_pages(opened, [keys[i] for i in indices], deadline.at_s)

        batch = Batch(keys, [False] * len(keys), deadline, part)
        for start in range(0, len(keys), m.MAX_KEPT_KEYS):
            self._run(batch, range(start, min(len(keys), start + m.MAX_KEPT_KEYS)))

    @property
    def is_near(self) -> bool:
        """Whether the node is of this host and its memory is mapped, as far as is known."""
        return bool(self._doors.links) and self._doors.chosen.is_mapped

    # -- writing

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers], tenant: str = "") -> list[bool]:
        """Write pages. True: the page is in the pool, or another writer is writing it.

        `pages`: as for `get`. Raises PageMismatch. Nothing reads from the buffers after the return.
        """
        page_bytes = check_pages(keys, pages)
        deadline = self._within(self.config.put_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[int]:
            chosen = [keys[i] for i in indices], [pages[i] for i in indices]
            return operations.write(opened, *chosen, deadline.at_s, self._tally, self._tags)

        batch = Batch(keys, [UNSTORED] * len(keys), deadline, part, False, page_bytes, tenant)
        self._run(batch, range(len(keys)))
        # a node grants only so much at a time; what was granted to the other chunks is committed now
        if full := [i for i, became in enumerate(batch.result) if became == FULL]:
            self._run(batch, full)
        self._tally.add(pages_refused=batch.result.count(FULL))
        return [became == STORED for became in batch.result]

    def clear(self) -> int:
        """Drop every page of the namespace on every node. Returns their number; 0 where that failed."""
        timeout_s = max(operations.CLEAR_TIMEOUT_S, self.config.exists_timeout_s)
        return self._ask(operations.clear, timeout_s) or 0

    def remove(self, keys: Sequence[bytes]) -> int:
        """Drop pages that nobody wants any more on every node, copies too. Returns how many, copies
        included.
        """

        def part(opened: OpenConnection, deadline_s: float) -> int:
            return operations.remove(opened, keys, deadline_s)

        return self._ask(part, self.config.put_timeout_s) or 0

    # -- the node

    def check(self) -> dict[str, PoolError | None]:
        """Whether the node that is asked serves the namespace: None or the error, by its name."""
        if not self._doors.links:
            return {}
        try:
            return {self._use(operations.ping, self.config.connect_timeout_s): None}
        except PoolError as error:
            return {self._doors.chosen.name: error}

    def status(self) -> dict[str, m.StatusReport]:
        """The status of the node that is asked, by its name; empty if it cannot be reached."""
        report = self._ask(operations.status, self.config.exists_timeout_s)
        return {report.node: report} if report is not None else {}

    @property
    def is_up(self) -> bool:
        """Whether there is a node that can be asked, as far as is known."""
        return any(link.up for link in self._doors)

    def close(self) -> None:
        """Close all connections. Idempotent. Operations in progress end with misses."""
        self._doors.close()
        self._runner.close()

    # -- internals

    def _within(self, timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, self.config.restart_wait_s)

    def _connect(self, address: str, deadline_s: float) -> Connection:
        connection = self._connector.connect(address, deadline_s)
        self._doors.learn(connection.welcome.nodes)
        return connection

    def _run(self, batch: Batch[T], indices: Sequence[int]) -> None:
        """With the nearest node, and what that failed to do with the next one, if time is left."""
        if not indices or not self._doors.links:
            return
        link, before = self._doors.chosen, batch.result.copy()
        self._runner.run(link, indices, batch)
        if (other := self._doors.after(link)) is not None:
            self._runner.run(other, [i for i in indices if batch.result[i] == before[i]], batch)

    def _use(self, part: Callable[[OpenConnection, float], T], timeout_s: float) -> T:
        """The answer of the nearest node, or if that fails at once of the next one. Raises PoolError."""
        link, deadline = self._doors.chosen, self._within(timeout_s)
        try:
            return link.use(deadline, lambda opened: part(opened, deadline.at_s))
        except PoolUnavailable:
            if (other := self._doors.after(link)) is None:
                raise
        return other.use(deadline, lambda opened: part(opened, deadline.at_s))

    def _ask(self, part: Callable[[OpenConnection, float], T], timeout_s: float) -> T | None:
        """As `_use`; None, counted, where there is no answer."""
        try:
            return self._use(part, timeout_s)
        except PoolUnavailable as error:
            logger.debug("%s", error)
        except PoolError as error:
            logger.warning("%s", error)
        self._tally.add(failures=1)
        return None


def check_pages(keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> int:
    """The length of each page in bytes, 0 without any. Raises PageMismatch: they are not all cut alike. A
    node grants all pages of a request slots of one size, so a longer page would overwrite another's.
    """
    if len(keys) != len(pages):
        raise PageMismatch(f"{len(keys)} keys, but buffers of {len(pages)} pages")
    if not pages:
        return 0
    first = list(map(len, pages[0]))
    if set(map(len, pages)) != {len(first)} or list(map(len, chain.from_iterable(pages))) != first * len(
        pages
    ):
        other = next(sizes for page in pages if (sizes := list(map(len, page))) != first)
        raise PageMismatch(f"pages of one call have segments of {first} and of {other} bytes")
    return sum(first)
