"""How a worker moves its pages: by a client in its own process, or by a page mover, as SGLang's ranks do."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.mover.client import MoverClient
from pdserve.kvpool.mover.host_pages import HostPages, HostPart, Segment
from pdserve.pages import KV
from tests.support.kvpool import made_pages as p

NAMESPACE: Final = "chaos"
GEOMETRY: Final = {"chaos": "1"}
MAX_BATCH: Final = 12
POISON: Final = 0xEE  # in memory before a read: bytes that were not written are wrong ones


class Read(NamedTuple):
    """`pages`: what is in memory now, shape [pages, bytes]. `corrupt`: how many the client found damaged."""

    ok: list[bool]
    pages: npt.NDArray[np.uint8]
    corrupt: int


class Pages(Protocol):
    """The pages of one thread, by their numbers; all of a call have one shape. Faults are misses."""

    def up(self) -> bool:
        """Whether all nodes serve us, as far as we know."""

    def connect(self) -> bool:
        """Whether all nodes serve us; asks them."""

    def exists(self, batch: Sequence[int]) -> list[bool]: ...
    def wait(self, batch: Sequence[int], timeout_s: float) -> list[bool]: ...
    def get(self, batch: Sequence[int]) -> Read: ...
    def put(self, batch: Sequence[int]) -> tuple[list[bool], int]:
        """Which are stored now, and how many were committed by us."""

    def movers_replaced(self) -> int:
        """How many page movers failed, and have successors."""

    def close(self) -> None: ...


class InProcess:
    """By a client in this process."""

    def __init__(self, config: PoolClientConfig, seed: int, name: str) -> None:
        self._client = PoolClient(config, NAMESPACE, GEOMETRY, name=name)
        self._seed = seed
        self._memory = [np.empty((MAX_BATCH, sum(shape)), np.uint8) for shape in p.SHAPES]

    def up(self) -> bool:
        return self._client.nodes_up == len(self._client.rings.addresses)

    def connect(self) -> bool:
        return not any(self._client.check().values())

    def exists(self, batch: Sequence[int]) -> list[bool]:
        return self._client.exists(_keys(self._seed, batch))

    def wait(self, batch: Sequence[int], timeout_s: float) -> list[bool]:
        deadline_s = time.monotonic() + timeout_s
        while not all(found := self.exists(batch)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return found

    def get(self, batch: Sequence[int]) -> Read:
        memory = self._memory[_shape(batch)][: len(batch)]
        memory[:] = POISON
        before = self._client.counters.pages_corrupt
        ok = self._client.get(_keys(self._seed, batch), list(map(p.segments, memory, batch)))
        return Read(ok, memory, self._client.counters.pages_corrupt - before)

    def put(self, batch: Sequence[int]) -> tuple[list[bool], int]:
        before = self._client.counters.pages_written
        keys, size = _keys(self._seed, batch), sum(p.segments_of(batch[0]))
        whole = [p.content(key, size) for key in keys]
        stored = self._client.put(keys, list(map(p.segments, whole, batch)))
        return stored, self._client.counters.pages_written - before

    def movers_replaced(self) -> int:
        return 0

    def close(self) -> None:
        self._client.close()


class ByMover:
    """By a page mover for each shape of pages, in memory that both share. Waits are our own client's."""

    def __init__(self, config: PoolClientConfig, seed: int, name: str) -> None:
        """Raises StartupError: a mover cannot be started."""
        self._seed = seed
        self._own = InProcess(config, seed, name)
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._movers: list[MoverClient] = []
        with ExitStack() as stack:
            stack.callback(self._own.close)
            for shape in p.SHAPES:
                fd = os.memfd_create("pdserve-chaos")
                stack.callback(os.close, fd)
                host = _host_pages(fd, shape)
                memory = np.frombuffer(mmap.mmap(fd, MAX_BATCH * sum(shape)), np.uint8)
                mover = MoverClient(config, NAMESPACE, GEOMETRY, {KV: HostPart(host)}, name=name)
                stack.callback(mover.close)
                self._memory.append(memory.reshape(MAX_BATCH, -1))
                self._movers.append(mover)
            self._open = stack.pop_all()

    def up(self) -> bool:
        return self.connect()  # what a mover knows shows only when it is asked

    def connect(self) -> bool:
        try:
            return self._own.connect() and not any(any(one.check().values()) for one in self._movers)
        except PoolUnavailable:
            return False

    def exists(self, batch: Sequence[int]) -> list[bool]:
        try:
            [present] = self._movers[_shape(batch)].present(self._names(batch))
        except PoolUnavailable:
            return [False] * len(batch)
        return present

    def wait(self, batch: Sequence[int], timeout_s: float) -> list[bool]:
        return self._own.wait(batch, timeout_s)

    def get(self, batch: Sequence[int]) -> Read:
        shape = _shape(batch)
        memory = self._memory[shape][: len(batch)]
        memory[:] = POISON
        try:
            ok = self._movers[shape].get(self._names(batch), _places(batch)).done
        except PoolUnavailable:
            ok = [False] * len(batch)
        return Read(ok, memory, 0)

    def put(self, batch: Sequence[int]) -> tuple[list[bool], int]:
        shape = _shape(batch)
        for memory, key in zip(self._memory[shape], _keys(self._seed, batch), strict=False):
            memory[:] = p.content(key, memory.nbytes)
        try:
            moved = self._movers[shape].put(self._names(batch), _places(batch))
        except PoolUnavailable:
            return [False] * len(batch), 0
        return moved.done, moved.written

    def movers_replaced(self) -> int:
        return sum(mover.restarts for mover in self._movers)

    def close(self) -> None:
        self._open.close()

    def _names(self, batch: Sequence[int]) -> list[str]:
        return [key.hex() for key in _keys(self._seed, batch)]


def _keys(seed: int, batch: Sequence[int]) -> list[bytes]:
    return [p.key_of(seed, page) for page in batch]


def _shape(batch: Sequence[int]) -> int:
    return p.SHAPES.index(p.segments_of(batch[0]))


def _host_pages(fd: int, shape: Sequence[int]) -> HostPages:
    """MAX_BATCH pages in a new file, one after the other."""
    size = sum(shape)
    os.ftruncate(fd, MAX_BATCH * size)
    starts = itertools.accumulate((0, *shape[:-1]))
    parts = [Segment(0, start, size, part) for start, part in zip(starts, shape, strict=True)]
    return HostPages([(fd, MAX_BATCH * size)], parts, 1, MAX_BATCH)


def _places(batch: Sequence[int]) -> bytes:
    return np.arange(len(batch), dtype=np.int64).tobytes()
