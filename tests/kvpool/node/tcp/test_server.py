"""The node's end of the TCP data path against peers that are slow, wrong or hostile."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.node.inbox import Inbox
from pdserve.kvpool.node.tcp import listener, server
from pdserve.kvpool.transports.tcp.stream import HEADER, TICKET_BYTES, WITHDRAWN
from tests.support.kvpool.tcp_server import Peer, RunningServer, dial, running
from tests.support.suite.extended import examples
from tests.support.waiting import until

KIB = 1024
MIB = 1 << 20
LONG_BYTES = 48 * MIB  # more than sockets buffer
MARK = 0xAB


@pytest.fixture
def node() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture
def peer(node: RunningServer) -> Iterator[Peer]:
    peer = Peer(node)
    yield peer
    peer.close()


def works(node: RunningServer, peer: Peer) -> bool:
    """A page goes in and comes out."""
    page = bytes(range(256)) * 16
    tag = node.receive(peer.connection, 32 * MIB, len(page))
    peer.write(tag, page)
    assert node.outcome(tag)
    tag = node.send(peer.connection, 32 * MIB, len(page))
    assert peer.header() == (tag, len(page))
    return peer.read(len(page)) == page


def data_threads() -> int:
    return sum(thread.name == "pdserve-tcp" for thread in threading.enumerate())


def ends(sock: socket.socket) -> bool:
    """The node closes it, and has sent nothing."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


# --- tickets


def test_a_socket_that_comes_while_no_client_is_expected_is_not_served_and_ends_with_its_time(
    node: RunningServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.2)
    threads = data_threads()
    with socket.create_connection(peer.sock.getpeername()) as stranger:
        stranger.sendall(bytes(TICKET_BYTES))
        assert ends(stranger)
    assert data_threads() == threads
    assert works(node, peer)


def test_strangers_that_are_held_are_bounded_and_the_oldest_goes(
    node: RunningServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is closed comes back at once, and stands before honest clients in the kernel's queue."""
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 600.0)
    node.server._listener._held.most = 2
    strangers = [socket.create_connection(peer.sock.getpeername()) for _ in range(3)]
    for sock in strangers:
        sock.settimeout(5.0)
    assert ends(strangers[0])
    until(lambda: len(node.server._listener._held) == 2)
    assert works(node, peer)
    for sock in strangers:
        sock.close()


@pytest.mark.parametrize("shown", [bytes(TICKET_BYTES), b"GET / HTTP/1.1\r\n\r\n", b""])
def test_a_wrong_ticket_ends_its_socket_and_the_right_one_is_still_good(
    node: RunningServer, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.2)  # of a socket, not of the client
    connection, info = node.expect_client()
    with dial(info) as stranger:
        if shown:
            stranger.sendall(shown)
        else:
            stranger.shutdown(socket.SHUT_WR)
        assert ends(stranger)
    with dial(info) as client:
        client.sendall(info.ticket)
        assert len(client.recv(HEADER.size)) == HEADER.size
    assert "closed" in node.reason(connection)


def test_a_ticket_is_good_once(node: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.2)
    _, info = node.expect_client()
    node.expect_client()  # else the node expects nobody any more
    with dial(info) as first, dial(info) as second:
        first.sendall(info.ticket)
        assert len(first.recv(HEADER.size)) == HEADER.size
        second.sendall(info.ticket)
        assert ends(second)


def test_a_ticket_that_nobody_shows_ends_its_client_and_sockets_that_show_none(
    node: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GREETING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.2)
    connection, info = node.expect_client()
    with dial(info) as stranger:
        assert ends(stranger)
    assert node.reason(connection) == "no data connection came"


def test_strangers_who_say_nothing_leave_room_for_a_client(
    node: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 600.0)  # none of them ends by its own time
    _, info = node.expect_client()
    strangers = [dial(info) for _ in range(2 * listener.MAX_WITHOUT_TICKET)]
    client = Peer(node)
    assert works(node, client)
    # The thread of a socket that was closed ends a moment later.
    until(lambda: data_threads() <= listener.MAX_WITHOUT_TICKET + 1)
    for sock in (*strangers, client):
        sock.close()


def test_a_transfer_before_the_data_connection_came_fails_and_ends_the_client(node: RunningServer) -> None:
    connection, _ = node.expect_client()
    assert not node.outcome(node.receive(connection, 0, KIB))
    assert "before" in node.reason(connection)


