"""The sockets of a node's events, with subscribers over real ZeroMQ: those that do not read,
and those that send nonsense.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from pdserve.errors import StartupError
from pdserve.kvpool.node import events as module
from pdserve.kvpool.node.config import EventsConfig
from pdserve.kvpool.node.events import Publisher

FIRST = 1000
SOON_S = 20.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def opened(**options: Any) -> Publisher:
        made.append(Publisher(EventsConfig(**{"address": f"ipc://{tmp_path}/events"} | options), FIRST))
        return made[-1]

    yield opened
    for one in made:
        one.close()


def connect(context: zmq.Context[Any], tmp_path: Path, kind: int, name: str, hwm: int = 0) -> zmq.Socket[Any]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, int(SOON_S * 1e3))
    if hwm:
        socket.set_hwm(hwm)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(f"ipc://{tmp_path}/{name}")
    return socket


def subscribe(
    context: zmq.Context[Any], tmp_path: Path, publisher: Publisher, hwm: int = 0
) -> zmq.Socket[Any]:
    """A subscriber that the publisher has heard of."""
    socket = connect(context, tmp_path, zmq.SUB, "events", hwm)
    stepped(publisher.step)
    return socket


def stepped(step: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not step():
        assert time.monotonic() < deadline_s
        time.sleep(0)  # libzmq's thread takes the message in


def test_a_subscriber_that_does_not_read_loses_batches_and_sees_a_gap(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BATCHES", 10)
    publisher = make()
    slow = subscribe(context, tmp_path, publisher, hwm=10)
    sent = 20_000
    for _ in range(sent):  # returns at once each time
        publisher.send(b"x" * 10_000)
    numbers = []
    deadline_s = time.monotonic() + SOON_S
    last = 0
    while last < FIRST + sent:  # what is sent now comes as soon as the queue has room
        publisher.send(b"later")
        while slow.poll(20):
            numbers.append(last := int.from_bytes(slow.recv_multipart()[1], "big"))
        assert time.monotonic() < deadline_s
    assert len(numbers) < sent
    assert any(after - before > 1 for before, after in pairwise(numbers))
    assert numbers == sorted(numbers)


def test_nonsense_is_passed_over(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path
) -> None:
    publisher = make()
    subscriber = subscribe(context, tmp_path, publisher)
    loud = connect(context, tmp_path, zmq.XSUB, "events")
    for message in (b"", b"x", b"\x02", b"x" * 5000):  # the last is too long: libzmq ends the connection
        loud.send(message)
    publisher.step()
    publisher.send(b"one")
    assert subscriber.recv_multipart()[2] == b"one"


def test_the_socket_is_for_the_nodes_user(make: Callable[..., Publisher], tmp_path: Path) -> None:
    make()
    assert (tmp_path / "events").stat().st_mode & 0o077 == 0


def test_an_address_that_cannot_be_had_is_named(make: Callable[..., Publisher]) -> None:
    with pytest.raises(StartupError, match=r"events cannot be published at ipc:///nowhere/at/all") as error:
        make(address="ipc:///nowhere/at/all")
    assert "\n" not in str(error.value)
