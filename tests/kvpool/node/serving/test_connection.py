"""One control connection of a node, on a transport that is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.kvpool.node.serving.connection import ClientConnection
from pdserve.kvpool.protocol.messages import Done


class Host:
    """A node that lets everybody in."""

    name = "node"

    def opened(self, connection: ClientConnection) -> None:
        pass


class GoneTransport:
    """As uvloop's is when the peer hung up: it refuses to write."""

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return True

    def write(self, data: bytes) -> None:
        raise RuntimeError("unable to perform operation: the handler is closed")


def test_an_answer_that_comes_when_the_client_is_gone_is_dropped() -> None:
    async def answer() -> None:
        connection = ClientConnection(Host(), 1)  # type: ignore[arg-type]
        connection.connection_made(GoneTransport())  # type: ignore[arg-type]
        connection.send(Done(1))

    asyncio.run(answer())
