"""Where data connections come in: listening sockets, and the ticket that each new socket must show first.

A stranger can open sockets, and knows no ticket:

- While the node waits for no client, a new socket is not served. Nor is one that has shown a wrong ticket.
  Both are held until `GREETING_TIMEOUT_S` have passed, and closed then: a stranger that is closed comes back
  at once, and honest clients stand behind him in the kernel's queue.
- A socket has `GREETING_TIMEOUT_S` for its TLS handshake and its ticket, whatever it sends. Nothing else is
  read of it before.
- At most `MAX_WITHOUT_TICKET` sockets are in this state. For one more, the oldest of the address that has
  most of them is closed. A client shows its ticket within a round trip.

A thread shakes hands with each socket, because TLS costs a millisecond of CPU time. It then moves the
connection's pages (`Claim`), so a connection has one thread from its beginning to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from pdserve.kvpool.transports.tcp.stream import TICKET_BYTES, PageStream
from pdserve.security.connection_limits import ConnectionLimit

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S: Final = 5.0
MAX_WITHOUT_TICKET: Final = 64
MAX_HELD: Final = 1024
HELD_BYTES: Final = 4096
"""What the kernel keeps of what a held socket sends: as little as it can."""
BACKLOG: Final = 1024
ACCEPTS_A_TURN: Final = 16
ACCEPT_AGAIN_S: Final = 1.0
PORT_TRIES: Final = 16  # for one free port at several addresses
WILDCARDS: Final = ("0.0.0.0", "::")

Claim: TypeAlias = Callable[[bytes], Callable[[PageStream], None] | None]
"""What to do with the stream of this ticket; None: nobody has it. Called by threads."""


class DataListener:
    """Listening sockets and the sockets without a ticket. Its methods are called on the loop's thread."""

    def __init__(
        self, claim: Claim, expects: Callable[[], bool], tls: Callable[[], ssl.SSLContext | None]
    ) -> None:
        """`expects()`: whether any ticket is out."""
        self._claim = claim
        self._expects = expects
        self._tls = tls
        self._listening: list[socket.socket] = []
        self._without_ticket: ConnectionLimit[socket.socket] = ConnectionLimit(MAX_WITHOUT_TICKET)
        self._lock = threading.Lock()  # of `_without_ticket`
        self._held: ConnectionLimit[socket.socket] = ConnectionLimit(MAX_HELD)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: set[threading.Thread] = set()

    def open(self, hosts: Sequence[str], port: int) -> int:
        """Listen at these addresses on one port (0: any that is free at all). Returns it. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self._listening = _listen(hosts, port)
        for sock in self._listening:
            sock.setblocking(False)
            self._watch(sock)
        chosen: int = self._listening[0].getsockname()[1]
        return chosen

    def close(self, deadline_s: float) -> None:
        """Let nobody in any more, and wait for all threads, whose workers must have been stopped."""
        for sock in self._listening:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()
        for sock in list(self._held):
            self._drop(sock)
        with self._lock:
            for sock in self._without_ticket:
                _end(sock)
        for thread in list(self._threads):
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.error("a data connection's thread did not end")

    def _watch(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # out of descriptors: the socket stays in the backlog
                logger.warning("a data connection cannot be accepted: %s", error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening.fileno())
                loop.call_later(ACCEPT_AGAIN_S, self._watch, listening)
                return
            if self._expects():
                self._let_in(sock, str(peer[0]))
            else:
                self._hold(sock, str(peer[0]))

    def _hold(self, sock: socket.socket, address: str) -> None:
        """Let a stranger's socket wait, unserved."""
        if not self._listening:
            sock.close()
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)
        if (oldest := self._held.came(sock, address)) is not None:
            oldest.close()
        asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, self._drop, sock)

    def _drop(self, sock: socket.socket) -> None:
        self._held.left(sock)
        sock.close()

    def _let_in(self, sock: socket.socket, address: str) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls = self._tls()
            if tls is not None:
                sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            thread = threading.Thread(
                target=self._serve, args=(sock, address), name="pdserve-tcp", daemon=True
            )
            with self._lock:
                if (oldest := self._without_ticket.came(sock, address)) is not None:
                    _end(oldest)
            thread.start()
            self._threads.add(thread)
            self._threads = {one for one in self._threads if one.is_alive()}
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("a data connection cannot be served: %s", error)
            with self._lock:
                self._without_ticket.left(sock)
            sock.close()

    # -- threads

    def _serve(self, sock: socket.socket, address: str) -> None:
        """Shake hands with a socket, and move pages if its ticket is good."""
        try:
            ticket = _shake_hands(sock, time.monotonic() + GREETING_TIMEOUT_S)
        except (OSError, ValueError) as error:  # ValueError: TLS after `_end`
            logger.debug("a data connection did not show a ticket: %s", error)
            ticket = b""
        with self._lock:
            self._without_ticket.left(sock)
        move = self._claim(ticket) if ticket else None
        if move is not None:
            move(PageStream(sock))
        elif ticket:
            self._hold_soon(sock, address)
        else:
            sock.close()

    def _hold_soon(self, sock: socket.socket, address: str) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._hold, sock, address)
        except RuntimeError:  # the loop is closed: the node has ended
            sock.close()


def _shake_hands(sock: socket.socket, deadline_s: float) -> bytes:
    """The ticket that the client shows. Raises OSError (TimeoutError)."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.do_handshake()
    ticket = b""
    while len(ticket) < TICKET_BYTES:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        piece = sock.recv(TICKET_BYTES - len(ticket))
        if not piece or time.monotonic() > deadline_s:
            raise TimeoutError("it ended, or took too long")
        ticket += piece
    return ticket


def _end(sock: socket.socket) -> None:
    """Let the thread that waits for this socket go on, which closes it."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not SSLSocket's, which drops the state in use
    except OSError:
        return  # the peer has closed it


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Raises OSError."""
    for tries_left in reversed(range(PORT_TRIES)):
        opened: list[socket.socket] = []
        try:
            for family, address in _addresses(hosts):
                chosen = opened[0].getsockname()[1] if opened else port
                opened.append(socket.create_server((address, chosen), family=family, backlog=BACKLOG))
            return opened
        except OSError:
            for sock in opened:
                sock.close()
            if port or not opened or not tries_left:  # else: another address has this port in use
                raise
    raise AssertionError("the last try returns or raises")


def _addresses(hosts: Sequence[str]) -> list[tuple[socket.AddressFamily, str]]:
    """Numeric addresses; of a family only the wildcard, if it is among them."""
    found = {
        (family, str(address[0]))
        for host in hosts
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    }
    wide = {family for family, address in found if address in WILDCARDS}
    return sorted(one for one in found if one[0] not in wide or one[1] in WILDCARDS)
