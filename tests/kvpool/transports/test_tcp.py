"""The client's end of the TCP data path against nodes that are slow, wrong or hostile; and with TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pdserve.errors import PoolRefused, PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import checksum_page
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.tcp.client import TcpConnection
from pdserve.kvpool.transports.tcp.stream import GREETED_TAG, HEADER, TICKET_BYTES, WITHDRAWN
from pdserve.security.tls import Certificates
from tests.support.certificates import Authority
from tests.support.kvpool.tcp_server import RunningServer, running
from tests.support.waiting import soon

KIB = 1024
MIB = 1 << 20
TICKET = bytes(range(TICKET_BYTES))


class Control:
    """A control connection on which nothing is asked."""

    peer_host = "127.0.0.1"

    def __init__(self, info: m.TcpInfo | None) -> None:
        self.welcome = m.Welcome(1, "n0", 1, "", "tcp", 30.0, tcp=info)
        self.last_words: Exception | None = None
        self.closed = False

    def take_pushed(self) -> None:
        if self.last_words is not None:
            raise self.last_words

    def close(self) -> None:
        self.closed = True


def connect(control: Control, tls: ssl.SSLContext | None = None, deadline_s: float = 0.0) -> TcpConnection:
    return TcpConnection.open(cast(ControlChannel, control), True, deadline_s or soon(), tls)


class FalseNode:
    """A data connection whose other end the test plays."""

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.control = Control(m.TcpInfo("", listening.getsockname()[1], TICKET, False))
        accepting = threading.Thread(target=self._accept, args=(listening,))
        accepting.start()
        self.connection = connect(self.control)
        accepting.join()
        listening.close()

    def _accept(self, listening: socket.socket) -> None:
        self.sock, _ = listening.accept()
        self.sock.settimeout(20.0)
        assert self.sock.recv(TICKET_BYTES, socket.MSG_WAITALL) == TICKET
        self.send(GREETED_TAG, b"")

    def send(self, tag: int, page: bytes, length: int | None = None) -> None:
        """A page, or the beginning of one."""
        self.sock.sendall(HEADER.pack(tag, len(page) if length is None else length) + page)

    def has_ended(self) -> bool:
        """The client closes both connections."""
        try:
            while self.sock.recv(MIB):
                pass
        except ConnectionError:
            pass
        return self.control.closed


@pytest.fixture
def node() -> Iterator[FalseNode]:
    node = FalseNode()
    yield node
    node.connection.close()
    node.sock.close()


def pin(tag: int, checksum: int = 0) -> m.Pin:
    return m.Pin(m.HIT, tag, 0, checksum, tag, tag)


def buffer(length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros(length, np.uint8)


# --- reads


def test_nothing_is_written_into_the_buffers_after_a_read_timed_out(node: FalseNode) -> None:
    page = buffer(MIB)
    node.send(101, bytes([1]) * (MIB // 2), MIB)
    with pytest.raises(PoolTimeout):
        node.connection.read_pages([pin(101)], [[page]], soon(0.2))
    with contextlib.suppress(ConnectionError):  # nobody reads
        node.sock.sendall(bytes([2]) * (MIB // 2))
    assert (page[: MIB // 2] == 1).all()
    assert not page[MIB // 2 :].any()
    assert node.has_ended()
    with pytest.raises(PoolUnavailable):
        node.connection.read_pages([pin(102)], [[page]], soon())


def test_bytes_that_nobody_wants_do_not_put_the_deadline_off(node: FalseNode) -> None:
    def flood() -> None:
        node.send(50, b"", 1 << 60)
        try:
            while True:
                node.sock.sendall(bytes(64 * KIB))
        except OSError:
            return

    flooding = threading.Thread(target=flood)
    flooding.start()
    with pytest.raises(PoolTimeout):
        node.connection.read_pages([pin(101)], [[buffer(KIB)]], soon(0.3))
    flooding.join(20.0)
    assert not flooding.is_alive()


@pytest.mark.parametrize("length", [KIB - 1, KIB + 1, 1 << 62])
def test_a_page_of_another_length_is_not_read_and_ends_the_connection(node: FalseNode, length: int) -> None:
    page = buffer(KIB)
    node.send(101, bytes([1]) * KIB, length)
    with pytest.raises(PoolUnavailable, match="another length"):
        node.connection.read_pages([pin(101)], [[page]], soon())
    assert not page.any()
    assert node.has_ended()


def test_a_withdrawn_page_is_lost_and_the_others_are_read(node: FalseNode) -> None:
    pages = [[buffer(KIB)] for _ in range(3)]
    node.send(101, bytes([1]) * KIB)
    node.send(102, b"", WITHDRAWN)
    node.send(103, bytes([3]) * KIB)
    pins = [pin(101), pin(102), pin(103, checksum=12345)]
    assert node.connection.read_pages(pins, pages, soon()) == [OK, LOST, CORRUPT]
    assert [int(page[0]) for [page] in pages] == [1, 0, 3]


def test_pages_that_were_pinned_and_not_read_are_passed_over(node: FalseNode) -> None:
    for tag in (101, 102, 103):
        node.send(tag, bytes([tag]) * 300 * KIB)
    page = buffer(300 * KIB)
    assert node.connection.read_pages([pin(103)], [[page]], soon()) == [OK]
    assert (page == 103).all()
    with pytest.raises(PoolUnavailable, match="pinned later"):
        node.connection.read_pages([pin(102)], [[page]], soon())


def test_a_page_that_will_never_come_is_not_waited_for(node: FalseNode) -> None:
    node.send(102, bytes(KIB))
    with pytest.raises(PoolUnavailable, match="passed over"):
        node.connection.read_pages([pin(101)], [[buffer(KIB)]], soon())


def test_pages_of_a_second_get_that_have_come_already_are_read(node: FalseNode) -> None:
    node.send(101, bytes([1]) * KIB)
    node.send(102, bytes([2]) * KIB)
    for tag, value in ((101, 1), (102, 2)):
        page = buffer(KIB)
        assert node.connection.read_pages([pin(tag)], [[page]], soon()) == [OK]
        assert (page == value).all()


def test_a_node_that_said_goodbye_is_restarting(node: FalseNode) -> None:
    node.control.last_words = PoolRestarting("it is upgraded")
    node.sock.close()
    with pytest.raises(PoolRestarting):
        node.connection.read_pages([pin(101)], [[buffer(KIB)]], soon())


# --- writes


def test_a_write_to_a_node_that_takes_nothing_ends_at_its_deadline(node: FalseNode) -> None:
    grant = m.Grant(m.GRANTED, 1, 0, 1, 101)
    with pytest.raises(PoolTimeout):
        node.connection.write_pages([grant], [[buffer(64 * MIB)]], soon(0.2))
    assert node.has_ended()


# --- who the node is


def test_a_node_that_takes_no_ticket_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        control = Control(m.TcpInfo("", listening.getsockname()[1], TICKET, False))
        with pytest.raises(PoolTimeout):
            connect(control, deadline_s=soon(0.2))
    assert control.closed


def test_a_node_without_a_data_path_is_unavailable() -> None:
    control = Control(None)
    with pytest.raises(PoolUnavailable, match="no TCP"):
        connect(control)
    assert control.closed


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[RunningServer, ssl.SSLContext]]:
    files = Certificates(Authority(tmp_path).host())
    server, client = files.server_context, files.client_context
    assert client is not None
    with running(tls=server) as node:
        yield node, client


def test_pages_go_both_ways_under_tls(secure: tuple[RunningServer, ssl.SSLContext]) -> None:
    node, tls = secure
    number, info = node.expect_client()
    connection = connect(Control(info), tls)
    page = np.random.default_rng(1).integers(0, 256, 5 * MIB + 3, np.uint8)
    tag = node.receive(number, 4096, page.nbytes)
    segments = [page[:1], page[1:MIB], page[MIB:]]
    [checksum] = connection.write_pages([m.Grant(m.GRANTED, 1, 4096, 1, tag)], [segments], soon())
    assert node.outcome(tag)
    assert checksum == checksum_page([page])
    assert np.array_equal(node.arena[4096 : 4096 + page.nbytes], page)
    copy = buffer(page.nbytes)
    tag = node.send(number, 4096, page.nbytes)
    parts = [copy[: 2 * MIB], copy[2 * MIB :]]
    assert connection.read_pages([pin(tag, checksum)], [parts], soon()) == [OK]
    assert np.array_equal(copy, page)
    connection.close()


def test_a_client_with_certificates_sends_no_ticket_in_clear() -> None:
    with running() as node:
        number, info = node.expect_client()
        with pytest.raises(PoolUnavailable, match="no TLS"):
            connect(Control(info), ssl.create_default_context())
        assert number not in node.lost


def test_a_node_with_certificates_gives_nothing_to_clients_without(
    secure: tuple[RunningServer, ssl.SSLContext],
) -> None:
    node, _ = secure
    _, info = node.expect_client()
    with pytest.raises(PoolUnavailable, match="TLS"):
        connect(Control(info))
    plain = m.TcpInfo(info.host, info.port, info.ticket, False)
    with pytest.raises(PoolUnavailable):
        connect(Control(plain))


def test_a_node_that_another_authority_vouches_for_gets_no_ticket(
    secure: tuple[RunningServer, ssl.SSLContext],
) -> None:
    node, _ = secure
    number, info = node.expect_client()
    with pytest.raises(PoolRefused, match="certificate"):
        connect(Control(info), ssl.create_default_context())
    assert number not in node.lost
