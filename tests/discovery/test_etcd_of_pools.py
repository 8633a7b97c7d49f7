"""Nodes and clients that find the pool in a real etcd."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest

from pdserve.discovery import etcd as discovery
from pdserve.discovery.config import EtcdConfig
from pdserve.discovery.etcd import EtcdMember, EtcdMembership, discover
from pdserve.errors import ConfigError, PoolError, PoolUnavailable, StartupError
from pdserve.kvpool.client import locate
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.client.locate import locate_pool
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.node.peers.joining import Before
from pdserve.kvpool.protocol.cluster_messages import ACTIVE
from tests.support.certificates import certificate as self_signed
from tests.support.etcd_server import EtcdServer, in_etcd, settings
from tests.support.kvpool.clustered import config_of, ring, running
from tests.support.relays import relays
from tests.support.waiting import until_in_loop


def names(etcd: EtcdServer) -> list[str] | None:
    return found_by(settings(etcd))


def found_by(config: EtcdConfig) -> list[str] | None:
    """None: etcd could not be asked this time."""
    try:
        return [node.node for node in discover(config, "pool")]
    except PoolUnavailable:
        return None


def test_nodes_find_each_other_and_clients_find_them_and_who_stops_is_gone(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their own word: leases of a minute do not end on a busy machine."""
    monkeypatch.setattr(discovery, "LEASE_S", 60)
    where = in_etcd(etcd)

    async def run() -> None:
        async with running(tmp_path, "a", **where) as a:
            async with (
                running(tmp_path, "b", **where) as b,
                running(tmp_path, "c", **where) as c,
            ):
                await until_in_loop(lambda: ring(a) == ring(b) == ring(c) == "abc")
                await until_in_loop(lambda: names(etcd) == ["a", "b", "c"])
                [found, *_] = discover(settings(etcd), "pool")
                assert found == EtcdMember("a", a.config.address, 1)
                assert discover(settings(etcd), "other") == []
            await until_in_loop(lambda: names(etcd) == ["a"])

    asyncio.run(run())
    assert names(etcd) == []


