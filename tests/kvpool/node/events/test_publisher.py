"""The sockets of a node's events, with subscribers over real ZeroMQ: those that lose batches and ask again,
those that do not read, and those that send nonsense.
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
from pdserve.kvpool.node.config.events import EventsConfig
from pdserve.kvpool.node.events import publisher as module
from pdserve.kvpool.node.events.publisher import Publisher
from pdserve.kvpool.protocol.kv_events import END_OF_REPLAY

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
        addresses = {"address": f"ipc://{tmp_path}/events", "replay_address": f"ipc://{tmp_path}/replay"}
        made.append(Publisher(EventsConfig(**addresses | options), FIRST))
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


def replayed(publisher: Publisher, asker: zmq.Socket[Any], sequence: int) -> list[tuple[int, bytes]]:
    """What the publisher sends again from there on, up to the end."""
    asker.send_multipart((b"", sequence.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    deadline_s = time.monotonic() + SOON_S
    while time.monotonic() < deadline_s:
        publisher.step()
        while asker.poll(0):
            _, _, number, payload = asker.recv_multipart()
            if number == END_OF_REPLAY:
                return found
            found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError("the replay does not end")


def test_batches_have_topic_number_and_payload(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path
) -> None:
    publisher = make(topic="kv@pool@m")
    subscriber = subscribe(context, tmp_path, publisher)
    for payload in (b"one", b"two"):
        publisher.send(payload)
    publisher.skip()
    publisher.send(b"three")
    numbers = [FIRST, FIRST + 1, FIRST + 3]
    for number, payload in zip(numbers, (b"one", b"two", b"three"), strict=True):
        assert subscriber.recv_multipart() == [b"kv@pool@m", number.to_bytes(8, "big"), payload]


def test_what_was_lost_is_sent_again_to_who_asks(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path
) -> None:
    publisher = make(replay_batches=200)
    for number in range(300):
        publisher.send(b"%d" % number)
    asker = connect(context, tmp_path, zmq.DEALER, "replay")
    everything = [(FIRST + number, b"%d" % number) for number in range(100, 300)]
    assert replayed(publisher, asker, 0) == everything
    assert replayed(publisher, asker, FIRST + 290) == everything[-10:]
    assert replayed(publisher, asker, FIRST + 300) == []
    assert replayed(publisher, asker, (1 << 64) - 1) == []
    publisher.skip()  # what was told before is void
    publisher.send(b"new")
    assert replayed(publisher, asker, 0) == [(FIRST + 301, b"new")]


def test_kept_batches_are_bounded_in_bytes(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_BYTES", 1000)
    publisher = make()
    for _ in range(50):
        publisher.send(b"x" * 100)
    assert len(replayed(publisher, connect(context, tmp_path, zmq.DEALER, "replay"), 0)) == 10


def test_a_subscriber_that_does_not_read_loses_batches_and_sees_a_gap(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path
) -> None:
    publisher = make(queue_batches=10)
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
    publisher.send(b"one")
    asker = connect(context, tmp_path, zmq.DEALER, "replay")
    for frames in ((b"",), (b"", b"short"), (b"", b"12345678", b"more"), (b"a", b"b", b"c", b"d")):
        asker.send_multipart(frames)
    assert replayed(publisher, asker, 0) == [(FIRST, b"one")]
    loud = connect(context, tmp_path, zmq.DEALER, "replay")
    loud.send_multipart((b"", b"x" * 5000))  # too long: libzmq ends the connection
    assert replayed(publisher, asker, 0) == [(FIRST, b"one")]


def test_more_replays_than_are_answered_at_a_time_cost_the_oldest(
    make: Callable[..., Publisher], context: zmq.Context[Any], tmp_path: Path
) -> None:
    publisher = make()
    publisher.send(b"one")
    asker = connect(context, tmp_path, zmq.DEALER, "replay")
    for _ in range(10 * module.MAX_REPLAYS):
        asker.send_multipart((b"", bytes(8)))
    deadline_s = time.monotonic() + SOON_S
    while not publisher.is_busy:
        publisher.step()
        assert time.monotonic() < deadline_s
    assert len(publisher._replays) <= module.MAX_REPLAYS


def test_the_socket_is_for_the_nodes_user(make: Callable[..., Publisher], tmp_path: Path) -> None:
    make()
    assert (tmp_path / "events").stat().st_mode & 0o077 == 0


def test_an_address_that_cannot_be_had_is_named(make: Callable[..., Publisher]) -> None:
    with pytest.raises(StartupError, match=r"events cannot be published at ipc:///nowhere/at/all") as error:
        make(address="ipc:///nowhere/at/all")
    assert "\n" not in str(error.value)
