"""The transport that moves no pages: questions, and pins that hold pages for reads over other connections."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import PoolRefused
from pdserve.kvpool.protocol.messages import Abort, Grant, Pin, Release, Reply, Request, Welcome
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.transports.base import PageOutcome
from pdserve.kvpool.transports.control import ControlChannel


class PinningConnection:
    """A `Connection` with data path "none". The node sends nothing for its pins."""

    def __init__(self, channel: ControlChannel) -> None:
        """Takes over a greeted channel."""
        self.welcome: Welcome = channel.welcome
        self.is_mapped = False
        self._channel = channel

    def call(self, request: Request, deadline_s: float) -> Reply:
        """See `Connection`."""
        return self._channel.call(request, deadline_s)

    def post(self, message: Abort | Release) -> None:
        """See `Connection`."""
        self._channel.post(message)

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        """Raises PoolRefused."""
        raise PoolRefused(f"a connection to pool node {self.welcome.node} without a data path moves no pages")

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[PageOutcome]:
        """Raises PoolRefused."""
        raise PoolRefused(f"a connection to pool node {self.welcome.node} without a data path moves no pages")

    def close(self) -> None:
        """See `Connection`."""
        self._channel.close()
