"""The UCX data path against a tiny node in another process, which is stopped and killed at bad moments."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from pdserve.errors import PoolTimeout, PoolUnavailable, StartupError
from pdserve.kvpool.core.events import CancelTransfers, StartSend, TransferDone
from pdserve.kvpool.node.ucx.worker import WINDOW_BYTES, Peer, UcxWorker
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.transports import ucx_client
from pdserve.kvpool.transports.base import OK
from pdserve.kvpool.transports.ucx import UcxLibrary, UcxLink
from pdserve.kvpool.transports.ucx_client import UcxConnection
from tests.support.kvpool.connectors import connect
from tests.support.suite.extended import extended

MIB = 1 << 20
MAP_NORESERVE = 0x4000
BIG_BYTES = 192 * MIB  # long enough under way to be interrupted
NODE = Path(__file__).parents[2] / "support" / "kvpool" / "ucx_node.py"


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def key(n: int) -> bytes:
    return n.to_bytes(KEY_BYTES, "little")


class Node:
    """The tiny node's process."""

    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        self.address = f"unix:{path}"
        command = [sys.executable, str(NODE), str(path), str(2 * BIG_BYTES)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment})
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self._before: dict[str, int] = {}

    def connect(self, checksum: bool = True, ucx: dict[str, str] | None = None) -> UcxConnection:
        made = connect(self.address, soon(), "ucx", checksum=checksum, ucx=ucx)
        assert isinstance(made, UcxConnection)
        return made

    def forget(self) -> None:
        """What was counted before is another test's."""
        self._before = {}
        self._before = self.counters()

    def counters(self) -> dict[str, int]:
        connection = self.connect()
        report = connection.call(m.Status(1), soon())
        connection.close()
        assert isinstance(report, m.StatusReport)
        return {name: count - self._before.get(name, 0) for name, count in report.counters.items()}

    def wait_for(self, name: str, count: int) -> None:
        deadline = soon()
        while self.counters()[name] < count:
            assert time.monotonic() < deadline, f"{name} never reached {count}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(**environment: str) -> Node:
        nodes.append(Node(tmp_path / f"{len(nodes)}.sock", environment))
        return nodes[-1]

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node") / "sock", {})
    yield node
    node.stop()


@pytest.fixture
def node(shared_node: Node) -> Node:
    """One for all tests that leave it alive."""
    shared_node.forget()
    return shared_node


def random_page(segment_bytes: list[int], seed: int) -> PageBuffers:
    generator = np.random.default_rng(seed)
    return tuple(generator.integers(0, 256, length, np.uint8) for length in segment_bytes)


def empty_page(segment_bytes: list[int]) -> PageBuffers:
    return tuple(np.zeros(length, np.uint8) for length in segment_bytes)


def messages_of(keys: list[bytes], segment_bytes: list[int]) -> list[list[bytes]]:
    """Keys as one message after the other takes them."""
    most = m.pages_a_message(sum(segment_bytes))
    return [keys[start : start + most] for start in range(0, len(keys), most)]


def reserve(connection: UcxConnection, keys: list[bytes], segment_bytes: list[int]) -> list[m.Grant]:
    grants: list[m.Grant] = []
    for part in messages_of(keys, segment_bytes):
        reply = connection.call(m.Reserve(1, 1, part, segment_bytes), soon())
        assert isinstance(reply, m.Reserved)
        grants += reply.grants
    return grants


def commit(connection: UcxConnection, grants: list[m.Grant], checksums: list[int]) -> bytes:
    slots, sequences = [g.slot for g in grants], [g.sequence for g in grants]
    reply = connection.call(m.Commit(2, slots, sequences, checksums), soon())
    assert isinstance(reply, m.Committed)
    return reply.mask


def put(connection: UcxConnection, keys: list[bytes], pages: list[PageBuffers]) -> bytes:
    grants = reserve(connection, keys, [segment.nbytes for segment in pages[0]])
    return commit(connection, grants, connection.write_pages(grants, pages, soon()))