@pytest.mark.parametrize("keeps_key", [False, True])
def test_a_node_that_is_upgraded_leaves_its_key_for_the_next_program(
    etcd: EtcdServer, keeps_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that start meanwhile find it."""
    monkeypatch.setattr(discovery, "LEASE_S", 60)

    async def run() -> None:
        own = EtcdMember("a", "tcp:a:7700")
        membership = EtcdMembership(settings(etcd), "pool", own, lambda _: None)
        following = asyncio.create_task(membership.run())
        await until_in_loop(lambda: names(etcd) == ["a"])
        following.cancel()
        await membership.close(keeps_key=keeps_key)

    asyncio.run(run())
    assert names(etcd) == (["a"] if keeps_key else [])


def test_a_node_that_is_upgraded_serves_without_waiting_for_etcd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = EtcdConfig(endpoints=[f"http://127.0.0.1:{mute.getsockname()[1]}"])
        cluster = {"etcd": silent, "ping_timeout_s": 600.0}

        async def run() -> None:
            async with running(tmp_path, "b") as b:
                a = PoolNode(config_of(tmp_path, "a", cluster=cluster))
                a.gossip.joining._before = Before(ACTIVE, [b.config.address])
                serving = asyncio.ensure_future(a.serve())
                await until_in_loop(lambda: ring(a) == ring(b) == "ab")
                a.stop()
                await serving

        asyncio.run(run())


async def test_the_pool_goes_on_while_etcd_is_away_and_is_there_again_after_it(
    tmp_path: Path, etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, "a", **in_etcd(etcd)) as a, running(tmp_path, "b", **in_etcd(etcd)) as b:
        await until_in_loop(lambda: ring(a) == ring(b) == "ab")
        etcd.kill()
        async with running(tmp_path, "c", **in_etcd(etcd)) as c:  # it knows of nobody
            await until_in_loop(lambda: all(f"node {one}: going on" in caplog.text for one in "abc"))
            assert ring(a) == ring(b) == "ab"
            assert ring(c) == "c"
            etcd.wipe()
            await asyncio.to_thread(etcd.start)
            await until_in_loop(lambda: ring(a) == ring(b) == ring(c) == "abc")
            await until_in_loop(lambda: names(etcd) == ["a", "b", "c"])


async def test_an_etcd_that_hangs_keeps_nobody_waiting(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.5)
    options = in_etcd(etcd)
    async with running(tmp_path, "a", **options) as a:
        await until_in_loop(lambda: names(etcd) == ["a"])
        etcd.pause()
        with pytest.raises(PoolUnavailable, match="cannot be asked"):
            await asyncio.to_thread(discover, settings(etcd), "pool")
        async with running(tmp_path, "b", peers="a", **options) as b:
            await until_in_loop(lambda: ring(a) == "ab" == ring(b))
        etcd.resume()
        await until_in_loop(lambda: names(etcd) == ["a"])


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate that is its own authority's, and its key."""
    return self_signed(tmp_path)


def test_an_etcd_that_asks_for_certificates_gets_ours(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = EtcdServer(tmp_path, certificate, asks_for_certificates=True)
    try:
        cert, key = map(str, certificate)
        without = settings(server, ca_file=cert)
        with pytest.raises(PoolUnavailable):
            discover(without, "pool")
        own = msgspec.structs.replace(without, certificate_file=cert, key_file=key)
        assert discover(own, "pool") == []
        with pytest.raises(ConfigError, match=r"etcd\.certificate_file .*etcd\.key_file"):
            discover(msgspec.structs.replace(own, key_file="/nowhere/key.pem"), "pool")
    finally:
        server.kill()


@pytest.mark.extended
def test_etcd_with_tls_and_passwords(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = EtcdServer(tmp_path, certificate)
    try:
        server.ask_for_passwords("pool", "secret", "/pdserve/pool")
        good = settings(server, ca_file=server.ca_file, username="pool", password="secret")
        for wrong, words in (
            ({"ca_file": ""}, "certificate verify failed"),
            ({"password": "guess"}, "authentication failed"),
            ({"username": ""}, "user name is empty"),
        ):
            with pytest.raises(PoolError, match=words) as error:
                discover(msgspec.structs.replace(good, **wrong), "pool")
            assert "secret" not in str(error.value)
        with pytest.raises(PoolError, match="permission denied"):
            discover(good, "other")

        async def run() -> None:
            cluster = {"cluster": {"etcd": good}}
            async with running(tmp_path, "a", **cluster) as a:
                async with running(tmp_path, "b", **cluster) as b:
                    await until_in_loop(lambda: ring(a) == ring(b) == "ab")
                    await until_in_loop(lambda: found_by(good) == ["a", "b"])
                    membership = a.gossip.joining.etcd
                    assert membership is not None
                    membership.client.token = "one.that.ended"
                    assert [node.node for node in await membership.nodes()] == ["a", "b"]
                await until_in_loop(lambda: found_by(good) == ["a"])

        asyncio.run(run())
    finally:
        server.kill()


@pytest.mark.extended
def test_whoever_is_known_to_etcd_stays_so_when_its_users_are_changed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("nobody knows")
    jwt = f"jwt,sign-method=HS512,priv-key={tmp_path}/key,ttl=10m"
    server = EtcdServer(tmp_path, auth_token=jwt)
    try:
        server.ask_for_passwords("pool", "secret", "/pdserve")
        good = settings(server, username="pool", password="secret")
        root = server.post("auth/authenticate", {"name": "root", "password": "secret"})["token"]

        async def run() -> None:
            cluster = {"cluster": {"etcd": good}}
            async with running(tmp_path, "a", **cluster) as a:
                await until_in_loop(lambda: found_by(good) == ["a"])
                membership = a.gossip.joining.etcd
                assert membership is not None
                server.post("auth/user/add", {"name": "somebody", "password": "x"}, root)
                assert [node.node for node in await membership.nodes()] == ["a"]
                server.post("auth/user/delete", {"name": "somebody"}, root_again())
                async with running(tmp_path, "b", **cluster) as b:
                    await until_in_loop(lambda: ring(a) == ring(b) == "ab")
                    await until_in_loop(lambda: found_by(good) == ["a", "b"])

        def root_again() -> str:
            return str(server.post("auth/authenticate", {"name": "root", "password": "secret"})["token"])

        asyncio.run(run())
    finally:
        server.kill()


async def test_a_slash_at_the_end_of_an_endpoint_and_one_that_sends_elsewhere_do_no_harm(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    elsewhere = (
        "HTTP/1.1 308 Permanent Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    )

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(elsewhere.encode())
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    two = msgspec.structs.replace(settings(etcd), endpoints=[proxy, etcd.url + "/"])
    async with running(tmp_path, "a", cluster={"etcd": two}):
        await until_in_loop(lambda: names(etcd) == ["a"])
        assert await asyncio.to_thread(found_by, two) == ["a"]
    server.close()


async def test_the_watch_leaves_an_endpoint_that_hangs(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TIMEOUT_S", 0.5)
    found: list[list[str]] = [[]]
    with relays([("127.0.0.1", etcd.port)]) as (relay,):
        two = msgspec.structs.replace(settings(etcd), endpoints=[f"http://127.0.0.1:{relay.port}", etcd.url])
        own = EtcdMember("a", "tcp:127.0.0.1:1")
        member = EtcdMembership(two, "pool", own, lambda nodes: found.append([node.node for node in nodes]))
        running = asyncio.create_task(member.run())
        try:
            await until_in_loop(lambda: found[-1] == ["a"])
            await asyncio.to_thread(etcd.put, "/pdserve/pool/nodes/y", '{"address": "tcp:127.0.0.1:2"}')
            await until_in_loop(lambda: found[-1] == ["a", "y"])
            relay.set_mode("silence")
            await asyncio.to_thread(etcd.put, "/pdserve/pool/nodes/z", '{"address": "tcp:127.0.0.1:3"}')
            await until_in_loop(lambda: found[-1] == ["a", "y", "z"])
        finally:
            running.cancel()
            await member.close()


async def test_what_others_wrote_there_is_passed_over_and_writes_no_lines_of_its_own_into_a_log(
    tmp_path: Path, etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    for key, value in (("x", "garbage"), ("y", '{"address": 7}'), ("z", '{"address": "tcp:127.0.0.1:1"}')):
        etcd.put(f"/pdserve/pool/nodes/{key}", value)
    for name in ("q\nERROR a line of its own", "q\x1b[2J", "q" * 4096):
        etcd.put(f"/pdserve/pool/nodes/{name}", '{"address": "tcp:127.0.0.1:1"}')
    etcd.put("/pdserve/pool/nodesandmore", '{"address": "tcp:127.0.0.1:2"}')
    assert names(etcd) == ["z"]
    async with running(tmp_path, "a", **in_etcd(etcd)) as a:
        await until_in_loop(lambda: names(etcd) == ["a", "z"])
        etcd.put("/pdserve/pool/nodes/w", "garbage")
        async with running(tmp_path, "b", **in_etcd(etcd)) as b:
            await until_in_loop(lambda: ring(a) == ring(b) == "ab")
            await until_in_loop(lambda: caplog.text.count("that is no name of a member") >= 3)
    assert all(record.getMessage().isprintable() for record in caplog.records if "etcd" in record.name)


def test_what_is_no_etcd_or_no_certificate_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    for endpoints in ([url], ["http://"], ["nonsense"], []):
        with pytest.raises(PoolError) as error:
            discover(EtcdConfig(endpoints=endpoints), "pool")
        assert "\n" not in str(error.value)
    for file in (tmp_path / "ca.pem", tmp_path / "no.pem"):
        with pytest.raises(ConfigError, match=rf"etcd\.ca_file .*{file.name} holds no certificates"):
            discover(EtcdConfig(endpoints=["https://127.0.0.1:1"], ca_file=str(file)), "pool")


async def test_a_worker_finds_the_nodes_and_passes_no_password_on(tmp_path: Path, etcd: EtcdServer) -> None:
    async with running(tmp_path, "a", **in_etcd(etcd)) as a:
        config = PoolClientConfig(etcd=settings(etcd), token="t")
        found = await asyncio.to_thread(locate_pool, config)
        assert found.nodes == [PoolNodeRef(node="a", address=a.config.address)]
        assert found.token == "t"
        assert found.etcd == EtcdConfig()
        listed = [PoolNodeRef(node="n", address="unix:/n")]
        assert locate_pool(msgspec.structs.replace(config, nodes=listed)).nodes == listed


def test_a_worker_waits_for_the_first_node_and_gives_up_in_words(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "ETCD_WAIT_S", 0.3)
    slept: list[float] = []
    config = PoolClientConfig(etcd=settings(etcd), cluster="mine")
    with pytest.raises(StartupError, match="no node of the pool 'mine'"):
        locate_pool(config, sleep=slept.append)
    assert slept
    etcd.kill()
    with pytest.raises(StartupError, match="cannot be asked"):
        locate_pool(config, sleep=slept.append)
