"""Events of a real node, heard by a subscriber: what it knows is what the node has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pdserve.kvpool.node import events
from pdserve.kvpool.node.config import EventsConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.kv_events import block_hash, object_key
from tests.support.kvpool.nodes import Start, keys, open_namespace, put
from tests.support.waiting import soon

SOON_S = 20.0


class Listener:
    """A subscriber that knows blocks, or objects, as their readers do: at a gap it forgets all."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(address)
        self.known: set[int | str] = set()
        self.gaps = 0
        self._last = -1

    def hear(self, *wanted: int | str) -> None:
        """Listen until exactly these are known."""
        deadline_s = time.monotonic() + SOON_S
        while self.known != set(wanted):
            assert time.monotonic() < deadline_s, (len(self.known), len(wanted))
            if self._socket.poll(100):
                self._take(*self._socket.recv_multipart())

    def _take(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert topic == b"kv@pool@m"
        sequence = int.from_bytes(number, "big")
        if self._last >= 0 and sequence != self._last + 1:
            self.known.clear()
            self.gaps += 1
        self._last = sequence
        for event in msgspec.msgpack.decode(payload)[1]:
            if event.get("type") == "AllBlocksCleared":
                self.known.clear()
            names = event["block_hashes"] if "block_hashes" in event else [event.get("object_key")]
            stored = event.get("type") == "BlockStored" or event.get("event_type") == "stored"
            (self.known.update if stored else self.known.difference_update)(names)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("form", ["blocks", "objects"])
def test_a_subscriber_knows_what_the_node_has(
    start: Start, context: zmq.Context[Any], tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RELIST_S", 0.1)  # the node is a thread of this process

    def name(key: bytes, namespace: str = "ns") -> int | str:
        return block_hash(key) if form == "blocks" else object_key(namespace, key)

    address = f"ipc://{tmp_path}/events"
    pool = start(events=EventsConfig(address=address, format=form, topic="kv@pool@m"))
    connection = pool.connect()
    ns, other = open_namespace(connection), open_namespace(connection, "other")
    first, later, others = keys(900, 1), keys(5, 2), keys(3, 3)
    put(connection, ns, first[:300])
    early = Listener(context, address)
    early.hear(*map(name, first[:300]))  # it came late
    put(connection, ns, later)
    put(connection, other, others)
    rest = [name(key, "other") for key in others]
    early.hear(*map(name, [*first[:300], *later]), *rest)
    put(connection, ns, first)  # more than the node has room for: the oldest go
    present = connection.call(m.Exists(5, ns, first), soon())
    assert isinstance(present, m.Present)
    assert 0 < sum(present.mask) < 900
    there = [key for key, found in zip(first, present.mask, strict=True) if found]
    kept = connection.call(m.Exists(6, ns, later), soon())
    assert isinstance(kept, m.Present)
    there += [key for key, found in zip(later, kept.mask, strict=True) if found]
    left = connection.call(m.Exists(7, other, others), soon())
    assert isinstance(left, m.Present)
    rest = [one for one, found in zip(rest, left.mask, strict=True) if found]
    early.hear(*map(name, there), *rest)
    connection.call(m.Clear(8, ns), soon())
    early.hear(*rest)
    put(connection, ns, later)
    early.hear(*map(name, later), *rest)
    connection.close()

    pool.kill()
    gaps = early.gaps
    pool.restart(keep=False)
    early.hear(*map(name, later), *rest)
    Listener(context, address).hear(*map(name, later), *rest)
    # a restart is a gap where nothing else says that what was told before is void
    connection = pool.connect()
    put(connection, open_namespace(connection), first[:1])
    early.hear(*map(name, [*later, first[0]]), *rest)
    assert early.gaps > gaps
    connection.close()


def test_without_an_address_a_node_follows_nothing(start: Start) -> None:
    pool = start()
    connection = pool.connect()
    put(connection, open_namespace(connection), keys(1, 1))
    assert pool.node.state._places is None
    connection.close()
