"""The sockets of a node's events. The node's thread sends and receives, and never waits for either.

libzmq has a thread of its own that moves the bytes. For each subscriber it keeps up to `QUEUE_BATCHES`
batches. One that reads too slowly loses the next ones, and sees it by their numbers: it subscribes again, and
hears of all pages anew. Numbers go on growing over restarts, so that a restart is a gap too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import zmq

from pdserve.errors import StartupError
from pdserve.kvpool.node.config.events import EventsConfig
from pdserve.kvpool.protocol.kv_events import SEQUENCE_BYTES

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
