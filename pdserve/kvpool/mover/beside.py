"""The client of a store of another engine in a process of its own, for the HTTP process of a worker.

A store's client is code of another package. Mooncake's holds the interpreter for 90 s where its master is
dead, and is 30 s late where the master hangs. So it runs in a page mover, as it does beside a scheduler: what
hangs is killed, and started again later (supervisor.py). The pages of this mover lie in a little memory of
our own: records of answers. Pages of KV never come here.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from pdserve.errors import PoolError, PoolUnavailable, StartupError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import OWN_ENGINE, PoolClientConfig
from pdserve.kvpool.mover.client import MoverClient
from pdserve.kvpool.mover.host_pages import HostPages, HostPart, Segment
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.stores.client import PageClient, StoreClient
from pdserve.pages import KV

SLOTS: Final = 64
"""Pages that are moved at once."""
SMALL_BYTES: Final = 4096
"""Of a page, where none is moved."""


def open_beside(
    config: PoolClientConfig,
    namespace: str,
    geometry: Mapping[str, str],
    *,
    name: str,
    page_bytes: int = SMALL_BYTES,
) -> PageClient:
    """The client of the configured engine, for pages of one segment of `page_bytes`. Raises ConfigError."""
    if config.engine == OWN_ENGINE:
        return PoolClient(config, namespace, dict(geometry), name=name)
    return StoreClient(
        config, namespace, geometry, lambda _: StoreProcess(config, namespace, geometry, name, page_bytes)
    )


class StoreProcess:
    """A `PageStore` whose calls another process makes. Raises PoolUnavailable where that process failed."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: Mapping[str, str],
        name: str,
        page_bytes: int = SMALL_BYTES,
    ) -> None:
        """Starts the process. Raises PoolUnavailable."""
        self._page_bytes = page_bytes
        self._lock = threading.Lock()  # guards the memory
        self._fd = os.memfd_create("pdserve-store")
        os.ftruncate(self._fd, SLOTS * page_bytes)
        self._slots: Bytes1D = np.frombuffer(mmap.mmap(self._fd, SLOTS * page_bytes), np.uint8)
        segments = [Segment(region=0, offset=0, stride=page_bytes, size=page_bytes)]
        part = HostPart(HostPages([(self._fd, SLOTS * page_bytes)], segments, page_tokens=1, pages=SLOTS))
        try:
            self._mover = MoverClient(config, namespace, geometry, {KV: part}, name=name)
        except StartupError as error:
            os.close(self._fd)
            raise PoolUnavailable(str(error)) from error

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See `PageStore`."""
        return self._mover.present([key.hex() for key in keys])[0]

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """See `PageStore`. Pages of another cut are not there."""
        done: list[bool] = []
        for some, chosen in self._portions(keys, pages):
            with self._lock:
                read = self._mover.get(some, self._indices(len(some))).done
                for slot, (page, there) in enumerate(zip(chosen, read, strict=True)):
                    if there:
                        page[0][:] = self._slot(slot)
            done += read
        return done or [False] * len(keys)

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """See `PageStore`. Pages of another cut are not stored."""
        done: list[bool] = []
        for some, chosen in self._portions(keys, pages):
            with self._lock:
                for slot, page in enumerate(chosen):
                    self._slot(slot)[:] = page[0]
                done += self._mover.put(some, self._indices(len(some))).done
        return done or [False] * len(keys)

    def clear(self) -> int:
        """See `PageStore`."""
        return self._mover.clear()

    def check(self) -> dict[str, PoolError | None]:
        """See `PageStore`."""
        return self._mover.check()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._mover.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _portions(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers]
    ) -> list[tuple[list[str], Sequence[PageBuffers]]]:
        """As many as there are slots each; none for pages of another cut."""
        if any(len(page) != 1 or page[0].nbytes != self._page_bytes for page in pages):
            return []
        return [
            ([key.hex() for key in keys[start : start + SLOTS]], pages[start : start + SLOTS])
            for start in range(0, len(keys), SLOTS)
        ]

    def _slot(self, number: int) -> Bytes1D:
        return self._slots[number * self._page_bytes : (number + 1) * self._page_bytes]

    @staticmethod
    def _indices(count: int) -> bytes:
        return np.arange(count, dtype=np.int64).tobytes()
