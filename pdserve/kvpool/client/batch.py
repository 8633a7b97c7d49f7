"""A batch of keys, divided into chunks for nodes and threads. A node gets one or more chunks.

The calling thread takes the first chunk itself, and then each chunk that no other thread has begun. So a
batch makes progress without any other thread, and a small batch for one node needs no thread switch.

Pages to move are divided by bytes, and each chunk is committed by itself. So pages are visible early, a node
grants little at a time, and a deadline costs the chunks that are left, not the batch. Late in its time, a
batch begins no chunk that would not be done by the deadline at the speed seen so far: a time-out in the
middle would count against the node.

Chunks of memory that is mapped here are copied by few threads (COPY_THREADS): one moves 8 GB/s, and more take
cores from the engine. Others wait for their nodes side by side, over a few streams to each (STREAMS).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

from pdserve.errors import PoolError
from pdserve.kvpool.client.connection_pool import NodeLink, OpenConnection
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.operations import Tally
from pdserve.kvpool.client.topology import PoolLinks
from pdserve.kvpool.protocol.messages import MAX_BATCH_BYTES, MAX_KEYS, MAX_PAGES

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHUNK_BYTES: Final = MAX_BATCH_BYTES
"""Of pages to move: as much as one message allows, some milliseconds of copying. Shorter ones only cost more
messages: one stream, or one copying thread, keeps a core busy.
"""
COPIED_BYTES: Final = 4 * CHUNK_BYTES
"""Of pages that are copied here. A chunk takes the interpreter two or three times, and each costs up to a
switch interval beside a busy scheduler; so a batch is one chunk where one thread copies.
"""
COPY_THREADS: Final = min(4, max(1, len(os.sched_getaffinity(0)) // 4))
"""Of one client at a time, the calling one among them."""
STREAMS: Final = min(4, max(1, len(os.sched_getaffinity(0)) // 2))
"""To one node at a time whose memory is not mapped: each keeps a core busy at both ends."""


@dataclass
class Batch(Generic[T]):
    """Keys and their results. `part` processes the keys at some indices, over one connection."""

    keys: Sequence[bytes]
    result: list[T]
    deadline: Deadline
    part: Callable[[OpenConnection, list[int]], list[T]]
    repeatable: bool = True  # a chunk may be repeated after the node has answered part of it
    page_bytes: int = 0  # size of a page to move; 0: a question
    tenant: str = ""  # whose pages they are
    asked: list[str] = field(init=False)
    """For each key, the node that was asked last."""

    def __post_init__(self) -> None:
        self.asked = [""] * len(self.keys)
        self._half_s = (time.monotonic() + self.deadline.at_s) / 2

    def is_worth_a_try(self, link: NodeLink, size_bytes: int) -> bool:
        """Whether a chunk may be begun now. In the first half of the time it always may: the node may have
        become faster.
        """
        now_s = time.monotonic()
        return now_s < self._half_s or link.speed.allows(size_bytes, self.deadline.at_s - now_s)

    def divide(self, indices: list[int], *, is_mapped: bool = False) -> list[list[int]]:
        """The chunks for one node, alike in length and in the order of the keys. `is_mapped`: the node's
        memory is mapped here.
        """
        chunks = -(-len(indices) // MAX_KEYS)
        if self.page_bytes:
            chunks = -(-len(indices) // max(1, min(MAX_PAGES, CHUNK_BYTES // self.page_bytes)))
            if is_mapped:
                most = max(1, min(MAX_PAGES, COPIED_BYTES // self.page_bytes))
                chunks = max(-(-len(indices) // most), min(COPY_THREADS, chunks))
        return [indices[len(indices) * i // chunks : len(indices) * (i + 1) // chunks] for i in range(chunks)]


class BatchRunner:
    """The threads of one client. Thread-safe."""

    def __init__(self, links: PoolLinks, tally: Tally, connections: int, nodes: int) -> None:
        self._links = links
        self._tally = tally
        self._connections = connections
        self._lock = threading.Lock()
        self._closed = False
        self._nodes = 0  # number of nodes for which there are threads
        self._threads = self._make_threads(nodes)

    def run(self, jobs: Mapping[str, list[int]], batch: Batch[T]) -> None:
        """Call `batch.part` for each node and message, with the indices of its keys.

        If a node fails, the `result` of its keys stays unchanged.
        """
        links = self._links.links
        mapped = {node for node in jobs if batch.page_bytes and node in links and links[node].is_mapped}
        parts = [
            (node, chunk)
            for node, indices in jobs.items()
            for chunk in batch.divide(indices, is_mapped=node in mapped)
        ]
        if len(parts) == 1:
            self._do(*parts[0], batch)
            return
        chunks = Counter(node for node, _ in parts)
        copied = sum(chunks[node] for node in mapped)
        streams = sum(min(STREAMS, chunks[node]) for node in jobs if node not in mapped)
        helpers = streams + min(copied, COPY_THREADS) - 1
        self._run_all([_Chunk(partial(self._do, node, indices, batch)) for node, indices in parts], helpers)

    def each(self, nodes: Sequence[str], work: Callable[[str], None]) -> None:
        """Call `work` for each node, side by side where there are threads. Its steps have deadlines."""
        if nodes:
            self._run_all([_Chunk(partial(work, node)) for node in nodes], len(nodes) - 1)

    def _run_all(self, chunks: list[_Chunk], helpers: int) -> None:
        """`helpers`: threads beside the calling one, as far as there are any."""
        # Every step of a chunk has the deadline, so joining needs none. All chunks are joined on every path,
        # because one may be writing into the caller's buffers.
        for _ in range(helpers):
            self._submit(partial(_run_in_turn, chunks))
        try:
            for chunk in chunks:
                chunk.run()
        finally:
            for chunk in chunks:
                chunk.join()
        for chunk in chunks:
            chunk.outcome.result()

    def close(self) -> None:
        """Close the threads. Batches in progress end with refused operations."""
        self._closed = True
        self._threads.shutdown(wait=False)  # not `cancel_futures`: `wait_all` would wait for them forever

    def _do(self, node: str, indices: list[int], batch: Batch[T]) -> None:
        for index in indices:
            batch.asked[index] = node
        try:
            link = self._links.link(node)
            size_bytes = batch.page_bytes * len(indices)
            if not batch.is_worth_a_try(link, size_bytes):
                logger.debug("pool node %s: no time is left for %d bytes", node, size_bytes)
                return
            with link.busy(size_bytes):
                answers = link.use(
                    batch.deadline,
                    lambda opened: batch.part(opened, indices),
                    repeatable=batch.repeatable,
                    tenant=batch.tenant,
                )
        except PoolError as error:
            logger.debug("pool node %s: %s", node, error)
            self._tally.add(failures=1)
            return
        for index, answer in zip(indices, answers, strict=True):
            batch.result[index] = answer

    def _submit(self, work: Callable[[], None]) -> None:
        """Give the work to a thread, if possible."""
        if len(self._links.links) > self._nodes:
            self._add_threads()
        while True:
            threads = self._threads
            try:
                threads.submit(work)
                return
            except RuntimeError:  # no thread can be started, or the process ends; the work may be queued
                if threads is self._threads:
                    return

    def _make_threads(self, nodes: int) -> ThreadPoolExecutor:
        self._nodes = nodes
        workers = max(1, nodes * self._connections)
        return ThreadPoolExecutor(workers, thread_name_prefix="pdserve-pool")

    def _add_threads(self) -> None:
        """Make a larger executor after the pool has grown. The old one finishes its work."""
        with self._lock:
            nodes = len(self._links.links)
            if nodes > self._nodes and not self._closed:
                old, self._threads = self._threads, self._make_threads(nodes)
                old.shutdown(wait=False)


def _run_in_turn(chunks: Sequence[_Chunk]) -> None:
    for chunk in chunks:
        chunk.run()


class _Chunk:
    """A part of a batch. The first thread to take it runs it; after it was joined, no thread does."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.outcome: Future[None] = Future()
        self._work = work
        self._taken = threading.Lock()

    def run(self) -> None:
        if not self._taken.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self.outcome.set_exception(error)
            raise
        self.outcome.set_result(None)

    def join(self) -> None:
        if self._taken.acquire(blocking=False):
            self.outcome.set_result(None)
        wait_all([self.outcome])
