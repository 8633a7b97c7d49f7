"""The client's end of the TCP data path: control over one socket, pages over a second one, plain or TLS.

    write_pages   every page is one message with the tag of its Grant, sent from the caller's buffers
    read_pages    the node begins to send when it answers Get; bytes go from the kernel straight into the
                  caller's buffers, and each page is checked when it is whole

The node sends pages in the order of their tags. Pages that were pinned and are not read are dropped on the
way to later ones.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence

import msgspec

from pdserve.errors import FrameError, PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol.messages import (
    Abort,
    Get,
    Grant,
    Pin,
    Release,
    Reply,
    Request,
    Reserve,
    TcpInfo,
    Welcome,
)
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, PageBuffers, checksum_page
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK, PageOutcome
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.dial import open_socket
from pdserve.kvpool.transports.tcp.stream import (
    GREETED_TAG,
    WITHDRAWN,
    Buffers,
    Incoming,
    Outgoing,
    PageStream,
)


class TcpConnection:
    """One client's connection to one node over TCP. Implements `base.Connection`."""

    def __init__(self, channel: ControlChannel, sock: socket.socket, checksum: bool) -> None:
        self.welcome: Welcome = channel.welcome
        self.is_mapped = False
        self._channel = channel
        self._stream = PageStream(sock)
        self._incoming = Incoming(self._stream, self._begin, self._arrived)
        self._outgoing = Outgoing(self._stream, lambda tag: None)
        self._checksum = checksum
        self._reading: dict[int, tuple[int, Pin, PageBuffers]] = {}  # by tag; place among the outcomes
        self._outcomes: list[PageOutcome] = []
        self._last_tag = 0  # of the pages that have arrived or were dropped
        self._closed = False

    @classmethod
    def open(
        cls,
        channel: ControlChannel,
        checksum: bool,
        deadline_s: float,
        tls: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> TcpConnection:
        """Open the data connection of a control channel, which it takes over, also when this raises.

        `tls`: pages must be encrypted, and the node must show a certificate that this context accepts for
        `server_name` (empty: the address it is reached at). Raises PoolUnavailable or PoolTimeout.
        """
        try:
            info = channel.welcome.tcp
            if info is None:
                raise PoolUnavailable(f"pool node {channel.welcome.node} offers no TCP data path")
            sock = _connect(channel, info, tls, server_name, deadline_s)
        except BaseException:
            channel.close()
            raise
        connection = cls(channel, sock, checksum)
        connection._greet(info, deadline_s)
        return connection

    # -- control

    def call(self, request: Request, deadline_s: float) -> Reply:
        """See `base.Connection.call`."""
        return self.call_all([request], deadline_s)[0]

    def call_all(self, requests: Sequence[Request], deadline_s: float) -> list[Reply]:
        """See `base.Connection.call_all`. A page is one message, whatever its segments."""
        return self._channel.call_all([_in_one_segment(one) for one in requests], deadline_s)

    def post(self, message: Abort | Release) -> None:
        """See `base.Connection.post`."""
        self._channel.post(message)

    # -- pages

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        """See `base.Connection.write_pages`."""
        self._check_open()
        checksums = []
        try:
            if self._stream.moves_batches:
                tags = [grant.tag for grant in grants]
                return self._stream.send_pages(tags, pages, checksum=self._checksum, deadline_s=deadline_s)
            for grant, page in zip(grants, pages, strict=True):
                self._outgoing.add(grant.tag, [segment.data for segment in page])
                while self._outgoing:
                    self._check_time(deadline_s)
                    if not self._outgoing.step():
                        self._wait(self._stream.send_waits, deadline_s)
                # the node takes the page from its kernel meanwhile
                checksums.append(checksum_page(page) if self._checksum else NO_CHECKSUM)
        except BaseException as error:
            self._end(error)
            raise
        return checksums

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[PageOutcome]:
        """See `base.Connection.read_pages`."""
        self._check_open()
        try:
            self._outcomes = [LOST] * len(pins)
            for place, (pin, page) in enumerate(zip(pins, pages, strict=True)):
                self._reading[pin.tag] = (place, pin, page)
            if min(self._reading, default=self._last_tag + 1) <= self._last_tag:
                raise self._unavailable("a page is read after one that was pinned later")
            while self._reading:
                self._check_time(deadline_s)  # also if bytes that nobody wants never end
                self._take(deadline_s)
                if self._reading and not self._incoming.step():
                    self._wait(self._stream.receive_waits, deadline_s)
        except BaseException as error:
            self._end(error)
            raise
        return self._outcomes

    def close(self) -> None:
        """See `base.Connection.close`."""
        if not self._closed:
            self._closed = True
            self._reading.clear()
            self._stream.close()
            self._channel.close()

    # -- internals

    def _greet(self, info: TcpInfo, deadline_s: float) -> None:
        """Send the ticket, and wait until the node takes it."""
        greeted: list[int] = []
        welcoming = Incoming(self._stream, _only_greeting, greeted.append)
        ticket = memoryview(info.ticket)
        try:
            while ticket.nbytes:
                self._check_time(deadline_s)
                sent = self._stream.send([ticket])
                ticket = ticket[sent:]
                if not sent:
                    self._wait(self._stream.send_waits, deadline_s)
            while not greeted:
                self._check_time(deadline_s)
                if not welcoming.step():
                    self._wait(self._stream.receive_waits, deadline_s)
        except BaseException as error:
            self._end(error)
            raise

    def _begin(self, tag: int, length: int) -> Buffers | None:
        """The page `tag` arrives: where its bytes go."""
        if tag <= self._last_tag:
            raise self._unavailable("it sends pages out of their order")
        self._last_tag = tag
        wanted = self._reading.get(tag)
        if any(other < tag for other in self._reading):
            raise self._unavailable("it passed over a page")
        if wanted is None:
            return None
        if length == WITHDRAWN:
            del self._reading[tag]
            return None
        _, _, page = wanted
        if length != sum(segment.nbytes for segment in page):
            raise self._unavailable("it sends a page of another length than we asked for")
        return [segment.data for segment in page]

    def _take(self, deadline_s: float) -> None:
        """Take the next pages, as far as they come one after the other, and a batch can be taken at once."""
        if not self._stream.moves_batches or self._incoming.tag is not None:
            return
        tags = sorted(self._reading)
        pages = [self._reading[tag][2] for tag in tags]
        checksums = self._incoming.take(tags, pages, checksum=self._checksum, deadline_s=deadline_s)
        for tag, checksum in zip(tags, checksums, strict=False):  # fewer, where another message comes
            self._last_tag = tag
            place, pin, _ = self._reading.pop(tag)
            is_right = not self._checksum or pin.checksum in (checksum, NO_CHECKSUM)
            self._outcomes[place] = OK if is_right else CORRUPT

    def _arrived(self, tag: int) -> None:
        wanted = self._reading.pop(tag, None)
        if wanted is None:
            return
        place, pin, page = wanted
        checked = self._checksum and pin.checksum != NO_CHECKSUM
        self._outcomes[place] = CORRUPT if checked and checksum_page(page) != pin.checksum else OK

    def _wait(self, events: int, deadline_s: float) -> None:
        """Until the socket is ready, or the deadline."""
        poller = select.poll()
        poller.register(self._stream.fileno(), events)
        poller.poll(max(1.0, (deadline_s - time.monotonic()) * 1000))

    def _check_time(self, deadline_s: float) -> None:
        """Raises PoolTimeout."""
        if time.monotonic() > deadline_s:
            raise PoolTimeout(f"pool node {self.welcome.node}: transfer not finished in time")

    def _check_open(self) -> None:
        if self._closed:
            raise PoolUnavailable(f"the connection to pool node {self.welcome.node} is closed")

    def _unavailable(self, reason: str) -> PoolUnavailable:
        return PoolUnavailable(f"pool node {self.welcome.node} broke the TCP data path's rules: {reason}")

    def _end(self, error: BaseException) -> None:
        """Close after an error. Raises PoolRestarting in its place where the node said goodbye before."""
        if isinstance(error, PoolUnavailable) and not self._closed:
            try:
                self._channel.take_pushed()
            except FrameError:
                pass
            except PoolError as last_words:
                self.close()
                raise last_words from error
        self.close()


def _connect(
    channel: ControlChannel, info: TcpInfo, tls: ssl.SSLContext | None, server_name: str, deadline_s: float
) -> socket.socket:
    """The data connection's socket. Raises PoolUnavailable, PoolTimeout."""
    node, host = channel.welcome.node, info.host or channel.peer_host
    if info.tls != (tls is not None):
        wants, change = ("TLS", "set") if info.tls else ("no TLS", "unset")
        raise PoolUnavailable(f"pool node {node} wants {wants} on its data connections: {change} `tls.ca`")
    address = f"tcp:[{host}]:{info.port}" if ":" in host else f"tcp:{host}:{info.port}"
    return open_socket(address, deadline_s, tls, server_name)


def _in_one_segment(request: Request) -> Request:
    if isinstance(request, (Reserve, Get)) and len(request.segment_bytes) > 1:
        return msgspec.structs.replace(request, segment_bytes=[sum(request.segment_bytes)])
    return request


def _only_greeting(tag: int, length: int) -> Buffers | None:
    if (tag, length) != (GREETED_TAG, 0):
        raise PoolUnavailable("the data connection's other end is no pool node")
    return None
