"""Events of the node's pages: what is told to whom, and when. In the node's event loop.

A change waits up to `BATCH_S` for others, so that a batch has many. Whoever subscribes hears of all pages
that are there, a few at a time, between the changes. So a subscriber needs no other source, whenever it
comes. The same is done when many pages went at once (`PlacesVoid`), after all that was told was made void.

Namespaces that have tokens are told only where the configuration names them.

The sockets of a node's events. The node's thread sends and receives, and never waits for either.

libzmq has a thread of its own that moves the bytes. For each subscriber it keeps up to `QUEUE_BATCHES`
batches. One that reads too slowly loses the next ones, and sees it by their numbers: it subscribes again, and
hears of all pages anew. Numbers go on growing over restarts, so that a restart is a gap too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Final

from pdserve.errors import StartupError
from pdserve.extras import needed_by
from pdserve.kvpool.core.events import PagesMoved, PlacesVoid
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.namespaces.catalog import page_tokens
from pdserve.kvpool.namespaces.tenants import split
from pdserve.kvpool.node.config import EventsConfig
from pdserve.kvpool.protocol.kv_events import FORMATS, SEQUENCE_BYTES, Told

with needed_by("events.address", "events"):
    import zmq

logger = logging.getLogger(__name__)

BATCH_PAGES: Final = 256
BATCH_S: Final = 0.01
TICK_S: Final = 0.05
BUSY_TICK_S: Final = 0.01  # while there is more to do
LISTED_PAGES: Final = 512  # of all pages, told in one tick
RELIST_S: Final = 5.0  # between the ends of one listing and the start of the next for new subscribers


class EventFeed:
    """Tells subscribers of pages until closed."""

    def __init__(
        self,
        config: EventsConfig,
        loop: asyncio.AbstractEventLoop,
        state: NodeState,
        guarded: Container[int],
        sink: Publisher,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`guarded`: those that have tokens, as they are at each time. `clock`: seconds since 1970."""
        self._named = frozenset(config.namespaces)
        self._loop = loop
        self._state = state
        self._guarded = guarded
        self._sink = sink
        self._clock = clock
        self._format = FORMATS[config.format]()
        self._pending: list[Told] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._listing: Iterator[list[Told]] | None = None
        self._listed_s = float("-inf")
        self._wanted = False  # another listing
        self._timer = loop.call_later(TICK_S, self._tick)

    def acts(self) -> dict[type, Callable[[Any], None]]:
        """What carries out the actions of places."""
        return {PagesMoved: self.moved, PlacesVoid: self.void}

    def moved(self, action: PagesMoved) -> None:
        """Tell where these pages are now."""
        self._tell(action.namespace, zip(action.keys, action.places, strict=True))

    def void(self, _: PlacesVoid) -> None:
        """Tell that all is void, and then all pages anew."""
        self._pending.clear()
        payload = self._format.void(self._clock())
        if payload is None:
            self._sink.skip()
        else:
            self._sink.send(payload)
        self._listing = self._pages()

    def close(self) -> None:
        """Tell what waits, and end."""
        self._timer.cancel()
        self._flush()
        self._sink.close()

    # --- batches

    def _tell(self, namespace: int, pages: Iterable[tuple[bytes, str]]) -> None:
        if not self._is_told(namespace):
            return
        known = self._state.namespaces[namespace]
        name, tokens = split(known.name)[0], page_tokens(known.geometry)
        self._pending += [Told(name, tokens, key, _kind(place)) for key, place in pages]
        if len(self._pending) >= BATCH_PAGES:
            self._flush()
        elif self._flushing is None and self._pending:
            self._flushing = self._loop.call_later(BATCH_S, self._flush)

    def _is_told(self, namespace: int) -> bool:
        namespaces = self._state.namespaces
        if namespace not in namespaces:
            return False
        if self._named:
            return split(namespaces[namespace].name)[0] in self._named
        return namespace not in self._guarded

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        pending, self._pending = self._pending, []
        for start in range(0, len(pending), BATCH_PAGES):
            self._sink.send(self._format.batch(pending[start : start + BATCH_PAGES], self._clock()))

    # --- all pages

    def _tick(self) -> None:
        if self._sink.step():
            self._wanted = True
        now_s = self._loop.time()
        if self._wanted and self._listing is None and now_s >= self._listed_s + RELIST_S:
            self._wanted, self._listing = False, self._pages()
        if self._listing is not None:
            self._list_some(self._listing, now_s)
        pause_s = TICK_S if self._listing is None else BUSY_TICK_S
        self._timer = self._loop.call_later(pause_s, self._tick)

    def _list_some(self, listing: Iterator[list[Told]], now_s: float) -> None:
        pages = next(listing, None)
        if pages is None:
            self._listing, self._listed_s = None, now_s
        else:
            self._pending += pages
            self._flush()

    def _pages(self) -> Iterator[list[Told]]:
        """All pages, in small parts. Each part is true when it is taken."""
        for number in [namespace.number for namespace in self._state.namespaces]:
            cursor = 0
            while self._is_told(number):
                entries, cursor = self._state.list_pages(number, cursor, LISTED_PAGES)
                known = self._state.namespaces[number]
                name, tokens = split(known.name)[0], page_tokens(known.geometry)
                yield [Told(name, tokens, entry.key, _kind(entry.place)) for entry in entries]
                if not cursor:
                    break


def _kind(place: str) -> str:
    """Of a tier: its name has its path too, which subscribers need not know."""
    return place.partition(":")[0]


def open_feed(config: EventsConfig, loop: asyncio.AbstractEventLoop, state: NodeState) -> EventFeed:
    """Listen for subscribers. Raises StartupError."""
    publisher = Publisher(config, time.time_ns() // 1000)
    feed = EventFeed(config, loop, state, state.administration.guarded, publisher)
    logger.info("node %s: events of pages (%s) at %s", state.name, config.format, config.address)
    return feed


QUEUE_BATCHES: Final = 1024  # of up to 256 pages, for one slow subscriber
MAX_RECEIVED: Final = 64  # messages that are read in one step
MAX_MESSAGE_BYTES: Final = 1024  # of a subscriber


class Publisher:
    """Sends batches to all subscribers. Used in one thread."""

    def __init__(self, config: EventsConfig, first_sequence: int) -> None:
        """Raises StartupError where an address cannot be had."""
        self._topic = config.topic.encode()
        self._next = first_sequence
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._events = self._bound(config.address)
        except StartupError:
            self._zmq.destroy(linger=0)
            raise

    def _bound(self, address: str) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(zmq.XPUB)
        socket.set_hwm(QUEUE_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # hear of each subscriber, not of the first for a topic
        try:
            # the socket of `ipc` is for the node's user
            with _umask(0o177):
                socket.bind(address)
        except zmq.ZMQError as error:
            raise StartupError(
                f"events cannot be published at {address}: {error.strerror}: choose another address, or "
                "events.address = '' for none"
            ) from None
        return socket

    def send(self, payload: bytes) -> None:
        """One batch."""
        sequence = self._next
        self._next += 1
        self._events.send_multipart((self._topic, _number(sequence), payload), zmq.DONTWAIT)

    def skip(self) -> None:
        """Leave a gap in the numbers."""
        self._next += 1

    def step(self) -> bool:
        """Read what subscribers say. True: one has subscribed."""
        subscribed = False
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_RECEIVED):
                subscribed |= self._events.recv(zmq.DONTWAIT)[:1] == b"\x01"
        return subscribed

    def close(self) -> None:
        """End all connections; batches that wait are lost."""
        self._zmq.destroy(linger=0)


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
