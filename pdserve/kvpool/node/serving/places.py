"""Which sockets a node keeps. Pure.

A stranger can open sockets as fast as the kernel makes them, and can begin a frame on each. Six bounds keep
places and memory for the clients:

| bound | who goes |
|---|---|
| `max_connections` sockets have not shaken hands | the oldest of the address that has most of them |
| `max_connections` clients have shaken hands | a new client is refused |
| half of these show no token, where the pool has tokens | a new client without one is refused |
| a quarter of these show no token and have one address, where the pool has tokens | the same |
| three quarters of these show one token, other than the node's `admin_token` | a new client that shows it |
| `MAX_HALF_FRAMES_BYTES` of frames that are not whole | the socket that holds most of them |

Nodes of the pool are always let in. An address is an IP address, or a user of this host ("uid 1000").
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from pdserve.security.connection_limits import ConnectionLimit

MIN_GREETING: Final = 64
"""So many may shake hands at a time even where `max_connections` is less."""
MAX_HALF_FRAMES_BYTES: Final = 64 * 1024 * 1024
"""16 frames of the largest kind."""


def max_greeting(max_connections: int) -> int:
    """Sockets that may shake hands at a time: all clients of a node that was started again."""
    return max(MIN_GREETING, max_connections)


class Places:
    """Counts the sockets of one node by number."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._greeting: ConnectionLimit[int] = ConnectionLimit(max_greeting(max_connections))
        self._clients: dict[int, tuple[str, str]] = {}
        """Address, and digest of the token that the client has shown; by number."""
        self._half_frame_bytes: dict[int, int] = {}

    @property
    def sockets(self) -> int:
        """All that are open."""
        return len(self._greeting) + len(self._clients)

    @property
    def half_frames_bytes(self) -> int:
        """Held of frames that are not whole."""
        return sum(self._half_frame_bytes.values())

    def accepted(self, number: int, address: str) -> int | None:
        """A socket was accepted. The number of a socket to close for it, if there are too many; its place is
        free at once.
        """
        return self._greeting.came(number, address)

    def refusal(self, number: int, *, token: str, tokens_in_use: bool, operator: bool = False) -> str:
        """Why the socket gets no client's place; empty if it gets one. `token`: digest of a known one, if the
        client shows one. `operator`: it is the node's `admin_token`.
        """
        limit = self._max_connections
        if len(self._clients) >= limit:
            return f"the node holds {limit} connections already"
        if operator or not tokens_in_use:
            return ""
        if token:
            same = sum(other == token for _, other in self._clients.values())
            if same < max(1, limit * 3 // 4):
                return ""
            return f"the node holds {same} connections with this token already: raise max_connections"
        without = Counter(address for address, other in self._clients.values() if not other)
        if without.total() >= max(1, limit // 2):
            return f"the node holds {without.total()} connections without a token already: show one"
        address = self._greeting.address(number)
        if without[address] >= max(1, limit // 4):
            return f"the node holds {without[address]} connections of {address} without a token: show one"
        return ""

    def greeted(self, number: int, *, token: str) -> None:
        """The socket has shaken hands. `token`: see `refusal`."""
        self._clients[number] = (self._greeting.left(number), token)

    def holds(self, number: int, half_frame_bytes: int) -> int | None:
        """The socket has sent so many bytes of a frame that is not whole. The number of a socket to close, if
        all together hold too many.
        """
        if half_frame_bytes:
            self._half_frame_bytes[number] = half_frame_bytes
        else:
            self._half_frame_bytes.pop(number, None)
            return None
        if self.half_frames_bytes <= MAX_HALF_FRAMES_BYTES:
            return None
        largest = max(self._half_frame_bytes, key=self._half_frame_bytes.__getitem__)
        del self._half_frame_bytes[largest]
        return largest

    def closed(self, number: int) -> None:
        """The socket is closed."""
        self._greeting.left(number)
        self._clients.pop(number, None)
        self._half_frame_bytes.pop(number, None)
