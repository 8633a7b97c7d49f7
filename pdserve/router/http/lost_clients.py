"""Clients that take nothing of what is sent, and clients of which nobody knows whether they are still
there.
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
    """A client that has shut the sending half of its connection: does it wait for its answer, or has it left?

    TCP says the same in both cases, until something is sent. A client that waits takes it; the system of one
    that has closed its socket answers with a reset. So the connection sends what changes no answer (`100
    Continue`, or a comment in a stream of events), and this looks for the reset: nothing is read any more
    that would tell. It looks more and more seldom, and aborts the connection that was reset.
    """

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


class Unread:
    """A client that takes nothing for `limit_s` of what waits to be sent is cut off."""

    __slots__ = ("_bytes", "_limit_s", "_loop", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._transport = transport
        self._loop = loop
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = 0
        """What waited to be sent when the timer was set."""

    def watch(self) -> None:
        """Begin, if something waits to be sent."""
        if self._timer is None and (unread := self._transport.get_write_buffer_size()):
            self._bytes = unread
            self._timer = self._loop.call_later(self._limit_s, self._look)

    def forget(self) -> None:
        """Most of it is taken, or the connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() < self._bytes:
            self.watch()
        else:
            self._transport.abort()
