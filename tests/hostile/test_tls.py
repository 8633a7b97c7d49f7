"""Pool nodes with certificates: who gets in, what can be read on the wire, and what strangers cost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PoolError, PoolRefused, PoolUnavailable
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.node.serving import connection as serving_connection
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.kvpool.transports.control import make_hello
from pdserve.security.tls import Certificates, TlsConfig
from tests.support.certificates import Authority
from tests.support.kvpool.clustered import ring, running
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, page_of, put
from tests.support.processes import free_ports
from tests.support.waiting import soon, until_in_loop

LOOP = "127.0.0.1"
TOKEN = "a-token-that-must-not-be-seen-by-others"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@contextlib.asynccontextmanager
async def secured(tmp_path: Path, name: str, tls: TlsConfig, **options: Any) -> AsyncIterator[PoolNode]:
    """A node that listens at TCP with these certificates."""
    listen = [f"tcp:{LOOP}:{free_ports(1)[0]}"]
    async with running(tmp_path, name, listen=listen, tls=tls, **options) as node:
        yield node


def move_pages(address: str, tls: TlsConfig, data_path: m.DataPathChoice = "tcp", token: str = "") -> None:
    """As a client does. Raises PoolError."""
    context = Certificates(tls).client_context
    connection = connect(address, soon(), data_path, token=token, tls=context)
    try:
        namespace, some = open_namespace(connection), keys(4, 1)
        put(connection, namespace, some)  # unless they are there
        assert get(connection, namespace, some) == some
    finally:
        connection.close()


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize("data_path", ["tcp", "shm", "ucx"])
async def test_clients_of_the_authority_move_pages(
    tmp_path: Path, authority: Authority, data_path: m.DataPathChoice, mutual: bool
) -> None:
    own = authority.host("worker") if mutual else authority.client()
    async with secured(tmp_path, "a", authority.host(mutual=mutual)) as node:
        await asyncio.to_thread(move_pages, node.config.address, own, data_path)


async def test_nodes_find_each_other_and_move_pages_by_tls_only(tmp_path: Path, authority: Authority) -> None:
    files = authority.host(mutual=True)
    async with secured(tmp_path, "a", files) as a:
        peers = {"cluster": {"peers": [a.config.address]}}
        async with secured(tmp_path, "b", files, **peers) as b:
            await until_in_loop(lambda: ring(a) == ring(b) == "ab")
            async with secured(tmp_path, "c", TlsConfig(), **peers) as c:
                await asyncio.to_thread(move_pages, c.config.address, TlsConfig())
                assert (ring(a), ring(b), ring(c)) == ("ab", "ab", "c"), "it goes on alone"


async def test_whoever_is_not_of_the_authority_or_finds_a_node_that_is_not_is_told_so_at_once(
    tmp_path: Path, authority: Authority
) -> None:
    other = Authority(tmp_path / "other")
    certificate, key = other.files("worker")
    async with secured(tmp_path, "a", authority.host(mutual=True)) as node:
        for tls, error, says in (
            (authority.client(), PoolUnavailable, "asks for a certificate"),
            (TlsConfig(ca=authority.ca, certificate=certificate, key=key), PoolUnavailable, "certificate"),
            (other.host("worker"), PoolRefused, "tls.ca does not vouch for"),
        ):
            with pytest.raises(error, match=says):
                await asyncio.to_thread(move_pages, node.config.address, tls)
            context = Certificates(tls).client_context
            with pytest.raises(PoolError):
                await AsyncControl.connect(node.config.address, make_hello("x", "", "none"), tls=context)
    async with secured(tmp_path, "b", authority.host("pool-b")) as node:
        with pytest.raises(PoolRefused, match=r"vouch for.*127\.0\.0\.1"):
            await asyncio.to_thread(move_pages, node.config.address, authority.client())
    async with secured(tmp_path, "c", TlsConfig()) as node:
        with pytest.raises(PoolUnavailable, match="TLS"):
            await asyncio.to_thread(move_pages, node.config.address, authority.client())


async def test_a_client_without_tls_is_told_once_its_time_to_shake_hands_has_ended(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_connection, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with secured(tmp_path, "a", authority.host(mutual=True)) as node:
        with pytest.raises(PoolUnavailable, match="it may want TLS"):
            await asyncio.to_thread(move_pages, node.config.address, TlsConfig())
        with pytest.raises(PoolUnavailable, match="it may want TLS"):
            await AsyncControl.connect(node.config.address, make_hello("x", "", "none"))


async def test_a_certificate_is_renewed_while_the_node_serves(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.security.tls.LOOK_S", 0.0)
    certificate, key = authority.files("of-before", LOOP)
    files = TlsConfig(certificate=certificate, key=key, ca=authority.ca)
    async with secured(tmp_path, "a", files) as node:
        await asyncio.to_thread(move_pages, node.config.address, authority.client())
        newer = Authority(tmp_path / "newer").host()
        assert newer.certificate is not None
        assert newer.key is not None
        newer.key.replace(key)
        newer.certificate.replace(certificate)
        with pytest.raises(PoolRefused):
            await asyncio.to_thread(move_pages, node.config.address, authority.client())
        await asyncio.to_thread(move_pages, node.config.address, TlsConfig(ca=newer.ca))


class Tap:
    """Passes connections on to a port, and keeps all that goes by. The data connection's too: the node tells
    its clients to come to the tap.
    """

    def __init__(self) -> None:
        self.heard = bytearray()

    async def open(self, port: int) -> asyncio.Server:
        async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(LOOP, port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(reader, there[1]))
                tasks.create_task(self._pass_on(there[0], writer))

        return await asyncio.start_server(came, LOOP)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                self.heard += data
                sink.write(data)
        sink.close()


@pytest.mark.parametrize("is_secure", [True, False])
async def test_who_reads_the_wire_sees_no_page_and_no_token_in_any_form(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    """And without TLS he sees the pages: so the check can fail."""
    tap = Tap()
    files = authority.host() if is_secure else TlsConfig()
    own = authority.client() if is_secure else TlsConfig()
    async with secured(tmp_path, "a", files, admin_token=TOKEN) as node:
        info = node.data_paths.tcp.open
        taps: list[asyncio.Server] = []

        def through_the_tap(connection: int) -> m.TcpInfo:
            found = info(connection)
            return m.TcpInfo(found.host, data_port, found.ticket, found.tls)

        node.data_paths.prepare(ucx_was_used=False)
        node.data_paths._start_tcp()
        taps.append(await tap.open(int(node.config.address.rpartition(":")[2])))
        taps.append(await tap.open(node.data_paths.tcp._port))
        control_port, data_port = (server.sockets[0].getsockname()[1] for server in taps)
        monkeypatch.setattr(node.data_paths.tcp, "open", through_the_tap)
        address = f"tcp:{LOOP}:{control_port}"
        await asyncio.to_thread(move_pages, address, own, "tcp", TOKEN)
        for server in taps:
            server.close()
    assert len(tap.heard) > 8 * len(page_of(b"k" * 32)), "pages went by"
    assert TOKEN.encode() not in tap.heard
    page = page_of(keys(1, 1)[0]).tobytes()
    assert (page[:64] in tap.heard) is not is_secure


async def test_sockets_that_never_shake_hands_are_bounded_and_end(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_connection, "HANDSHAKE_TIMEOUT_S", 1.0)
    async with secured(tmp_path, "a", authority.host(), max_connections=16) as node:
        port = int(node.config.address.rpartition(":")[2])
        first_bytes = (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n")
        strangers = []
        for number in range(200):
            sock = socket.create_connection((LOOP, port))
            strangers.append(sock)
            with contextlib.suppress(OSError):
                sock.sendall(first_bytes[number % len(first_bytes)])
            if number % 20 == 0:
                await asyncio.sleep(0)
        await asyncio.to_thread(move_pages, node.config.address, authority.client())
        assert node.sockets <= 64 + 2, "as many as may be in their handshakes, and a client"
        await until_in_loop(lambda: node.sockets == 0)
        assert not node.all_connections.by_number
        for sock in strangers:
            sock.close()
