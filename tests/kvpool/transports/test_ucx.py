"""The UCX data path against a node in another process, which is stopped at bad moments, and its thread."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from pdserve.errors import PoolTimeout, PoolUnavailable, StartupError
from pdserve.kvpool.core.events import CancelTransfers, StartSend, TransferDone
from pdserve.kvpool.node.ucx.worker import WINDOW_BYTES, Peer, UcxWorker
from pdserve.kvpool.transports import ucx_client
from pdserve.kvpool.transports.base import OK
from pdserve.kvpool.transports.ucx import UcxLibrary, UcxLink
from pdserve.kvpool.transports.ucx_client import UcxConnection
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import StartProcess, small_config
from tests.support.kvpool.pools import ProcessPool, running_node
from tests.support.kvpool.raw_client import Client, keys, pages_of, same
from tests.support.suite.extended import extended
from tests.support.waiting import soon, until

MIB = 1 << 20
MAP_NORESERVE = 0x4000
BIG_BYTES = 192 * MIB  # long enough under way to be interrupted
_names = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """One for all tests that leave it alive."""
    with running_node(small_config(capacity_bytes=256 * MIB), tmp_path_factory.mktemp("node")) as pool:
        yield pool


@pytest.fixture
def start_big(start_process: StartProcess) -> Callable[[], ProcessPool]:
    """Starts a node with room for two big pages."""
    return lambda: start_process(capacity_bytes=2 * BIG_BYTES, page_bytes=BIG_BYTES)


@contextlib.contextmanager
def client(node: ProcessPool, *layout: int, ucx: dict[str, str] | None = None) -> Iterator[Client]:
    with contextlib.closing(connect(node.address, soon(), "ucx", ucx=ucx)) as connection:
        yield Client(connection, f"ns{next(_names)}", list(layout))


def link_of(client: Client) -> UcxLink:
    assert isinstance(client.connection, UcxConnection)
    return client.connection._link


def nothing_is_held(node: ProcessPool) -> bool:
    status = node.status()
    return (status.pins, status.reserved_bytes, status.quarantined_bytes) == (0, 0, 0)


def serves(node: ProcessPool) -> bool:
    """Another client stores a page and reads it."""
    with client(node, MIB, MIB) as other:
        names, pages = keys(1), pages_of(other.layout, 1, seed=3)
        other.put(names, pages)
        outcomes, [got] = other.get(names)
    return outcomes == [OK] and same(got, pages[0])


@pytest.mark.parametrize("environment", [{}, extended({"UCX_RNDV_SCHEME": "put_zcopy"})], ids=str)
def test_nothing_lands_in_the_buffers_after_a_read_timed_out(
    start_big: Callable[[], ProcessPool], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    node = start_big()
    with client(node, BIG_BYTES) as reader:
        names, buffer = keys(1), np.zeros(BIG_BYTES, np.uint8)
        reader.put(names, [[np.full(BIG_BYTES, 7, np.uint8)]])
        link, give_up = link_of(reader), soon()
        progress, began, stopped = link.progress, time.monotonic(), list[float]()

        def stop_when_bytes_arrive() -> bool:
            happened = progress()
            if buffer[0] and not stopped:
                node.pause()
                stopped.append(time.monotonic())
            return happened

        def clock() -> float:
            """Stands still until the node is stopped."""
            now = time.monotonic()
            return began + (now - stopped[0] if stopped else max(0.0, now - give_up))

        monkeypatch.setattr(link, "progress", stop_when_bytes_arrive)
        monkeypatch.setattr(ucx_client, "time", SimpleNamespace(monotonic=clock))
        pins, worker_descriptor = reader.pin(names), link.epoll_fd
        with pytest.raises(PoolTimeout) as caught:
            reader.connection.read_pages(pins, [(buffer,)], began + 0.3)
        with pytest.raises(OSError):
            os.fstat(worker_descriptor)  # UCX's worker is gone, whoever still holds the exception
        assert caught.traceback
        arrived = np.count_nonzero(buffer)
        assert 0 < arrived < BIG_BYTES, "the node was to be stopped in mid-transfer"
    node.resume()
    until(lambda: nothing_is_held(node))  # it has run on and given up
    assert np.count_nonzero(buffer) == arrived


CLIENT = """
import sys, time, numpy as np
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connector import ConfiguredConnector
connector = ConfiguredConnector(PoolClientConfig(data_path="ucx"), "victim")
connection = connector.connect(sys.argv[1], time.monotonic() + 20)
length = int(sys.argv[2])
connection.call(m.OpenNamespace(9, "ns", {}), time.monotonic() + 20)
requests = [m.Reserve(n, 1, [bytes([n] * 32)], [length]) for n in (1, 2)]
grants = [connection.call(one, time.monotonic() + 20).grants[0] for one in requests]
print("reserved", flush=True)
connection.write_pages(grants[:1], [(np.ones(length, np.uint8),)], time.monotonic() + 60)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("line", [b"reserved\n", extended(b"written\n")])
def test_killed_client_fails_its_transfers(start_big: Callable[[], ProcessPool], line: bytes) -> None:
    node = start_big()
    command = [sys.executable, "-c", CLIENT, node.address, str(BIG_BYTES)]
    victim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert victim.stdout is not None
    while victim.stdout.readline() != line:
        assert victim.poll() is None
    assert node.status().reserved_bytes == 2 * BIG_BYTES
    victim.kill()
    victim.wait()
    until(lambda: nothing_is_held(node))