def pin(connection: UcxConnection, keys: list[bytes], segment_bytes: list[int]) -> list[m.Pin]:
    pins: list[m.Pin] = []
    for part in messages_of(keys, segment_bytes):
        reply = connection.call(m.Get(3, 1, part, segment_bytes), soon())
        assert isinstance(reply, m.Got)
        pins += reply.pins
    return pins


@pytest.mark.parametrize("environment", [{}, extended({"UCX_RNDV_SCHEME": "put_zcopy"})], ids=str)
def test_nothing_lands_in_the_buffers_after_a_read_timed_out(
    start_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    node = start_node(**environment)
    connection = node.connect()
    page = np.full(BIG_BYTES, 7, np.uint8)
    assert put(connection, [key(1)], [(page,)]) == b"\1"
    buffer = np.zeros(BIG_BYTES, np.uint8)
    link, give_up = connection._link, soon()
    progress, began, stopped = link.progress, time.monotonic(), list[float]()

    def stop_when_bytes_arrive() -> bool:
        happened = progress()
        if buffer[0] and not stopped:
            node.process.send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())
        return happened

    def clock() -> float:
        """Stands still until the node is stopped."""
        now = time.monotonic()
        return began + (now - stopped[0] if stopped else max(0.0, now - give_up))

    monkeypatch.setattr(link, "progress", stop_when_bytes_arrive)
    monkeypatch.setattr(ucx_client, "time", SimpleNamespace(monotonic=clock))
    pins = pin(connection, [key(1)], [BIG_BYTES])
    worker_descriptor = connection._link.epoll_fd
    with pytest.raises(PoolTimeout) as caught:
        connection.read_pages(pins, [(buffer,)], began + 0.3)
    with pytest.raises(OSError):
        os.fstat(worker_descriptor)  # UCX's worker is gone, whoever still holds the exception
    assert caught.traceback
    arrived = np.count_nonzero(buffer)
    assert 0 < arrived < BIG_BYTES, "the node was to be stopped in mid-transfer"
    node.process.send_signal(signal.SIGCONT)
    node.wait_for("send_failed", 1)  # the node has run on and given up
    assert np.count_nonzero(buffer) == arrived


