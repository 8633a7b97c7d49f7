"""Pages that are read so much that other nodes hold copies: what is left of them when their node is lost."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from benchmarks.chaos import pages as p
from benchmarks.chaos.faults.direct import Direct
from benchmarks.chaos.field import Field
from benchmarks.chaos.moving import GEOMETRY
from benchmarks.chaos.records import KeptHot
from benchmarks.dice import Dice
from benchmarks.node_processes import NodeProcess
from pdserve.kvpool.client.client import PoolClient

PAGES: Final = 12
HEAT_S: Final = 8.0
FOUND_WITHIN_S: Final = 3.0
PAUSE_S: Final = 0.01


class Hot:
    """A few pages of one node, in a namespace of their own."""

    def __init__(self, field: Field, node: NodeProcess, draw: int) -> None:
        self._field = field
        self._node = node
        self._namespace = f"hot-{draw:08x}"
        dice = Dice("hot", draw)
        self._keys: list[bytes] = []
        while len(self._keys) < PAGES:
            key = p.any_key(dice)
            if field.ring.owner(key).node == node.name:
                self._keys.append(key)
        self._client = PoolClient(field.direct(), self._namespace, GEOMETRY, name="chaos-hot")

    def heat(self) -> None:
        """Write them and read them until each has a copy elsewhere; the others are left out. Raises
        PoolError.
        """
        self._client.put(self._keys, [(self._content(key),) for key in self._keys])
        deadline = time.monotonic() + HEAT_S
        with Direct(self._node, self._namespace) as own:
            while True:
                pins = own.get(self._keys, p.SHAPES[0])
                own.release(pins)
                copied = [key for key, pin in zip(self._keys, pins, strict=True) if pin.replicas]
                if len(copied) == PAGES or time.monotonic() > deadline or self._field.stop.is_set():
                    break
                time.sleep(PAUSE_S)
        self._keys = copied

    def read(self, lost_at_s: float) -> None:
        """The node is gone: look for them until all are found, not for ever."""
        left, deadline = list(self._keys), time.monotonic() + FOUND_WITHIN_S
        while left and time.monotonic() < deadline:
            pages = [(np.empty(sum(p.SHAPES[0]), np.uint8),) for _ in left]
            got = self._client.get(left, pages)
            left = [
                key
                for key, ok, (page,) in zip(left, got, pages, strict=True)
                if not (ok and np.array_equal(page, self._content(key)))
            ]
            time.sleep(PAUSE_S)
        self._field.note(KeptHot(lost_at_s, time.monotonic(), self._node.name, len(self._keys), len(left)))

    def close(self) -> None:
        self._client.close()

    def _content(self, key: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return p.content(key, sum(p.SHAPES[0]))
