"""A batch of keys, divided into chunks for messages and threads.

The calling thread takes the first chunk itself, and then each chunk that no other thread has begun. So a
batch makes progress without any other thread, and a small batch needs no thread switch.

Pages to move are divided by bytes, and each chunk is committed by itself. So pages are visible early, a node
grants little at a time, and a deadline costs the chunks that are left, not the batch. Late in its time, a
batch begins no chunk that would not be done by the deadline at the speed seen so far: a time-out in the
middle would count against the node.

Chunks of memory that is mapped here are copied by few threads (COPY_THREADS): one moves 8 GB/s, and more take
cores from the engine. Others wait for the node side by side, over a few streams (STREAMS).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from pdserve.errors import PoolError
from pdserve.kvpool.client.connection_pool import NodeLink, OpenConnection
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.operations import Tally
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
"""To a node at a time whose memory is not mapped: each keeps a core busy at both ends."""


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

    def __post_init__(self) -> None:
        self._half_s = (time.monotonic() + self.deadline.at_s) / 2

    def is_worth_a_try(self, link: NodeLink, size_bytes: int) -> bool:
        """Whether a chunk may be begun now. In the first half of the time it always may: the node may have
        become faster.
        """
        now_s = time.monotonic()
        return now_s < self._half_s or link.speed.allows(size_bytes, self.deadline.at_s - now_s)

    def divide(self, indices: Sequence[int], *, is_mapped: bool = False) -> list[list[int]]:
        """The chunks, alike in length and in the order of the keys. `is_mapped`: the node's memory is mapped
        here.
        """
        if len(indices) <= MAX_PAGES and len(indices) * self.page_bytes <= CHUNK_BYTES:
            return [list(indices)]
        chunks = -(-len(indices) // MAX_KEYS)
        if self.page_bytes:
            chunks = -(-len(indices) // max(1, min(MAX_PAGES, CHUNK_BYTES // self.page_bytes)))
            if is_mapped:
                most = max(1, min(MAX_PAGES, COPIED_BYTES // self.page_bytes))
                chunks = max(-(-len(indices) // most), min(COPY_THREADS, chunks))
        ends = [len(indices) * i // chunks for i in range(chunks + 1)]
        return [list(indices[start:end]) for start, end in itertools.pairwise(ends)]


class BatchRunner:
    """The threads of one client. Thread-safe."""

    def __init__(self, tally: Tally, connections: int) -> None:
        self._tally = tally
        self._threads = ThreadPoolExecutor(connections, thread_name_prefix="pdserve-pool")

    def run(self, link: NodeLink, indices: Sequence[int], batch: Batch[T]) -> None:
        """Call `batch.part` for each message, with the indices of its keys. If the node fails, the `result`
        of its keys stays unchanged.
        """
        is_copied = batch.page_bytes > 0 and link.is_mapped
        parts = batch.divide(indices, is_mapped=is_copied)
        if len(parts) == 1:
            _do(link, parts[0], batch, self._tally)
            return
        chunks = [_Chunk(partial(_do, link, part, batch, self._tally)) for part in parts]
        beside = COPY_THREADS if is_copied else STREAMS
        # Every step of a chunk has the deadline, so joining needs none. All chunks are joined on every path,
        # because one may be writing into the caller's buffers.
        for _ in range(min(len(chunks), beside) - 1):
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
        self._threads.shutdown(wait=False)  # not `cancel_futures`: `wait_all` would wait for them forever

    def _submit(self, work: Callable[[], None]) -> None:
        """Give the work to a thread, if possible: none can be started as the process ends, for example."""
        try:
            self._threads.submit(work)
        except RuntimeError as error:
            logger.debug("a batch is done by its caller alone: %s", error)


def _do(link: NodeLink, indices: list[int], batch: Batch[T], tally: Tally) -> None:
    try:
        size_bytes = batch.page_bytes * len(indices)
        if not batch.is_worth_a_try(link, size_bytes):
            logger.debug("pool node %s: no time is left for %d bytes", link.name, size_bytes)
            return
        started_s = time.monotonic()
        answers = link.use(
            batch.deadline,
            lambda opened: batch.part(opened, indices),
            repeatable=batch.repeatable,
            tenant=batch.tenant,
        )
        link.speed.learn(size_bytes, time.monotonic() - started_s)
    except PoolError as error:
        logger.debug("pool node %s: %s", link.name, error)
        tally.add(failures=1)
        return
    for index, answer in zip(indices, answers, strict=True):
        batch.result[index] = answer


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
