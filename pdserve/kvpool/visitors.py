"""The client connections of a node, from the moment they were accepted. asyncio, in the node's loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from pdserve.kvpool.connection import ClientConnection
from pdserve.kvpool.messages import Fault

FAREWELL_S: Final = 0.5  # for the last words to leave


class Visitors:
    """By number, those that have yet to shake hands too."""

    def __init__(self) -> None:
        self.all: dict[int, ClientConnection] = {}
        self._changed = asyncio.Event()

    def came(self, connection: ClientConnection) -> None:
        self.all[connection.number] = connection

    def went(self, number: int) -> None:
        self.all.pop(number, None)
        self._changed.set()

    def refuse(self, farewell: Fault) -> set[int]:
        """Tell all of them why and close their connections; whose numbers these were."""
        present = dict(self.all)
        for connection in present.values():
            connection.refuse(farewell)
        return set(present)

    async def dismiss(self, farewell: Fault) -> None:
        """Refuse all that are here; returns when their connections are closed, or soon after."""
        await asyncio.sleep(0)  # those that were just accepted become connections
        present = self.refuse(farewell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                while present & self.all.keys():
                    self._changed.clear()
                    await self._changed.wait()
