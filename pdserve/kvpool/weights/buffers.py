"""Memory that is used again: fresh memory costs as much as the copy into it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Final

from pdserve.kvpool.protocol.page_bytes import Bytes1D, aligned

SPARE_BYTES: Final = 512 << 20  # of buffers kept to be used again


class Buffers:
    """Memory that is used again. Thread-safe; dropped with its owner."""

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._free: list[Bytes1D] = []  # ascending
        self._returned: deque[Bytes1D] = deque()  # on their way to `_free`
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Bytes1D:
        """uint8, shape [size_bytes]. It comes back when nothing refers to the array that is returned."""
        with self._lock:
            self._sort_in()
            fit = (i for i, block in enumerate(self._free) if size_bytes <= block.size <= 2 * size_bytes)
            block = self._free.pop(chosen) if (chosen := next(fit, -1)) >= 0 else None
        if block is None:
            block = aligned(size_bytes)
        given = block[:size_bytes]
        weakref.finalize(given, self._give_back, block).atexit = False
        return given

    def _give_back(self, block: Bytes1D) -> None:
        """A finalizer: it may run anywhere, also in a thread that holds the lock, and must wait for nothing.
        Where the lock is held, the next `take` sorts the block in.
        """
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if sum(one.size for one in self._free) + block.size <= self._spare_bytes:
                self._free.append(block)
        self._free.sort(key=len)
