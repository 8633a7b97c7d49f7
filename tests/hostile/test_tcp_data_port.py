"""Strangers, and clients that lie, at the port of a real pool node where pages come in by TCP."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest

from pdserve.kvpool.transports.base import Connection
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, small_config
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