# --- pages that nobody asked for


@pytest.mark.parametrize("kind", ["unknown tag", "too long", "too short", "sent twice", "as withdrawn"])
def test_a_page_that_the_node_did_not_ask_for_is_not_read_and_ends_the_connection(
    node: RunningServer, peer: Peer, kind: str
) -> None:
    node.arena[: 2 * KIB] = MARK
    tag = node.receive(peer.connection, 0, KIB)
    wrong = {"unknown tag": (tag + 1, KIB), "too long": (tag, 2 * KIB), "too short": (tag, KIB - 1)}
    wrong |= {"sent twice": (tag, KIB), "as withdrawn": (tag, WITHDRAWN)}
    if kind == "sent twice":
        peer.write(tag, bytes([MARK]) * KIB)
        assert node.outcome(tag)
    peer.write(wrong[kind][0], bytes(2 * KIB), wrong[kind][1])
    assert "did not ask for" in node.reason(peer.connection)
    assert node.outcome(tag) == (kind == "sent twice")
    assert peer.is_hung_up_on()
    assert (node.arena[: 2 * KIB] == MARK).all()


@pytest.fixture(scope="module")
def attacked() -> Iterator[RunningServer]:
    with running() as server:
        server.arena[:] = MARK
        yield server


@settings(max_examples=examples(200), deadline=None)
@given(
    said=st.binary(max_size=64),
    claimed=st.integers(0, 2 * KIB),
    whose=st.sampled_from(["own", "other", "any"]),
)
def test_whatever_a_client_says_only_its_own_slot_changes(
    attacked: RunningServer, said: bytes, claimed: int, whose: str
) -> None:
    honest, liar = Peer(attacked), Peer(attacked)
    slots = {"other": attacked.receive(honest.connection, 0, KIB)}
    slots["own"] = attacked.receive(liar.connection, KIB, KIB)
    header = HEADER.pack(slots[whose], claimed) if whose in slots else b""
    liar.sock.sendall(header + said)
    with contextlib.suppress(OSError):  # the node may have closed it
        liar.sock.shutdown(socket.SHUT_WR)
    assert liar.is_hung_up_on()
    assert not attacked.outcome(slots["own"])
    assert (attacked.arena[:KIB] == MARK).all()
    assert (attacked.arena[2 * KIB : 4 * KIB] == MARK).all()
    honest.write(slots["other"], bytes([MARK]) * KIB)
    assert attacked.outcome(slots["other"])
    for peer in (honest, liar):
        peer.close()


# --- cancelled receives


def test_a_client_that_does_not_finish_a_cancelled_page_is_ended() -> None:
    with running(stall_timeout_s=0.2) as node:
        peer = Peer(node)
        tag = node.receive(peer.connection, 0, MIB)
        peer.write(tag, bytes(KIB), MIB)
        node.cancel(peer.connection, tag)
        assert not node.outcome(tag)
        assert "no page for" in node.reason(peer.connection)
        assert peer.is_hung_up_on()
        peer.close()


def test_when_control_is_gone_the_page_under_way_ends_and_nothing_of_it_is_written_later(
    node: RunningServer, peer: Peer
) -> None:
    arriving = node.receive(peer.connection, 0, MIB)
    waiting = node.receive(peer.connection, MIB, MIB)
    peer.write(arriving, bytes([1]) * KIB, MIB)
    while not node.arena[KIB - 1]:
        pass
    node.close(peer.connection)
    assert not node.outcome(arriving)
    assert not node.outcome(waiting)
    node.arena[: 2 * MIB] = MARK
    assert peer.is_hung_up_on()
    assert (node.arena[: 2 * MIB] == MARK).all()
    late = node.receive(peer.connection, 0, KIB)
    assert not node.outcome(late)
    assert peer.connection not in node.lost


# --- sends


def test_pages_leave_while_the_client_writes_others(node: RunningServer, peer: Peer) -> None:
    node.arena[:LONG_BYTES] = MARK
    sent = node.send(peer.connection, 0, LONG_BYTES)
    received = node.receive(peer.connection, LONG_BYTES, MIB)
    peer.write(received, bytes([7]) * MIB)  # before anything is read
    assert node.outcome(received)
    assert (node.arena[LONG_BYTES : LONG_BYTES + MIB] == 7).all()
    assert peer.header() == (sent, LONG_BYTES)
    assert peer.read(LONG_BYTES) == bytes([MARK]) * LONG_BYTES
    assert node.outcome(sent)


