"""Strangers at the control port of a real pool node: they take neither its memory nor its places."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from pdserve.errors import PoolError
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, prove, without_token
from pdserve.kvpool.transports.control import make_hello
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, raw_socket, small_config, soon
from tests.support.kvpool.pools import ProcessPool
from tests.support.suite.extended import extended

ADMIN_TOKEN = "the-token-of-this-pools-operator"
MAX_CONNECTIONS = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    directory = tmp_path_factory.mktemp("pool")
    config = small_config(name="guarded", admin_token=ADMIN_TOKEN, arena_dir=directory / "arena")
    pool = ProcessPool(config, directory, "shm", f"max_connections = {MAX_CONNECTIONS}\n")
    try:
        yield pool
    finally:
        pool.close()


@contextlib.contextmanager
def strangers(pool: ProcessPool, count: int, first_bytes: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that have sent this."""
    sockets = []
    try:
        for _ in range(count):
            sock = raw_socket(pool)
            sockets.append(sock)
            with contextlib.suppress(OSError):  # the node may have closed it
                sock.sendall(first_bytes)
        yield sockets
    finally:
        for sock in sockets:
            sock.close()


def a_client_with_a_token_works(pool: ProcessPool, seed: int) -> None:
    connection = connect(pool.address, time.monotonic() + 10, "shm", token=ADMIN_TOKEN)
    try:
        namespace, some = open_namespace(connection, "honest"), keys(4, seed)
        assert put(connection, namespace, some) == some
        assert get(connection, namespace, some) == some
    finally:
        connection.close()


