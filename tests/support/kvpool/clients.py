"""The asyncio client as an ordinary thread calls it, and what tests of both clients share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from pdserve.errors import PoolError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.door import Door
from tests.support.kvpool.inproc import InprocNode

KIB = 1024
SOON_S = 20.0


class Blocking:
    """The asyncio client, its loop in a thread."""

    def __init__(self, config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> AsyncPoolClient:
            return AsyncPoolClient(config, namespace, geometry)

        self.inner: AsyncPoolClient = self._run(make())

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = self._run(self.inner.exists(keys))
        return found

    def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        found: list[bool] = self._run(self.inner.wait(keys, timeout_s))
        return found

    def check(self) -> dict[str, PoolError | None]:
        outcome: dict[str, PoolError | None] = self._run(self.inner.check())
        return outcome

    def shut(self) -> None:
        """Close the client; it can still be asked."""
        self.loop.call_soon_threadsafe(self.inner.close)

    def close(self) -> None:
        self.shut()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def doors_of(directory: Path, count: int = 1, **limits: Any) -> list[Door]:
    """Nodes n0, n1, ... of this process, each behind a door."""
    layout = TableLayout(1024 * KIB, 64 * KIB, 4 * KIB)
    nodes = [InprocNode(f"n{i}", layout, Limits(**limits)) for i in range(count)]
    return [Door(node, directory / f"{node.name}.sock") for node in nodes]


def config_of(doors: Sequence[Door], **options: Any) -> PoolClientConfig:
    refs = [PoolNodeRef(node=door.node.name, address=door.address) for door in doors]
    return PoolClientConfig(nodes=refs, **{"retry_after_s": 0.02, **options})


def until(condition: Callable[[], bool]) -> None:
    """For what another thread does in its own time."""
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)  # between looks
