"""The part of the TCP data path that both ends use: messages of page bytes over one socket, plain or TLS.

    client -> node     the ticket of Welcome, which says whose connection this is; once
    node -> client     the header (GREETED_TAG, 0): the ticket was good
    then both ways     header, then as many bytes as it says; one message for each page

A header is the page's tag and its length, two little-endian u64. The node sends the pages of one connection
in the order of their tags. A page that it will not send any more has the length WITHDRAWN, and no bytes.

Bytes go between the kernel and the page's own place. Nothing is buffered in between but a header, and with
TLS a record of 16 KiB in OpenSSL. Only the thread that calls `step` moves bytes. So when it has taken a place
back, or has returned, nothing reads or writes there.

Sockets do not block: one thread can wait for both directions and for others (`PageStream.waits_for`). Two
threads may not use one TLS connection at a time.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, TypeAlias

from pdserve.errors import PoolTimeout, PoolUnavailable
from pdserve.kvpool.native import sockets
from pdserve.kvpool.protocol.page_bytes import PageBuffers

TICKET_BYTES: Final = 16
GREETED_TAG: Final = 2  # below events.FIRST_TAG, as all tags that are no page's
WITHDRAWN: Final = (1 << 64) - 1
HEADER: Final = struct.Struct("<QQ")
MAX_BUFFERS: Final = 1024  # of one call: Linux's IOV_MAX
SEND_BYTES: Final = 4 * 1024 * 1024  # of one call; a socket takes at most about this much
DROP_BYTES: Final = 256 * 1024  # read at a time of what nobody wants

Buffers: TypeAlias = Iterable[memoryview]


class PageStream:
    """A connected socket, plain or after its TLS handshake. Used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.send_waits = select.POLLOUT
        """What the last `send` waits for; a TLS connection may have to read before it can write."""
        self.receive_waits = select.POLLIN

    def fileno(self) -> int:
        """For polling."""
        return self._socket.fileno()

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Hand bytes of the first buffers to the kernel, and return how many. 0: it takes none now.

        Raises PoolUnavailable when the connection is gone.
        """
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
            self.send_waits = select.POLLOUT
        except ssl.SSLWantReadError:
            self.send_waits = select.POLLIN
        except OSError as error:
            raise PoolUnavailable(f"the data connection failed: {error}") from error
        return 0

    def receive(self, buffers: Sequence[memoryview]) -> int:
        """Read what has arrived into the buffers, in order, and return how many bytes. 0: nothing is there.

        Raises PoolUnavailable at the connection's end.
        """
        try:
            if len(buffers) == 1 or isinstance(self._socket, ssl.SSLSocket):
                count = self._socket.recv_into(buffers[0])
            else:
                count = self._socket.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            self.receive_waits = select.POLLIN
            return 0
        except ssl.SSLWantWriteError:
            self.receive_waits = select.POLLOUT
            return 0
        except OSError as error:
            raise PoolUnavailable(f"the data connection failed: {error}") from error
        if count == 0:
            raise PoolUnavailable("the other end closed the data connection")
        return count

    @property
    def moves_batches(self) -> bool:
        """Whether whole batches of pages are moved by the C module."""
        return sockets.moves(self._socket)

    def send_pages(
        self, tags: list[int], pages: Sequence[PageBuffers], *, checksum: bool, deadline_s: float
    ) -> list[int]:
        """Where `moves_batches`: send each page as a message with its tag. Returns their checksums, or zeros.

        Raises PoolTimeout, PoolUnavailable; then the connection is of no use any more.
        """
        try:
            return sockets.send(self._socket, tags, pages, checksum=checksum, deadline_s=deadline_s)
        except TimeoutError as error:
            raise PoolTimeout("pages were not sent in time") from error
        except OSError as error:
            raise PoolUnavailable(f"the data connection failed: {error}") from error

    def receive_pages(
        self,
        head: memoryview,
        head_bytes: int,
        tags: list[int],
        pages: Sequence[PageBuffers],
        *,
        checksum: bool,
        deadline_s: float,
    ) -> tuple[list[int], int]:
        """Where `moves_batches`: see `sockets.receive`. Errors as of `send_pages`."""
        try:
            return sockets.receive(
                self._socket, head, head_bytes, tags, pages, checksum=checksum, deadline_s=deadline_s
            )
        except TimeoutError as error:
            raise PoolTimeout("pages did not arrive in time") from error
        except OSError as error:
            raise PoolUnavailable(f"the data connection failed: {error}") from error

    def close(self) -> None:
        """Idempotent. Nothing is told to the peer by TLS: the end of the socket says it."""
        self._socket.close()


class Incoming:
    """The messages that arrive, one after the other.

    `begin(tag, length)` is called at each header, and returns the places for the bytes, of together `length`
    bytes, or None to drop them. It may raise PoolUnavailable. `end(tag)` is called when all have arrived.
    """

    def __init__(
        self, stream: PageStream, begin: Callable[[int, int], Buffers | None], end: Callable[[int], None]
    ) -> None:
        self._stream = stream
        self._begin = begin
        self._end = end
        self._head = memoryview(bytearray(HEADER.size))
        self._head_bytes = 0  # of the next header, that have arrived
        self._left_bytes = 0  # of the message, that have not arrived
        self._places: deque[memoryview] | None = None  # None: dropped
        self._scratch = memoryview(b"")
        self.tag: int | None = None
        """Of the message that is arriving."""

    def step(self) -> bool:
        """Take what is there, with one call to the kernel. False: nothing is there.

        Raises PoolUnavailable.
        """
        if self._head_bytes == HEADER.size:  # not before the next step: the caller may not want it yet
            self._head_bytes = 0
            tag, length = HEADER.unpack(self._head)
            places = self._begin(tag, length)
            self._left_bytes = 0 if length == WITHDRAWN else length
            self._places = None if places is None else deque(place for place in places if place.nbytes)
            self.tag = tag
            if not self._left_bytes:
                self._finish()
                return True
        received = self._stream.receive(self._buffers())
        if not received:
            return False
        if self.tag is not None:
            of_message = min(received, self._left_bytes)
            self._left_bytes -= of_message
            received -= of_message
            if self._places is not None:
                _advance(self._places, of_message)
            if not self._left_bytes:
                self._finish()
        self._head_bytes += received
        return True

    def take(
        self, tags: list[int], pages: Sequence[PageBuffers], *, checksum: bool, deadline_s: float
    ) -> list[int]:
        """Take whole messages with these tags, which are the next to come, into the pages, without `begin`
        and `end`: until the last, or a message that is another one. Returns the checksums of the pages that
        came, or zeros. None come in the middle of a message, or where the stream does not move batches.

        Raises PoolTimeout, PoolUnavailable.
        """
        if self.tag is not None or not self._stream.moves_batches:
            return []
        checksums, self._head_bytes = self._stream.receive_pages(
            self._head, self._head_bytes, tags, pages, checksum=checksum, deadline_s=deadline_s
        )
        return checksums

    def drop(self) -> None:
        """Write nothing more into the places of the message that is arriving."""
        self._places = None

    def _finish(self) -> None:
        tag, self.tag = self.tag, None
        self._places = None
        assert tag is not None
        self._end(tag)

    def _buffers(self) -> list[memoryview]:
        """Where the next bytes go: the rest of the message, and behind it the next header."""
        head = self._head[self._head_bytes :]
        if self.tag is None:
            return [head]
        if self._places is None:
            if not self._scratch.nbytes:
                self._scratch = memoryview(bytearray(DROP_BYTES))
            places = [self._scratch[: self._left_bytes]]
            whole = self._left_bytes <= DROP_BYTES
        else:
            places = list(islice(self._places, MAX_BUFFERS - 1))
            whole = len(places) == len(self._places)
        return [*places, head] if whole else places


class _Message:
    """One message that leaves."""

    __slots__ = ("begun_s", "buffers", "tag")

    def __init__(self, tag: int, buffers: deque[memoryview]) -> None:
        self.tag = tag
        self.buffers = buffers
        self.begun_s: float | None = None


class Outgoing:
    """The messages that leave, in order. `end(tag)` is called when the kernel has all bytes of one."""

    def __init__(self, stream: PageStream, end: Callable[[int], None]) -> None:
        self._stream = stream
        self._end = end
        self._queue: deque[_Message] = deque()
        self._by_tag: dict[int, _Message] = {}

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def tags(self) -> list[int]:
        """Of all messages that are not out, but for those withdrawn."""
        return list(self._by_tag)

    @property
    def stuck_since_s(self) -> float | None:
        """When the first message began to leave."""
        return self._queue[0].begun_s if self._queue else None

    def add(self, tag: int, page: Iterable[memoryview] = ()) -> None:
        """The page's buffers are read until `end`."""
        buffers = deque(buffer for buffer in page if buffer.nbytes)
        length = sum(buffer.nbytes for buffer in buffers)
        buffers.appendleft(memoryview(HEADER.pack(tag, length)))
        message = self._by_tag[tag] = _Message(tag, buffers)
        self._queue.append(message)

    def withdraw(self, tag: int) -> bool:
        """Do not send this page. False: it is leaving already, or out. After True its buffers are not read
        any more, and `end` is not called.
        """
        message = self._by_tag.get(tag)
        if message is None or message.begun_s is not None:
            return False
        del self._by_tag[tag]
        message.buffers = deque([memoryview(HEADER.pack(tag, WITHDRAWN))])
        return True

    def step(self) -> bool:
        """Send with one call to the kernel. False: it takes nothing now, or there is nothing to send.

        Raises PoolUnavailable.
        """
        if not self._queue:
            return False
        first = self._queue[0]
        if first.begun_s is None:  # also if nothing is sent: OpenSSL may have read the bytes
            first.begun_s = time.monotonic()
        sent = self._stream.send(self._buffers())
        if not sent:
            return False
        while sent:
            message = self._queue[0]
            sent = _advance(message.buffers, sent)
            if message.buffers:
                message.begun_s = message.begun_s or time.monotonic()
                break
            self._queue.popleft()
            if self._by_tag.pop(message.tag, None) is not None:
                self._end(message.tag)
        return True

    def _buffers(self) -> list[memoryview]:
        buffers: list[memoryview] = []
        size = 0
        for message in self._queue:
            for buffer in message.buffers:
                buffers.append(buffer)
                size += buffer.nbytes
                if len(buffers) == MAX_BUFFERS or size >= SEND_BYTES:
                    return buffers
        return buffers


def _advance(buffers: deque[memoryview], count: int) -> int:
    """Drop the first bytes of the buffers. Returns how many of `count` are left when they are all gone."""
    while count and buffers:
        size = buffers[0].nbytes
        if count < size:
            buffers[0] = buffers[0][count:]
            return 0
        count -= size
        buffers.popleft()
    return count
