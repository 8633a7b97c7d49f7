"""The client's end of the UCX data path: control over a socket, pages as UCX tagged messages.

    write_pages   every segment is one message with the tag of its Grant; the node posts the receives
                  directly into the slot before it sends the Grant
    read_pages    the node begins to send when it answers Get; the receives go directly into the caller's
                  buffers, and each page is checked at its completion, while it is in the CPU's cache

A page can have many small segments (HiCache's layer_first layout: two per layer), each a message. They are
gathered into one message through a staging buffer. `gathers` decides by the segments' sizes alone, so the
request (`call` rewrites its `segment_bytes`) and the transfer agree without shared state.

The calling thread makes progress during calls. It polls for a short time, then sleeps on the descriptors of
the worker and the control socket.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from pdserve.errors import PoolTimeout, PoolUnavailable, StartupError
from pdserve.kvpool.protocol.address import LOOPBACK_DEVICE, is_loopback
from pdserve.kvpool.protocol.messages import (
    Abort,
    Get,
    Grant,
    Pin,
    Release,
    Reply,
    Request,
    Reserve,
    UcxInfo,
)
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, Bytes1D, PageBuffers, checksum_page
from pdserve.kvpool.transports.base import CORRUPT, OK, PageOutcome
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.ucx import (
    GREETED_TAG,
    GREETING_BYTES,
    GREETING_TAG,
    Operation,
    UcxLibrary,
    UcxLink,
)

GATHER_BELOW_BYTES: Final = 256 * 1024  # mean segment size below which a copy was measured to be faster
SPIN_S: Final = 50e-6  # time of polling before sleeping; a wake-up costs more


class UcxConnection:
    """One client's connection to one node over UCX. Implements `base.Connection`."""

    def __init__(self, channel: ControlChannel, link: UcxLink, checksum: bool) -> None:
        self.welcome = channel.welcome
        self.is_mapped = False
        self._channel = channel
        self._link = link
        self._checksum = checksum
        self._operations: list[Operation] = []  # in progress: UCX may touch their buffers
        self._staging = np.empty(0, np.uint8)
        self._closed = False

    @classmethod
    def open(
        cls,
        channel: ControlChannel,
        options: Mapping[str, str],
        checksum: bool,
        deadline_s: float,
    ) -> UcxConnection:
        """Connect UCX for an open control channel, which it takes over, also when this raises.

        Raises PoolUnavailable (also if UCX cannot be used at all) or PoolTimeout.
        """
        try:
            info = channel.welcome.ucx
            if info is None:
                raise PoolUnavailable(f"pool node {channel.welcome.node} offers no UCX to this client")
            library = UcxLibrary()
            host = info.host or channel.peer_host
            if is_loopback(host):  # whoever reaches a port of UCX may write our memory
                options = {"NET_DEVICES": LOOPBACK_DEVICE, **options}
            # UCXX's contexts may not share workers between threads, so each connection has its own
            link = UcxLink(library, library.context(options))
        except StartupError as error:
            channel.close()
            raise PoolUnavailable(str(error)) from error  # a missing UCX must not end the process
        except BaseException:
            channel.close()
            raise
        connection = cls(channel, link, checksum)
        try:
            connection._greet(info, host, deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    # -- control

    def call(self, request: Request, deadline_s: float) -> Reply:
        """See `base.Connection.call`."""
        return self.call_all([request], deadline_s)[0]

    def call_all(self, requests: Sequence[Request], deadline_s: float) -> list[Reply]:
        """See `base.Connection.call_all`."""
        return self._channel.call_all([_gathered(one) for one in requests], deadline_s)

    def post(self, message: Abort | Release) -> None:
        """See `base.Connection.post`."""
        self._channel.post(message)

    # -- pages

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        """See `base.Connection.write_pages`."""
        with _EndOnError(self):
            gather = bool(pages) and gathers([segment.nbytes for segment in pages[0]])
            staged = self._stage(pages) if gather else None
            checksums = []
            for i, (grant, page) in enumerate(zip(grants, pages, strict=True)):
                if staged is not None:
                    np.concatenate(page, out=staged[i])
                    page = (staged[i],)
                for j, segment in enumerate(page):
                    self._operations.append(self._link.send(segment, grant.tag + j))
                checksums.append(checksum_page(page) if self._checksum else NO_CHECKSUM)
                self._link.progress()
            for operation in self._operations:
                self._finish(operation, deadline_s)
            self._operations.clear()
            return checksums

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[PageOutcome]:
        """See `base.Connection.read_pages`."""
        with _EndOnError(self):
            gather = bool(pages) and gathers([segment.nbytes for segment in pages[0]])
            staged = self._stage(pages) if gather else None
            for i, (pin, page) in enumerate(zip(pins, pages, strict=True)):
                targets = page if staged is None else (staged[i],)
                for j, segment in enumerate(targets):
                    self._operations.append(self._link.receive(segment, pin.tag + j))
            outcomes = []
            operations = iter(self._operations)
            for i, (pin, page) in enumerate(zip(pins, pages, strict=True)):
                targets = page if staged is None else (staged[i],)
                for _ in targets:
                    self._finish(next(operations), deadline_s)
                if staged is not None:
                    _scatter(staged[i], page)
                outcomes.append(self._check(pin, targets))
            self._operations.clear()
            return outcomes

    def close(self) -> None:
        """See `base.Connection.close`."""
        if not self._closed:
            self._closed = True
            self._link.destroy(self._operations)
            self._channel.close()

    # -- internals

    def _check(self, pin: Pin, page: PageBuffers) -> PageOutcome:
        if not self._checksum or pin.checksum == NO_CHECKSUM or checksum_page(page) == pin.checksum:
            return OK
        return CORRUPT

    def _stage(self, pages: Sequence[PageBuffers]) -> list[Bytes1D]:
        """One contiguous piece of the staging buffer per page. The buffer is reused by later calls."""
        page_bytes = sum(segment.nbytes for segment in pages[0])
        if self._staging.nbytes < page_bytes * len(pages):
            self._staging = np.empty(page_bytes * len(pages), np.uint8)
        return [self._staging[i * page_bytes : (i + 1) * page_bytes] for i in range(len(pages))]

    def _greet(self, info: UcxInfo, host: str, deadline_s: float) -> None:
        number = np.frombuffer(info.connection.to_bytes(GREETING_BYTES, "little"), np.uint8).copy()
        answer = np.zeros(GREETING_BYTES, np.uint8)
        self._link.connect(host, info.port)
        with _EndOnError(self):
            self._operations.append(self._link.receive(answer, GREETED_TAG))
            self._operations.append(self._link.send(number, GREETING_TAG))
            for operation in self._operations:
                self._finish(operation, deadline_s)
            self._operations.clear()
        if not np.array_equal(answer, number):
            raise PoolUnavailable(f"UCX at {host} port {info.port} is not the pool node we spoke to")

    def _finish(self, operation: Operation, deadline_s: float) -> None:
        """Progress until the operation has completed. Raises PoolTimeout, PoolUnavailable."""
        while not operation.completed:
            if not self._link.progress() and not operation.completed:
                self._idle(lambda: operation.completed, deadline_s)
        if not operation.ok:
            raise self._gone()
        if time.monotonic() > deadline_s:
            raise PoolTimeout(f"pool node {self.welcome.node}: transfer not finished in time")

    def _gone(self) -> PoolUnavailable:
        """Why the endpoint failed. A node that stops, or is upgraded, has said so before."""
        try:
            self._channel.take_pushed()
        except PoolUnavailable as error:
            return error
        return PoolUnavailable(f"pool node {self.welcome.node} went away during a transfer")

    def _idle(self, done: Callable[[], bool], deadline_s: float) -> None:
        """Wait for UCX or the control socket: poll for `SPIN_S`, then sleep."""
        spin_until = time.monotonic() + SPIN_S
        while not self._link.progress():
            now = time.monotonic()
            if not self._link.alive:
                raise self._gone()
            if now > deadline_s:
                raise PoolTimeout(f"pool node {self.welcome.node}: transfer not finished in time")
            if now < spin_until or not self._link.arm():
                continue
            if done():
                return
            poller = select.poll()
            poller.register(self._link.epoll_fd, select.POLLIN)
            poller.register(self._channel.fileno(), select.POLLIN)
            ready = dict(poller.poll(max(1.0, (deadline_s - now) * 1000)))
            if self._channel.fileno() in ready:
                # no request is open during a transfer: the node closed the connection or pushes its view
                self._channel.take_pushed()


class _EndOnError:
    """Context of a transfer: on any error it destroys the connection's UCX worker before the error leaves."""

    def __init__(self, connection: UcxConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if self._connection._closed:
            raise PoolUnavailable(f"the connection to pool node {self._connection.welcome.node} is closed")

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self._connection.close()


def gathers(segment_bytes: Sequence[int]) -> bool:
    """Whether a page with these segments is sent as one message, through a staging buffer."""
    return len(segment_bytes) > 1 and sum(segment_bytes) < GATHER_BELOW_BYTES * len(segment_bytes)


def _gathered(request: Request) -> Request:
    if isinstance(request, Reserve | Get) and gathers(request.segment_bytes):
        return msgspec.structs.replace(request, segment_bytes=[sum(request.segment_bytes)])
    return request


def _scatter(source: Bytes1D, page: PageBuffers) -> None:
    start = 0
    for segment in page:
        np.copyto(segment, source[start : start + segment.nbytes])
        start += segment.nbytes