@contextlib.contextmanager
def clients(
    pool: ProcessPool, count: int, name: str, token: str = ADMIN_TOKEN
) -> Iterator[list[socket.socket]]:
    """So many connections whose client has proved that it knows the token, or has said hello without one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(raw_socket(pool)) for _ in range(count)]
        for sock in sockets:
            sock.settimeout(10)
            hello = without_token(make_hello(name, "", "none", token), bytes(NONCE_BYTES))
            sock.sendall(encode_frame(hello))
            if token:
                challenge = one_reply(sock)
                assert isinstance(challenge, m.Challenge)
                sock.sendall(encode_frame(prove(hello, challenge, token)))
            assert isinstance(one_reply(sock), m.Welcome)
        yield sockets


def one_reply(sock: socket.socket) -> m.Reply:
    frames = FrameBuffer()
    while not (found := list(frames.feed(sock.recv(1 << 16)))):
        pass
    [reply] = map(decode_reply, found)
    return reply


def rss_bytes(pool: ProcessPool) -> int:
    return int(psutil.Process(pool.pid).memory_info().rss)


def answer_of(sock: socket.socket) -> bytes:
    """All that the node says until it refuses to go on, or hangs up."""
    said, frames = b"", FrameBuffer()
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            said += piece
            if any(isinstance(decode_reply(body), m.Fault) for body in frames.feed(piece)):
                break
    return said


def test_half_frames_of_strangers_take_no_memory(pool: ProcessPool) -> None:
    before = rss_bytes(pool)
    half = m.MAX_HELLO_BYTES.to_bytes(4, "little") + b"\x00" * (m.MAX_HELLO_BYTES - 1)
    with strangers(pool, 300, half):
        a_client_with_a_token_works(pool, 1)
        assert rss_bytes(pool) - before < 32 * MIB


def test_half_frames_of_clients_take_a_bounded_memory(pool: ProcessPool) -> None:
    before = rss_bytes(pool)
    with clients(pool, MAX_CONNECTIONS * 3 // 4, "holder") as sockets:
        for sock in sockets:  # 96 MB of half frames
            sock.sendall(m.MAX_FRAME_BYTES.to_bytes(4, "little"))
            with contextlib.suppress(OSError):
                sock.sendall(b"\x00" * (m.MAX_FRAME_BYTES - 1))
        a_client_with_a_token_works(pool, 2)
        assert rss_bytes(pool) - before < 110 * MIB


def test_open_waits_of_a_client_take_a_bounded_memory(pool: ProcessPool) -> None:
    connection = connect(pool.address, soon(), "shm", token=ADMIN_TOKEN)
    namespace = open_namespace(connection, "honest")
    connection.close()
    before = rss_bytes(pool)
    with clients(pool, 1, "waiter") as [sock]:
        said = b""
        for number in range(128):
            some = [(number << 32 | n).to_bytes(KEY_BYTES, "little") for n in range(m.MAX_KEYS)]
            sock.sendall(encode_frame(m.Wait(number + 2, namespace, some, 600.0)))
        while b"too_many_waiters" not in said:
            said += sock.recv(1 << 16)
        assert rss_bytes(pool) - before < 110 * MIB
    a_client_with_a_token_works(pool, 9)


def sent_before_nobody_reads(sock: socket.socket, data: memoryview) -> int:
    """Raises ConnectionError where the node hangs up instead."""
    sent_bytes = 0
    with contextlib.suppress(TimeoutError):
        while True:
            sent_bytes += sock.send(data[sent_bytes:])
    return sent_bytes


@pytest.mark.parametrize("token", ["", extended(ADMIN_TOKEN)])
def test_who_reads_no_answers_gets_no_more_of_them_until_it_does(pool: ProcessPool, token: str) -> None:
    """60 strangers held 360 MB of answers to Status."""
    first = 1 << 16  # numbers whose frames are alike in length
    asked = memoryview(b"".join(encode_frame(m.Status(number)) for number in range(first, first + 100_000)))
    with clients(pool, 1, "deaf", token) as [sock]:
        sock.settimeout(3)
        sent_bytes = sent_before_nobody_reads(sock, asked)
        a_client_with_a_token_works(pool, 20 + len(token))
        wanted, frames = sent_bytes // len(encode_frame(m.Status(first))), FrameBuffer()
        answers: list[type] = []
        while len(answers) < wanted:
            answers += [type(decode_reply(body)) for body in frames.feed(sock.recv(1 << 16))]
        assert answers == [m.StatusReport] * wanted


def test_clients_without_a_token_do_not_take_the_places_of_those_with_one(pool: ProcessPool) -> None:
    hello = encode_frame(make_hello("stranger", "", "none"))
    with strangers(pool, 2 * MAX_CONNECTIONS, hello) as sockets:
        sockets[-1].settimeout(10)
        assert b"too_many_connections" in answer_of(sockets[-1])
        for seed in range(3, 8):
            a_client_with_a_token_works(pool, seed)
        with pytest.raises(PoolError, match="without a token"):
            connect(pool.address, soon(), "shm")


def test_who_names_a_token_and_does_not_prove_it_is_refused(pool: ProcessPool) -> None:
    hello = without_token(make_hello("stranger", "", "none", ADMIN_TOKEN), bytes(NONCE_BYTES))
    for second in (m.Proof(bytes(64)), m.Proof(b""), m.Ping(1), hello):
        with raw_socket(pool) as sock:
            sock.settimeout(10)
            sock.sendall(encode_frame(hello) + encode_frame(second))
            said = answer_of(sock)
            assert ADMIN_TOKEN.encode() not in said
            assert b"bad_token" in said or b"no_hello" in said


def test_a_stranger_that_was_refused_keeps_its_place_until_it_leaves_or_its_time_ends(
    pool: ProcessPool,
) -> None:
    """It was closed at once, and came back at once: clients waited for the node's loop."""
    with raw_socket(pool) as stays, raw_socket(pool) as leaves:
        for sock in (stays, leaves):
            sock.settimeout(30)
            sock.sendall(encode_frame(m.Ping(1)))
            assert b"no_hello" in answer_of(sock)
        node = psutil.Process(pool.pid)
        before, deadline_s = node.num_fds(), soon()
        leaves.close()
        while node.num_fds() >= before:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        stays.setblocking(False)
        with pytest.raises(BlockingIOError):
            stays.recv(1)
        stays.settimeout(30)
        stays.sendall(b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert stays.recv(1) == b"", "its time to shake hands has ended"


def test_strangers_do_not_fill_the_log(pool: ProcessPool) -> None:
    """They wrote a line each, 12,000 in two seconds."""
    lines = len(pool.log.read_text().splitlines())
    began_s = time.monotonic()
    for _ in range(300):
        with raw_socket(pool) as sock:
            sock.sendall(b"\xff" * 100)
            answer_of(sock)
    most = 20 * (2 + time.monotonic() - began_s)  # twenty lines a second
    assert len(pool.log.read_text().splitlines()) - lines <= most
    a_client_with_a_token_works(pool, 99)
