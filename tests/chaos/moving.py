"""How a worker moves its pages: by a client in its own process, as SGLang's ranks do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
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


class Pages:
    """The pages of one thread, by their numbers; all of a call have one shape. Faults are misses."""

    def __init__(self, config: PoolClientConfig, seed: int, name: str) -> None:
        self._client = PoolClient(config, NAMESPACE, GEOMETRY, name=name)
        self._seed = seed
        self._memory = [np.empty((MAX_BATCH, sum(shape)), np.uint8) for shape in p.SHAPES]

    def up(self) -> bool:
        """Whether a node serves us, as far as we know."""
        return self._client.is_up

    def connect(self) -> bool:
        """Whether the node serves us that we ask."""
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
        """Which are stored now, and how many were committed by us."""
        before = self._client.counters.pages_written
        keys, size = _keys(self._seed, batch), sum(p.segments_of(batch[0]))
        whole = [p.content(key, size) for key in keys]
        stored = self._client.put(keys, list(map(p.segments, whole, batch)))
        return stored, self._client.counters.pages_written - before

    def close(self) -> None:
        self._client.close()


def _keys(seed: int, batch: Sequence[int]) -> list[bytes]:
    return [p.key_of(seed, page) for page in batch]


def _shape(batch: Sequence[int]) -> int:
    return p.SHAPES.index(p.segments_of(batch[0]))
