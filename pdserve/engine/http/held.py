"""The door that new requests pass to the engine; shut while a worker's weights are replaced.

Requests that come meanwhile wait, for a bounded time. Probes say that the worker drains, so routers send
none.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pdserve.errors import RequestError

WAIT_S: Final = 30.0
UPDATING: Final = "this worker's weights are being replaced: ask again"


class Door:
    """Open, or shut for a while. Used in one event loop."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._open = asyncio.Event()
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def shut(self) -> None:
        """New requests wait from now on."""
        self._open.clear()

    def open(self) -> None:
        """All that wait pass."""
        self._open.set()

    async def passed(self) -> None:
        """Return when the door is open. Raises RequestError 503 where it stays shut for too long."""
        while not self._open.is_set():
            try:
                await asyncio.wait_for(self._open.wait(), self._wait_s)
            except TimeoutError:
                raise RequestError(503, UPDATING, type_="server_error", code="weights_updating") from None
