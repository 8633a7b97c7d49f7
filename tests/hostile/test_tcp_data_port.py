"""Strangers, and clients that lie, at the port of a real pool node where pages come in by TCP."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from pdserve.errors import PoolError
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.tcp.stream import HEADER, TICKET_BYTES
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import PAGE_BYTES, get, keys, open_namespace, put, small_config, soon
from tests.support.kvpool.pools import ProcessPool

ADMIN_TOKEN = "the-token-of-this-pools-operator"
MIB = 1 << 20
GROWTH_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    directory = tmp_path_factory.mktemp("pool")
    config = small_config(name="paged", admin_token=ADMIN_TOKEN, arena_dir=directory / "arena")
    pool = ProcessPool(config, directory, "tcp")
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def honest(pool: ProcessPool) -> Iterator[Connection]:
    connection = connect(pool.address, time.monotonic() + 10, "tcp", token=ADMIN_TOKEN)
    yield connection
    connection.close()


def port_of(connection: Connection) -> int:
    assert connection.welcome.tcp is not None
    return connection.welcome.tcp.port


SAID = (b"", b"GET / HTTP/1.1\r\n\r\n" * 1000, b"\x16\x03\x01" * 5000, bytes(MIB))


def test_what_strangers_say_reaches_no_page_and_takes_no_memory(
    pool: ProcessPool, honest: Connection
) -> None:
    namespace, some = open_namespace(honest, "honest"), keys(8, 1)
    before_bytes = psutil.Process(pool.pid).memory_info().rss
    strangers = []
    for said in SAID * 25:
        sock = socket.create_connection(("127.0.0.1", port_of(honest)), 10)
        strangers.append(sock)
        sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
    assert put(honest, namespace, some) == some
    assert get(honest, namespace, some) == some
    for sock in strangers:
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
        sock.close()
    assert psutil.Process(pool.pid).memory_info().rss - before_bytes < GROWTH_BYTES


def test_clients_get_in_while_strangers_fill_the_port(pool: ProcessPool, honest: Connection) -> None:
    strangers = [socket.create_connection(("127.0.0.1", port_of(honest)), 10) for _ in range(300)]
    for seed in range(5):
        strangers += [socket.create_connection(("127.0.0.1", port_of(honest)), 10) for _ in range(50)]
        connection = connect(pool.address, time.monotonic() + 10, "tcp", token=ADMIN_TOKEN)
        namespace, some = open_namespace(connection, "honest"), keys(2, 1000 + seed)
        assert put(connection, namespace, some) == some
        connection.close()
    for sock in strangers:
        sock.close()


def test_a_client_that_writes_over_the_end_of_its_slot_is_ended_and_touches_no_other_page(
    pool: ProcessPool, honest: Connection
) -> None:
    namespace, some = open_namespace(honest, "honest"), keys(4, 7)
    assert put(honest, namespace, some) == some
    liar = connect(pool.address, time.monotonic() + 10, "tcp", token=ADMIN_TOKEN)
    theirs, [name] = open_namespace(liar, "theirs"), keys(1, 8)
    reserved = liar.call(m.Reserve(2, theirs, [name], [PAGE_BYTES]), soon())
    assert isinstance(reserved, m.Reserved)
    stream = liar._stream  # type: ignore[attr-defined]
    assert stream.send([memoryview(HEADER.pack(reserved.grants[0].tag, 8 * MIB) + bytes(MIB))])
    with pytest.raises(PoolError):
        liar.call(m.Wait(3, theirs, [name], 10.0), soon())
    liar.close()
    assert get(honest, namespace, some) == some
    exists = honest.call(m.Exists(9, open_namespace(honest, "theirs"), [name]), soon())
    assert exists == m.Present(9, b"\0")


def test_another_clients_ticket_cannot_be_used_again(pool: ProcessPool, honest: Connection) -> None:
    info = honest.welcome.tcp
    assert info is not None
    assert len(info.ticket) == TICKET_BYTES
    with socket.create_connection(("127.0.0.1", info.port), 10) as thief:
        thief.settimeout(10)
        with contextlib.suppress(ConnectionError):
            thief.sendall(info.ticket)
            assert thief.recv(1) == b""
    open_namespace(honest, "honest")