def test_a_short_page_wakes_no_thread_and_a_long_one_does(
    monkeypatch: pytest.MonkeyPatch, node: RunningServer
) -> None:
    given: list[object] = []

    original = Inbox.give

    def give(inbox: Inbox[object], *items: object) -> bool:
        given.extend(items)
        return original(inbox, *items)

    monkeypatch.setattr(Inbox, "give", give)
    peer = Peer(node)

    def wakes(length: int) -> bool:
        given.clear()
        tag = node.send(peer.connection, 0, length)
        assert peer.header() == (tag, length)
        assert peer.read(length) == bytes(length)
        assert node.outcome(tag)
        return bool(given)

    until(lambda: not wakes(64 * KIB))  # once its thread sleeps
    assert wakes(MIB)


@pytest.mark.parametrize("length", [server.AT_ONCE_BYTES, 1])
def test_what_the_kernel_does_not_take_at_once_leaves_by_and_by(
    node: RunningServer, peer: Peer, length: int
) -> None:
    node.arena[: 16 * MIB] = MARK
    tags = [node.send(peer.connection, 0, length) for _ in range(16 * MIB // server.AT_ONCE_BYTES)]
    for tag in tags:
        assert peer.header() == (tag, length)
        assert peer.read(length) == bytes([MARK]) * length
    assert all(node.outcome(tag) for tag in tags)


def test_a_client_that_takes_no_page_is_ended_before_the_slot_is_let_go() -> None:
    with running(stall_timeout_s=0.2) as node:
        peer = Peer(node)
        node.arena[:LONG_BYTES] = 1
        first, second = (node.send(peer.connection, 0, LONG_BYTES) for _ in range(2))
        assert not node.outcome(first)
        assert not node.outcome(second)
        node.arena[:LONG_BYTES] = 2  # other pages'
        assert "no page for" in node.reason(peer.connection)
        left = b""
        while piece := receive_some(peer.sock):
            left += piece
        assert len(left) < LONG_BYTES
        assert 2 not in left[HEADER.size :]
        peer.close()


def receive_some(sock: socket.socket) -> bytes:
    try:
        return sock.recv(MIB)
    except ConnectionError:
        return b""


def test_a_cancelled_send_that_has_not_begun_is_withdrawn_and_one_that_has_is_finished(
    node: RunningServer, peer: Peer
) -> None:
    node.arena[:LONG_BYTES] = MARK
    begun, waiting, later = (node.send(peer.connection, 0, size) for size in (LONG_BYTES, MIB, KIB))
    assert peer.header() == (begun, LONG_BYTES)
    node.cancel(peer.connection, begun, waiting)
    assert not node.outcome(waiting)
    node.arena[:KIB] = 0
    assert begun not in node.done
    peer.read(LONG_BYTES)
    assert not node.outcome(begun)
    assert peer.header() == (waiting, WITHDRAWN)
    assert peer.header() == (later, KIB)
    assert peer.read(KIB) == bytes(KIB)
    assert node.outcome(later)


# --- the end


def test_when_the_server_has_stopped_no_thread_is_left_and_every_transfer_was_reported() -> None:
    with running() as node:
        peers = [Peer(node) for _ in range(4)]
        tags = [node.receive(peer.connection, 0, MIB) for peer in peers]
        tags += [node.send(peer.connection, 0, LONG_BYTES) for peer in peers]
        node.expect_client()
        node.do(node.server.stop)
        assert not any(thread.name == "pdserve-tcp" for thread in threading.enumerate())
        assert [node.outcome(tag) for tag in tags] == [False] * len(tags)
    for peer in peers:
        assert peer.is_hung_up_on()
        peer.close()


def test_a_client_that_goes_away_fails_its_transfers(node: RunningServer, peer: Peer) -> None:
    tags = [node.receive(peer.connection, 0, MIB), node.send(peer.connection, 0, LONG_BYTES)]
    peer.close()
    assert [node.outcome(tag) for tag in tags] == [False, False]
    assert node.reason(peer.connection)
