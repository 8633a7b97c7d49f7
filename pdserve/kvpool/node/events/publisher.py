"""The sockets of a node's events. The node's thread sends and receives, and never waits for either.

libzmq has a thread of its own that moves the bytes. For each subscriber it keeps up to `queue_batches`
batches. One that reads too slowly loses the next ones, and sees it by their numbers.
Numbers go on growing over restarts, so that a restart is a gap too.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import zmq

from pdserve.errors import StartupError
from pdserve.kvpool.node.config.events import EventsConfig
from pdserve.kvpool.protocol.kv_events import END_OF_REPLAY, SEQUENCE_BYTES

REPLAY_BYTES: Final = 64 << 20
MAX_REPLAYS: Final = 16  # that are answered at a time; the oldest goes
REPLAY_STEP: Final = 64  # batches that are sent again in one step
MAX_RECEIVED: Final = 64  # messages that are read in one step
MAX_MESSAGE_BYTES: Final = 1024  # of a subscriber


@dataclass
class _Replay:
    """What a subscriber asked for: all batches from the number `sequence` on."""

    asker: bytes
    sequence: int


class Publisher:
    """Sends batches to all subscribers. Used in one thread."""

    def __init__(self, config: EventsConfig, first_sequence: int) -> None:
        """Raises StartupError where an address cannot be had."""
        self._topic = config.topic.encode()
        self._next = first_sequence
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.replay_batches)
        self._kept_bytes = 0
        self._replays: deque[_Replay] = deque()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._events = self._bound(zmq.XPUB, config.address, config.queue_batches)
            if config.replay_address:
                self._replay = self._bound(zmq.ROUTER, config.replay_address, config.queue_batches)
        except StartupError:
            self._zmq.destroy(linger=0)
            raise

    def _bound(self, kind: int, address: str, queue_batches: int) -> zmq.Socket[bytes]:
        socket = self._zmq.socket(kind)
        socket.set_hwm(queue_batches)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if kind == zmq.XPUB:
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
        if self._replay is None:
            return
        if len(self._kept) == self._kept.maxlen:
            self._drop_oldest()
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > REPLAY_BYTES:
            self._drop_oldest()

    def skip(self) -> None:
        """Leave a gap in the numbers. Nothing before it is sent again."""
        self._next += 1
        self._kept.clear()
        self._kept_bytes = 0

    def step(self) -> bool:
        """Read what subscribers say, and send some of what they asked for again. True: one has subscribed."""
        subscribed = self._read_subscriptions()
        if self._replay is not None:
            self._read_replays(self._replay)
            if self._replays:
                self._send_again(self._replay, self._replays[0])
        return subscribed

    @property
    def is_busy(self) -> bool:
        """Whether `step` has more to do at once."""
        return bool(self._replays)

    def close(self) -> None:
        """End all connections; batches that wait are lost."""
        self._zmq.destroy(linger=0)

    def _drop_oldest(self) -> None:
        _, payload = self._kept.popleft()
        self._kept_bytes -= len(payload)

    def _read_subscriptions(self) -> bool:
        subscribed = False
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_RECEIVED):
                subscribed |= self._events.recv(zmq.DONTWAIT)[:1] == b"\x01"
        return subscribed

    def _read_replays(self, socket: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_RECEIVED):
                frames = socket.recv_multipart(zmq.DONTWAIT)
                if len(frames) == 3 and len(frames[2]) == SEQUENCE_BYTES:
                    if len(self._replays) == MAX_REPLAYS:
                        self._replays.popleft()
                    self._replays.append(_Replay(frames[0], int.from_bytes(frames[2], "big")))

    def _send_again(self, socket: zmq.Socket[bytes], replay: _Replay) -> None:
        first = self._kept[0][0] if self._kept else self._next
        start = max(0, replay.sequence - first)
        step = [self._kept[place] for place in range(start, min(len(self._kept), start + REPLAY_STEP))]
        frames = [(self._topic, _number(sequence), payload) for sequence, payload in step]
        if len(step) < REPLAY_STEP:
            self._replays.popleft()
            frames.append((b"", END_OF_REPLAY, b""))
        else:
            replay.sequence = step[-1][0] + 1
        for frame in frames:
            # a ROUTER drops what its peer does not take
            socket.send_multipart((replay.asker, b"", *frame), zmq.DONTWAIT)


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