def test_aborted_reservations_end_and_the_connection_goes_on(node: ProcessPool) -> None:
    with client(node, MIB, MIB) as writer:
        for _ in range(4):
            writer.abort(writer.reserve(keys(16)))
        names, pages = keys(1), pages_of(writer.layout, 1, seed=3)
        writer.put(names, pages)
        outcomes, [got] = writer.get(names)
        assert outcomes == [OK]
        assert same(got, pages[0])
        until(lambda: nothing_is_held(node))


def test_a_page_that_comes_after_it_was_aborted_leaves_the_connection_and_no_memory_behind(
    node: ProcessPool,
) -> None:
    with client(node, 8 * MIB) as writer:
        process, page = psutil.Process(node.pid), pages_of(writer.layout, 1, seed=1)
        for n in range(12):
            grants = writer.reserve(keys(1))
            writer.abort(grants)
            writer.status()  # the node has read it
            writer.connection.write_pages(grants, page, soon())
            if n == 2:
                before = process.memory_info().data
        writer.put(keys(1), page)
        assert process.memory_info().data - before < 40 * MIB


@pytest.mark.parametrize(
    ("options", "lengths"),
    [({}, [MIB] * 4), ({}, [1 << 40]), ({"RNDV_THRESH": "inf"}, [BIG_BYTES])],
    ids=["announced", "announced and larger than memory", "a part has come"],
)
def test_messages_that_nobody_asked_for_end_their_connection(
    node: ProcessPool, options: dict[str, str], lengths: list[int]
) -> None:
    memory = mmap.mmap(-1, max(lengths), flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    with client(node, MIB, ucx=options) as hostile:
        link, message = link_of(hostile), np.frombuffer(memory, np.uint8)
        sent = [link.send(message[:length], (1 << 40) + n) for n, length in enumerate(lengths)]
        until(lambda: not (link.progress() or link.alive), "the node keeps them")
        assert serves(node)
        link.destroy(sent)


def test_page_longer_than_its_slot_ends_the_connection_not_the_node(node: ProcessPool) -> None:
    with client(node, MIB) as writer:
        grants = writer.reserve(keys(2))
        with contextlib.suppress(PoolUnavailable):  # a commit may be answered before the connection ends
            sums = writer.connection.write_pages(grants[:1], pages_of([2 * MIB], 1, seed=1), soon())
            assert writer.commit(grants[:1], sums) == [0]
        until(lambda: nothing_is_held(node))
    assert serves(node)


def test_stranger_at_the_listener_is_turned_away(node: ProcessPool) -> None:
    with client(node, MIB) as known:
        info = known.connection.welcome.ucx
        assert info is not None
        library = UcxLibrary()
        stranger = UcxLink(library, library.context({}))
        stranger.connect("127.0.0.1", info.port)
        operations = [stranger.send(np.zeros(8, np.uint8), 1)]
        until(lambda: not (stranger.progress() or stranger.alive))
        known.put(keys(1), pages_of(known.layout, 1, seed=2))
        stranger.destroy(operations)


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