CLIENT = """
import sys, time, numpy as np
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connector import ConfiguredConnector
connector = ConfiguredConnector(PoolClientConfig(data_path="ucx"), "victim")
connection = connector.connect(sys.argv[1], time.monotonic() + 20)
length = int(sys.argv[2])
requests = [m.Reserve(n, 1, [bytes([n] * 32)], [length]) for n in (1, 2)]
grants = [connection.call(one, time.monotonic() + 20).grants[0] for one in requests]
print("reserved", flush=True)
connection.write_pages(grants[:1], [(np.ones(length, np.uint8),)], time.monotonic() + 60)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("line", [b"reserved\n", extended(b"written\n")])
def test_killed_client_fails_its_transfers(node: Node, line: bytes) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, node.address, str(BIG_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    while client.stdout.readline() != line:
        assert client.poll() is None
    client.kill()
    client.wait()
    node.wait_for("receive_failed", 1)
    counters = node.counters()
    assert counters["received"] + counters["receive_failed"] == 2


# `connect` of the node, loaded before libc's. It stops the client, so that it cannot accept, kills it as soon
# as its kernel has answered, and returns when the reset is there.
def test_aborted_reservations_end_and_the_connection_goes_on(node: Node) -> None:
    connection = node.connect()
    grants = reserve(connection, [key(i) for i in range(50)], [MIB, MIB])
    connection.post(m.Abort([g.slot for g in grants], [g.sequence for g in grants]))
    page = random_page([MIB, MIB], 3)
    assert put(connection, [key(100)], [page]) == b"\1"
    copy = empty_page([MIB, MIB])
    assert connection.read_pages(pin(connection, [key(100)], [MIB, MIB]), [copy], soon()) == [OK]
    assert all(np.array_equal(a, b) for a, b in zip(page, copy, strict=True))
    assert node.counters()["receive_failed"] == 50
    connection.close()


def test_a_page_that_comes_after_it_was_aborted_leaves_the_connection_and_no_memory_behind(
    node: Node,
) -> None:
    connection = node.connect()
    process = psutil.Process(node.process.pid)
    page = random_page([8 * MIB], 1)
    for n in range(12):
        [grant] = reserve(connection, [key(n)], [8 * MIB])
        connection.post(m.Abort([grant.slot], [grant.sequence]))
        assert connection.call(m.Status(1), soon())  # the node has read it
        connection.write_pages([grant], [page], soon())
        if n == 2:
            before = process.memory_info().data
    assert put(connection, [key(99)], [page]) == b"\1"
    assert process.memory_info().data - before < 40 * MIB
    connection.close()


@pytest.mark.parametrize(
    ("options", "lengths"),
    [({}, [MIB] * 4), ({}, [1 << 40]), ({"RNDV_THRESH": "inf"}, [BIG_BYTES])],
    ids=["announced", "announced and larger than memory", "a part has come"],
)
def test_messages_that_nobody_asked_for_end_their_connection(
    node: Node, options: dict[str, str], lengths: list[int]
) -> None:
    hostile, other = node.connect(ucx=options), node.connect()
    memory = mmap.mmap(-1, max(lengths), flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    message = np.frombuffer(memory, np.uint8)
    sent = [hostile._link.send(message[:length], (1 << 40) + n) for n, length in enumerate(lengths)]
    deadline = soon()
    while hostile._link.alive:
        hostile._link.progress()
        assert time.monotonic() < deadline, "the node keeps them"
    assert put(other, [key(1)], [random_page([MIB], 2)]) == b"\1"
    hostile._link.destroy(sent)
    hostile.close()
    other.close()


def test_page_longer_than_its_slot_ends_the_connection_not_the_node(node: Node) -> None:
    connection = node.connect()
    grants = reserve(connection, [key(1), key(2)], [MIB])
    page = random_page([2 * MIB], 1)
    with contextlib.suppress(PoolUnavailable):  # a commit may be answered before the connection ends
        assert commit(connection, grants[:1], connection.write_pages(grants[:1], [page], soon())) == b"\0"
    node.wait_for("receive_failed", 2)
    connection.close()


def test_stranger_at_the_listener_is_turned_away(node: Node) -> None:
    connection = node.connect()
    info = connection.welcome.ucx
    assert info is not None
    library = UcxLibrary()
    stranger = UcxLink(library, library.context({}))
    stranger.connect("127.0.0.1", info.port)
    operations = [stranger.send(np.zeros(8, np.uint8), 1)]
    deadline = soon()
    while stranger.alive:
        stranger.progress()
        assert time.monotonic() < deadline
    assert put(connection, [key(1)], [random_page([4096], 1)]) == b"\1"
    stranger.destroy(operations)
    connection.close()


class FakeLink:
    """A link without UCX: what is sent is completed when told, or at once."""

    alive = True

    def __init__(self, *, held: bool = False, broken: bool = False) -> None:
        self.epoll_fd = os.eventfd(0)
        self.sent: list[int] = []
        self.held = held
        self.broken = broken
        self.ended = False
        self.operations: list[SimpleNamespace] = []

    def send(self, buffer: np.ndarray, tag: int) -> SimpleNamespace:
        if self.broken:
            raise PoolUnavailable("the endpoint failed")
        self.sent.append(tag)
        self.operations.append(SimpleNamespace(completed=not self.held, ok=True, release=lambda: None))
        return self.operations[-1]

    def receive_greeting(self, buffer: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(completed=True, ok=True, release=lambda: None)

    def progress(self) -> bool:
        assert not self.ended
        return False

    def accept(self) -> bool:
        return True

    def unexpected(self) -> None:
        return None

    def arm(self) -> bool:
        assert not self.ended
        return True

    def destroy(self, operations: list[object]) -> None:
        self.ended = True
        os.close(self.epoll_fd)

    def complete(self) -> None:
        for operation in self.operations:
            operation.completed = True


class Driven:
    """A UcxWorker whose thread is the test's."""

    def __init__(self, *links: FakeLink) -> None:
        self.done: list[TransferDone] = []
        self.lost: list[int] = []
        self.worker = UcxWorker(np.zeros(MIB, np.uint8), self.tell)
        for number, link in enumerate(links):
            peer = Peer(number, link, time.monotonic())  # type: ignore[arg-type]
            peer.greeted = True
            self.worker.add(peer)

    def tell(self, done: list[TransferDone], lost: list[tuple[int, str]]) -> None:
        self.done += done
        self.lost += [connection for connection, _ in lost]

    def send(self, connection: int, *tags: int) -> None:
        for tag in tags:
            action = StartSend(connection, tag, 0, (MIB,))
            assert self.worker.give(lambda action=action: self.worker.perform(action))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.worker.step(0.0)


