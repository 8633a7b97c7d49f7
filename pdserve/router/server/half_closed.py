"""A client that has shut the sending half of its connection: does it wait for its answer, or has it left?

TCP says the same in both cases, until something is sent. A client that waits takes it; the system of one that
has closed its socket answers with a reset. So the connection sends what changes no answer (`100 Continue`,
or a comment in a stream of events), and this looks for the reset: nothing is read any more that would tell.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

FIRST_LOOK_S: Final = 0.02
SLOWEST_LOOK_S: Final = 1.0
_CLOSED: Final = 7
"""TCP_CLOSE of Linux' tcp_states.h; it stands in the first byte of TCP_INFO."""


def is_tcp(transport: asyncio.Transport) -> bool:
    """Whether the peer of this transport can be asked: by TCP, and without TLS, which closes both halves."""
    sock = transport.get_extra_info("socket")
    is_plain = transport.get_extra_info("sslcontext") is None
    return sock is not None and is_plain and sock.family in (socket.AF_INET, socket.AF_INET6)


class HalfClosed:
    """Looks now and then, more and more seldom, whether the peer has reset the connection; aborts it then."""

    __slots__ = ("_delay_s", "_loop", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._delay_s = FIRST_LOOK_S
        self._timer = loop.call_later(FIRST_LOOK_S, self._look)

    def stop(self) -> None:
        """The connection is over."""
        self._timer.cancel()

    def _look(self) -> None:
        sock = self._transport.get_extra_info("socket")
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
            self._transport.abort()
            return
        self._delay_s = min(2 * self._delay_s, SLOWEST_LOOK_S)
        self._timer = self._loop.call_later(self._delay_s, self._look)
