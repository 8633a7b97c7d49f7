"""Strangers at the ports of a real pool node, for control, for pages by TCP and for UCX.

They take neither its memory nor its places, and reach no page.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from pdserve.errors import PoolRefused
from pdserve.kvpool.node.admission import max_greeting
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, without_token
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.security.tokens import Secret
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, raw_socket, small_config
from tests.support.kvpool.pools import ProcessPool
from tests.support.suite.extended import extended
from tests.support.waiting import soon, until

ADMIN_TOKEN = "the-token-of-this-pools-operator"
MAX_CONNECTIONS = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    directory = tmp_path_factory.mktemp("pool")
    options = {"admin_token": Secret(ADMIN_TOKEN), "max_connections": MAX_CONNECTIONS}
    config = small_config(name="guarded", arena_dir=directory / "arena", **options)
    pool = ProcessPool(config, directory, "shm")
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


def greeted(pool: ProcessPool, token: str) -> socket.socket:
    """The socket of a client that has shaken hands."""
    channel = ControlChannel.connect(pool.address, make_hello("client", "", "none", token), soon())
    sock = socket.socket(fileno=os.dup(channel.fileno()))
    channel.close()
    sock.settimeout(10)
    return sock


SEEDS = itertools.count(100)
"""Of pages: each client stores some of its own."""


def a_client_with_a_token_works(pool: ProcessPool) -> None:
    connection = connect(pool.address, time.monotonic() + 10, "shm", token=ADMIN_TOKEN)
    try:
        namespace, some = open_namespace(connection, "honest"), keys(4, next(SEEDS))
        assert put(connection, namespace, some) == some
        assert get(connection, namespace, some) == some
    finally:
        connection.close()


def answer_of(sock: socket.socket) -> bytes:
    """All that the node says until it refuses to go on, or hangs up."""
    said, frames = b"", FrameBuffer()
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            said += piece
            if any(isinstance(decode_reply(body), m.Fault) for body in frames.feed(piece)):
                break
    return said


# --- what strangers and clients hold


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """Addresses and ports of TCP at which the process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_ucx_listens_on_loopback_and_only_once_a_token_was_shown(pool: ProcessPool) -> None:
    """But for UCX's listener, which takes no address: it hands over who connects, and writes nothing."""
    before, own_before = listening(pool.pid), listening()
    for token in ("", "a-token-that-nobody-gave-out"):
        with pytest.raises(PoolRefused):
            connect(pool.address, soon(), "ucx", token=token)
    assert listening(pool.pid) == before
    with contextlib.closing(connect(pool.address, soon(), "ucx", token=ADMIN_TOKEN)) as connection:
        assert connection.welcome.ucx is not None
        opened = listening(pool.pid) - before - {("0.0.0.0", connection.welcome.ucx.port)}
        assert {host for host, _ in opened} == {"127.0.0.1"}
        assert {host for host, _ in listening() - own_before} <= {"127.0.0.1"}
        namespace, some = open_namespace(connection, "honest"), keys(4, 1)
        assert put(connection, namespace, some) == some
        assert get(connection, namespace, some) == some


HALF = m.MAX_HELLO_BYTES.to_bytes(4, "little") + b"\x00" * (m.MAX_HELLO_BYTES - 1)
HALF_FRAME = m.MAX_FRAME_BYTES.to_bytes(4, "little") + b"\x00" * (m.MAX_FRAME_BYTES - 1)
SAID = (b"", b"GET / HTTP/1.1\r\n\r\n" * 1000, b"\x16\x03\x01" * 5000, bytes(MIB))


def hold_half_hellos(pool: ProcessPool, held: contextlib.ExitStack) -> None:
    held.enter_context(strangers(pool, 300, HALF))


def hold_half_frames(pool: ProcessPool, held: contextlib.ExitStack) -> None:
    for _ in range(MAX_CONNECTIONS - 2):  # 120 MB of half frames
        sock = held.enter_context(greeted(pool, ADMIN_TOKEN))
        with contextlib.suppress(OSError):
            sock.sendall(HALF_FRAME)


def hold_waits(pool: ProcessPool, held: contextlib.ExitStack) -> None:
    with contextlib.closing(connect(pool.address, soon(), "shm", token=ADMIN_TOKEN)) as connection:
        namespace = open_namespace(connection, "honest")
    sock, said = held.enter_context(greeted(pool, ADMIN_TOKEN)), b""
    for number in range(128):
        some = [(number << 32 | n).to_bytes(KEY_BYTES, "little") for n in range(m.MAX_KEYS)]
        sock.sendall(encode_frame(m.Wait(number + 2, namespace, some, 600.0)))
    while b"too_many_waiters" not in said:
        said += sock.recv(1 << 16)


