"""The control connection of a thread: a `ControlSession` over a blocking socket (session.py has the rules).

Used by one thread at a time. After PoolTimeout, PoolUnavailable or FrameError the channel is broken: every
later use raises PoolUnavailable at once.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Final

from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.native.sockets import exchange
from pdserve.kvpool.protocol.address import TcpAddress, parse_address
from pdserve.kvpool.protocol.messages import Abort, Hello, Release, Reply, Request, Welcome
from pdserve.kvpool.transports.dial import open_socket, tls_error
from pdserve.kvpool.transports.session import (
    Answered,
    ControlSession,
    Event,
    Proving,
    make_hello,
)

__all__ = ["ControlChannel", "make_hello"]

RECEIVE_BYTES: Final = 64 * 1024
"""One call takes the answers to a batch of pages. A longer buffer would be new memory of the kernel at each
call: 15 µs, without letting the interpreter go.
"""
POST_TIMEOUT_S: Final = (
    1.0  # a post has no deadline of its own: a node that drains nothing for this long is stuck
)


class ControlChannel:
    """An open control connection after its handshake. Deadlines are times of `time.monotonic()`."""

    def __init__(self, sock: socket.socket, session: ControlSession) -> None:
        self._socket = sock
        self._session = session
        self._replies: dict[int, Reply] = {}  # arrived, not yet collected

    @classmethod
    def connect(
        cls,
        address: str,
        hello: Hello,
        deadline_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> ControlChannel:
        """Connect and shake hands. `tls`: see `open_socket`.

        Raises PoolUnavailable (closed port), PoolRestarting, PoolTimeout, PoolRefused (refused by the node),
        FrameError (not a pool node), ConfigError (malformed address).
        """
        session = ControlSession(address, hello)
        channel = cls(open_socket(address, deadline_s, tls), session)
        try:
            channel._exchange(session.greeting, deadline_s)
            while not session.greeted:
                channel._exchange(b"", deadline_s)
                if session.ended is not None and not session.greeted:
                    raise session.ended
        except PoolError:
            channel.close()
            raise
        return channel

    @property
    def welcome(self) -> Welcome:
        """The node's answer to our Hello."""
        return self._session.welcome

    def call(self, request: Request, deadline_s: float) -> Reply:
        """Send the request, return its reply (a Fault is returned). Raises PoolTimeout, PoolUnavailable,
        FrameError; then the channel is broken.
        """
        return self.call_all([request], deadline_s)[0]

    def call_all(self, requests: Sequence[Request], deadline_s: float) -> list[Reply]:
        """Send the requests together, return their replies in order. Errors as of `call`."""
        ids = [getattr(request, "id", 0) for request in requests]
        frame = b"".join([self._session.send(request) for request in requests])
        while missing := len(ids) - sum(map(self._replies.__contains__, ids)):
            if not frame and self._session.ended is not None:
                raise self._session.ended
            self._exchange(frame, deadline_s, missing)
            frame = b""
        return [self._replies.pop(request_id) for request_id in ids]

    def take_pushed(self) -> None:
        """Read pushed messages without waiting, for a caller that polls `fileno`.

        Raises PoolUnavailable when the node has closed the connection, or FrameError.
        """
        self._session.check()
        try:
            self._socket.setblocking(False)
            self._take(self._session.receive(self._socket.recv(RECEIVE_BYTES)))
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return
        except OSError as error:
            raise self._fail(PoolUnavailable(f"pool node {self._address} went away: {error}")) from error
        if self._session.ended is not None:
            raise self._session.ended

    def post(self, message: Abort | Release) -> None:
        """Send a message that has no reply. Raises PoolUnavailable."""
        try:
            self._send(self._session.send(message), time.monotonic() + POST_TIMEOUT_S)
        except TimeoutError as error:
            raise self._fail(PoolUnavailable(f"pool node {self._address} takes no requests")) from error
        except OSError as error:
            raise self._gone(error) from error

    @property
    def peer_host(self) -> str:
        """The numeric address of the node's host. Raises PoolUnavailable."""
        try:
            peer = self._socket.getpeername()
        except OSError as error:
            raise self._fail(PoolUnavailable(f"pool node {self._address} went away: {error}")) from error
        return str(peer[0]) if self._socket.family != socket.AF_UNIX else "127.0.0.1"

    @property
    def server_name(self) -> str:
        """The host in the node's address, which its certificate names; empty for a Unix socket."""
        where = parse_address(self._address)
        return where.host if isinstance(where, TcpAddress) else ""

    def fileno(self) -> int:
        """The socket's descriptor, for polling. When it is readable, call `take_pushed`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close; idempotent; never raises."""
        self._session.fail(PoolUnavailable(f"the connection to pool node {self._address} was closed"))
        self._socket.close()

    @property
    def _address(self) -> str:
        return self._session.address

    def _send(self, frame: bytes, deadline_s: float) -> None:
        """Raises TimeoutError, OSError."""
        exchange(self._socket, frame, 0, deadline_s)

    def _exchange(self, frame: bytes, deadline_s: float, answers: int = 0) -> None:
        """Send the frame, if there is one, and wait for bytes, of so many answers if it can be told. Raises
        PoolTimeout, PoolUnavailable.
        """
        answers = answers if self._session.is_between_frames else 0
        try:
            data = exchange(self._socket, frame, RECEIVE_BYTES, deadline_s, answers=answers)
            events = self._session.receive(data)
            for event in events:
                if isinstance(event, Proving):
                    self._send(event.data, deadline_s)
        except TimeoutError as error:
            raise self._fail(PoolTimeout(f"pool node {self._address} did not answer in time")) from error
        except ssl.SSLError as error:
            # with TLS 1.3 a server's opinion of our certificate comes as late as this
            raise self._fail(tls_error(self._address, error)) from error
        except OSError as error:
            raise self._gone(error) from error
        self._take(events)

    def _gone(self, error: OSError) -> PoolError:
        """The error to raise, after the messages that the node sent before it closed the connection."""
        try:
            self._socket.setblocking(False)
            while self._session.ended is None and (data := self._socket.recv(RECEIVE_BYTES)):
                self._take(self._session.receive(data))
        except OSError:
            pass  # no more bytes
        return self._fail(PoolUnavailable(f"pool node {self._address} went away: {error}"))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Answered):
                self._replies[event.request_id] = event.reply

    def _fail(self, error: PoolError) -> PoolError:
        """End the session with this error. Returns the error to raise, which is that of an earlier end."""
        self._session.fail(error)
        return self._session.ended or error