def test_a_small_read_is_sent_beside_the_pages_of_a_big_one_and_each_ends_once() -> None:
    big, small = FakeLink(held=True), FakeLink()
    driven = Driven(big, small)
    driven.send(0, *range(100, 150))
    driven.steps(3)
    driven.send(1, 200)
    driven.steps(1)
    assert small.sent == [200]
    assert len(big.sent) == WINDOW_BYTES // MIB, "UCX has no more of it at a time"
    driven.worker.perform(CancelTransfers(0, (149,)))
    for _ in range(50):
        big.complete()
        driven.steps(1)
    assert big.sent == list(range(100, 149))
    assert sorted((one.tag, one.ok) for one in driven.done) == [
        *((tag, tag != 149) for tag in range(100, 150)),
        (200, True),
    ]


def test_a_connection_that_ends_as_a_send_begins_is_left_alone_from_then_on() -> None:
    broken, other = FakeLink(broken=True), FakeLink()
    driven = Driven(broken, other)
    driven.send(0, 100, 101)
    driven.send(1, 200)
    driven.steps(3)
    assert broken.ended
    assert driven.lost == [0]
    assert sorted((one.tag, one.ok) for one in driven.done) == [(100, False), (101, False), (200, True)]
    driven.send(0, 102)
    driven.steps(1)
    assert driven.done[-1] == TransferDone(0, 102, False)


def test_a_thread_that_ends_reports_every_transfer_and_refuses_what_comes_later() -> None:
    link = FakeLink(held=True)
    driven = Driven(link)
    driven.send(0, 100)
    driven.steps(1)
    driven.send(0, 101)
    driven.worker.stop()
    driven.worker.run(lambda error: None)
    assert link.ended
    assert sorted((one.tag, one.ok) for one in driven.done) == [(100, False), (101, False)]
    assert not driven.worker.give(lambda: None)


def test_options_reach_ucx() -> None:
    """Several rails, say; of both ends: each makes its contexts here."""
    options = {"MAX_EAGER_RAILS": "2", "MAX_RNDV_RAILS": "3", "NET_DEVICES": "lo"}
    config = UcxLibrary().context(options).config
    assert {name: config[name] for name in options} == options


@pytest.mark.parametrize("wrong", [{"NO_SUCH": "1"}, {"MAX_RNDV_RAILS": "many"}], ids=str)
def test_an_option_that_ucx_does_not_take_is_named_in_one_line(wrong: dict[str, str]) -> None:
    with pytest.raises(StartupError) as caught:
        UcxLibrary().context({"NET_DEVICES": "lo", **wrong})
    text, (name, value) = str(caught.value), *wrong.items()
    assert f"{name} = '{value}'" in text
    assert "NET_DEVICES" not in text
    assert len(text.splitlines()) == 1


def test_importing_the_transport_loads_no_ucx() -> None:
    code = "import sys, pdserve.kvpool.transports.ucx_client, pdserve.kvpool.node.ucx.server as s; "
    code += "sys.exit('ucxx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_client_loads_ucx_when_it_is_made_and_only_where_it_is_told_to_take_it() -> None:
    code = """
import sys
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
for path in ("auto", "tcp", "ucx"):
    nodes = [PoolNodeRef(node="node", address="tcp:pool-a:7700")]
    config = PoolClientConfig(nodes=nodes, data_path=path)
    PoolClient(config, "ns", {}).close()
    print("ucxx._lib.libucxx" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
