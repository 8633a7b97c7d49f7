"""The blocking pool client: it moves batches of pages to and from all nodes. Thread-safe. SGLang's storage
threads, LMCache's adapter, weights and exact turns use it.

A batch is divided by owner on the ring, and the parts run in parallel (batch.py). Missed keys are requested
again from other nodes (routing.py): from the earlier owner while pages move, from the new owner if a write
went to the wrong node.

Operations do not raise for faults of the pool. The keys of an absent, late or full node are misses (reads) or
unstored (writes), and are counted. Every call ends within its configured time-out, or at most
`restart_wait_s` later while a node is being upgraded (deadline.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from pdserve.errors import PageMismatch, PoolError
from pdserve.kvpool.client import operations
from pdserve.kvpool.client.batch import Batch, BatchRunner
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connection_pool import OpenConnection
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.operations import (
    FULL,
    MOVED,
    STORED,
    UNSTORED,
    ClientCounters,
    PagesRead,
    SharedReads,
    Tally,
    read_shared,
)
from pdserve.kvpool.client.routing import Rings, Search
from pdserve.kvpool.client.topology import CONNECTIONS, PoolLinks, SharedViews
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, PageBuffers
from pdserve.kvpool.protocol.page_tag import TAG_BYTES, PageTags
from pdserve.kvpool.transports.base import Connector
from pdserve.security.tokens import reveal

logger = logging.getLogger(__name__)
T = TypeVar("T")


class PoolClient:
    """One namespace of the pool, over all its nodes."""

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
        """Connects lazily. Raises ConfigError if the nodes form no valid ring.

        `connector` replaces the configured transport (for tests). `page_bytes`: nodes that can never hold
        pages of this size are refused; 0: unknown. `connections`: operations at a time on each node.
        """
        self.config = config
        self.namespace = namespace
        self.page_bytes = page_bytes
        self._tally = Tally()
        connector = connector or connector_for(config, name)
        key = reveal(config.page_key)
        self._tags = PageTags(key, namespace) if key else None
        if page_bytes and key:
            page_bytes += TAG_BYTES
        self._links = PoolLinks(
            config, namespace, geometry, connector, SharedViews(config), page_bytes, connections
        )
        self._runner = BatchRunner(self._links, self._tally, connections, nodes=len(config.nodes))

    @property
    def counters(self) -> ClientCounters:
        """The totals of this client."""
        return self._tally.counters

    # -- reading

    def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        """For each key: whether it is committed, at its owner or its earlier owner. `tenant`: whose pages
        are asked for, here and below; empty: those of nobody.
        """
        deadline = self._within(self.config.exists_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[bool]:
            return operations.exists(opened, [keys[i] for i in indices], deadline.at_s)

        batch = Batch(keys, [False] * len(keys), deadline, part, tenant=tenant)
        rings = self._links.rings
        self._runner.run(rings.split(keys), batch)
        self._search_on(batch, rings)
        return batch.result

    def get(
        self,
        keys: Sequence[bytes],
        pages: Sequence[PageBuffers],
        share: SharedReads | None = None,
        checksums: list[int] | None = None,
        tenant: str = "",
    ) -> list[bool]:
        """Read pages into the caller's buffers. True: the buffers hold the page, and its checksum is right;
        with a page key, its tag too.

        `pages`: for each key its segments, each uint8, shape [segment bytes]. Raises PageMismatch if the
        pages differ in their segments' lengths. The contents of the other buffers (False) are undefined.
        Nothing writes into the buffers after the return.
        `share`: other clients of this host that read the same pages. Those of nodes whose memory is mapped
        are read in any case: it is a copy too.
        `checksums`: one for each key; those of pages that were read are set to what their bytes were found to
        have, if they were checked, their writer made one, and no tag is among them.
        """
        page_bytes = check_pages(keys, pages)
        deadline = self._within(self.config.get_timeout_s)
        shared: set[int] = set()  # pages that came from another client of this host

        def part(opened: OpenConnection, indices: list[int]) -> list[bool]:
            chosen = [keys[i] for i in indices], [pages[i] for i in indices]
            read = self._read(opened, *chosen, deadline.at_s, share)
            shared.update(indices[place] for place in read.shared)
            if checksums is not None and self.config.checksum and self._tags is None:
                for index, proof in zip(indices, read.proofs, strict=True):
                    checksums[index] = proof.checksum if proof is not None else NO_CHECKSUM
            return read.found

        batch = Batch(keys, [False] * len(keys), deadline, part, page_bytes=page_bytes, tenant=tenant)
        rings = self._links.rings
        self._runner.run(rings.split(keys), batch)
        first_asked, searched = list(batch.asked), self._search_on(batch, rings)
        read = [i for i, found in enumerate(batch.result) if found]
        self._tally.add(
            pages_read=len(read),
            pages_shared=len(shared),
            pages_missed=len(keys) - len(read),
            pages_fallback=sum(first_asked[i] != batch.asked[i] for i in read) if searched else 0,
            bytes_read=(len(read) - len(shared)) * page_bytes,
        )
        return batch.result

    def raise_pages(self, keys: Sequence[bytes]) -> None:
        """Have those that only tiers have loaded into memory, the first ones first, as far as nodes do it
        ahead of reads. Does not wait for it; nothing rests on it.
        """
        deadline = self._within(self.config.exists_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[bool]:
            return operations.raise_pages(opened, [keys[i] for i in indices], deadline.at_s)

        jobs = self._reachable(self._links.rings.split(keys))
        for start in range(0, max(map(len, jobs.values()), default=0), m.MAX_KEPT_KEYS):
            some = {node: indices[start : start + m.MAX_KEPT_KEYS] for node, indices in jobs.items()}
            left = {node: indices for node, indices in some.items() if indices}
            self._runner.run(left, Batch(keys, [False] * len(keys), deadline, part))

    @property
    def is_near(self) -> bool:
        """Whether all nodes are of this host and their memory is mapped, as far as is known."""
        return all(link.is_mapped for link in self._links.links.values())

    # -- writing

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers], tenant: str = "") -> list[bool]:
        """Write pages. True: the page is in the pool, or another writer is writing it.

        `pages`: as for `get`. Raises PageMismatch. Nothing reads from the buffers after the return.
        """
        page_bytes = check_pages(keys, pages)
        deadline = self._within(self.config.put_timeout_s)

        def part(opened: OpenConnection, indices: list[int]) -> list[int]:
            chosen = [keys[i] for i in indices], [pages[i] for i in indices]
            stored = operations.write(opened, *chosen, deadline.at_s, self._tally, self._tags)
            if MOVED in stored:
                with opened.best_effort():
                    self._links.ask_view(opened, deadline.at_s)
            return stored

        unstored = [UNSTORED] * len(keys)
        batch = Batch(keys, unstored, deadline, part, False, page_bytes, tenant)
        self._runner.run(self._links.rings.split(keys), batch)
        if FULL in batch.result:
            # a node grants only so much at a time; what was granted to the other pieces is committed now
            full = [i for i, became in enumerate(batch.result) if became == FULL]
            again = self._links.rings.split([keys[i] for i in full])
            for node, indices in again.items():
                self._runner.run({node: [full[i] for i in indices]}, batch)
        if MOVED in batch.result:
            moved_to = {
                node: moved
                for node, indices in self._links.rings.split(keys).items()
                if (moved := [i for i in indices if batch.result[i] == MOVED and batch.asked[i] != node])
            }
            self._runner.run(moved_to, batch)
        if FULL in batch.result:
            self._tally.add(pages_refused=batch.result.count(FULL))
        return [became == STORED for became in batch.result]

    def clear(self) -> int:
        """Drop every page of the namespace on every reachable node. Returns their number."""
        timeout_s = max(operations.CLEAR_TIMEOUT_S, self.config.exists_timeout_s)
        return sum(self._each_node(operations.clear, timeout_s).values())

    def remove(self, keys: Sequence[bytes]) -> int:
        """Drop pages that nobody wants any more on every reachable node, copies too. Returns how many."""

        def part(opened: OpenConnection, deadline_s: float) -> int:
            return operations.remove(opened, keys, deadline_s)

        return sum(self._each_node(part, self.config.put_timeout_s).values())

    # -- the pool as a whole

    def check(self) -> dict[str, PoolError | None]:
        """Check that every node serves the namespace. Returns None or the error for each node."""
        outcome: dict[str, PoolError | None] = dict.fromkeys(self._links.links)
        self._each_node(operations.ping, self.config.connect_timeout_s, outcome)
        return outcome

    def status(self) -> dict[str, m.StatusReport]:
        """The status of every reachable node, by name."""
        return self._each_node(operations.status, self.config.exists_timeout_s)

    @property
    def rings(self) -> Rings:
        """The nodes as this client knows them now."""
        return self._links.rings

    @property
    def nodes_up(self) -> int:
        return sum(link.up for link in self._links.links.values())

    def close(self) -> None:
        """Close all connections. Idempotent. Operations in progress end with misses."""
        self._links.close()
        self._runner.close()

    # -- internals

    def _within(self, timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, self.config.restart_wait_s)

    def _read(
        self,
        opened: OpenConnection,
        keys: list[bytes],
        pages: list[PageBuffers],
        deadline_s: float,
        share: SharedReads | None,
    ) -> PagesRead:
        if share is None or opened.connection.is_mapped:
            return operations.read(opened, keys, pages, deadline_s, self._tally, self._tags)
        return read_shared(opened, keys, pages, deadline_s, self._tally, self._tags, share)

    def _search_on(self, batch: Batch[bool], rings: Rings) -> bool:
        """Look for keys that the nodes chosen by `rings` did not have, at other nodes (`Search`). Returns
        whether there were any.
        """
        search, searched = Search(batch.keys, rings), False
        while missed := [i for i, found in enumerate(batch.result) if not found]:
            others = self._reachable(search.further(missed, batch.asked, self._links.rings))
            if not others:
                break
            searched = True
            self._runner.run(others, batch)
        return searched

    def _reachable(self, jobs: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """`jobs` without nodes that are down: a second request is not worth a wait."""
        links = self._links.links
        return {node: indices for node, indices in jobs.items() if node in links and links[node].reachable}

    def _each_node(
        self,
        part: Callable[[OpenConnection, float], T],
        timeout_s: float,
        errors: dict[str, PoolError | None] | None = None,
    ) -> dict[str, T]:
        """Each node's answer, by name; nodes are asked side by side, within `timeout_s` in all.

        Failures are counted, or stored in `errors`.
        """
        answers: dict[str, T] = {}
        deadline = self._within(timeout_s)
        links = dict(self._links.links)

        def ask(name: str) -> None:
            try:
                answers[name] = links[name].use(deadline, lambda opened: part(opened, deadline.at_s))
            except PoolError as error:
                logger.debug("pool node %s: %s", name, error)
                if errors is None:
                    self._tally.add(failures=1)
                else:
                    errors[name] = error

        self._runner.each(list(links), ask)
        return {name: answers[name] for name in links if name in answers}


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