def hold_data_connections(pool: ProcessPool, held: contextlib.ExitStack) -> None:
    """At the port where pages come in by TCP: what strangers say there reaches no page."""
    honest = held.enter_context(contextlib.closing(connect(pool.address, soon(), "tcp", token=ADMIN_TOKEN)))
    assert honest.welcome.tcp is not None
    for said in SAID * 25:
        sock = held.enter_context(socket.create_connection(("127.0.0.1", honest.welcome.tcp.port), 10))
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
    namespace, some = open_namespace(honest, "honest"), keys(8, 31)
    assert put(honest, namespace, some) == some
    assert get(honest, namespace, some) == some


@pytest.mark.parametrize(
    ("hold", "most_bytes"),
    [
        (hold_half_hellos, 32 * MIB),
        (hold_half_frames, 110 * MIB),
        (hold_waits, 110 * MIB),
        (hold_data_connections, 64 * MIB),
    ],
)
def test_what_strangers_and_clients_hold_takes_a_bounded_memory_and_no_place_of_others(
    pool: ProcessPool, hold: Callable[[ProcessPool, contextlib.ExitStack], None], most_bytes: int
) -> None:
    node = psutil.Process(pool.pid)
    before = node.memory_info().rss
    with contextlib.ExitStack() as held:
        hold(pool, held)
        a_client_with_a_token_works(pool)
        assert node.memory_info().rss - before < most_bytes


HELLO = encode_frame(make_hello("stranger", "", "none"))
ENDS_WITH_A_WORD = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "does not speak the pdserve pool protocol"),
    "a frame of 4 GiB": (b"\xff\xff\xff\xff", "frame of 4294967295 bytes, allowed are 1 to 4096"),
    "no msgpack": (b"\x02\0\0\0\xc1\xc1", "not a pool request"),
    "no hello": (encode_frame(m.Ping(1)), "must be Hello"),
    "another version": (
        encode_frame(m.Hello(99, "new", 1, "h")),
        "speaks version 1 of the pool protocol, client new version 99",
    ),
    "a data path there is not": (encode_frame(m.Hello(1, "x", 1, "h", "pigeon")), "not a pool request"),  # type: ignore[arg-type]
    "hello twice": (HELLO + HELLO, ""),
    "too many keys": (
        HELLO + encode_frame(m.Exists(1, 1, [bytes(32)] * 5000)),
        "not a pool request: Expected `array` of length <= 4096",
    ),
}


@pytest.mark.parametrize("what", ENDS_WITH_A_WORD)
def test_what_is_no_request_ends_its_own_connection_with_a_word(pool: ProcessPool, what: str) -> None:
    data, word = ENDS_WITH_A_WORD[what]
    before = len(pool.log().splitlines())
    with raw_socket(pool) as sock:
        sock.sendall(data)
        assert word.encode() in answer_of(sock)

    def is_told() -> bool:  # the node writes it as it hangs up; a line of a test before may come late too
        lines = pool.log().splitlines()[before:]
        return any(re.search("(closing|turning away) the connection of", line) for line in lines)

    until(is_told)
    a_client_with_a_token_works(pool)


def test_a_name_with_control_characters_makes_no_line_of_its_own_in_the_log(pool: ProcessPool) -> None:
    hello = encode_frame(make_hello("x\n2026 ERROR \x1b[31mlies" + "y" * 3_000, "", "none"))
    lines: list[str] = []
    deadline_s = soon()
    while not lines:  # strangers get some lines a second, which the test before may have used up
        assert time.monotonic() < deadline_s
        with raw_socket(pool) as sock:
            sock.sendall(hello + bytes(4))
            answer_of(sock)
        lines = [line for line in pool.log().splitlines() if "lies" in line]
    for line in lines:
        assert "x?2026 ERROR ?[31mlies" in line
        assert len(line) < 400


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
    with greeted(pool, token) as sock:
        sock.settimeout(3)
        sent_bytes = sent_before_nobody_reads(sock, asked)
        a_client_with_a_token_works(pool)
        wanted, frames = sent_bytes // len(encode_frame(m.Status(first))), FrameBuffer()
        answers: list[type] = []
        while len(answers) < wanted:
            answers += [type(decode_reply(body)) for body in frames.feed(sock.recv(1 << 16))]
        assert answers == [m.StatusReport] * wanted


def test_clients_without_a_token_do_not_take_the_places_of_those_with_one(pool: ProcessPool) -> None:
    hello = encode_frame(make_hello("stranger", "", "none"))
    with strangers(pool, 2 * max_greeting(MAX_CONNECTIONS), hello) as sockets:
        for _ in range(5):
            a_client_with_a_token_works(pool)
        sockets[0].settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while sockets[0].recv(1 << 16):
                pass  # it was let in, and closed for later ones


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
    lines = len(pool.log().splitlines())
    began_s = time.monotonic()
    for _ in range(300):
        with raw_socket(pool) as sock:
            sock.sendall(b"\xff" * 100)
            answer_of(sock)
    most = 20 * (2 + time.monotonic() - began_s)  # twenty lines a second
    assert len(pool.log().splitlines()) - lines <= most
    a_client_with_a_token_works(pool)
