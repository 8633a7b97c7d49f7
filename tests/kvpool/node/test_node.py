"""A real node process: starting, stopping, dying, bad clients, bad files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import NodeFailed, PoolError, PoolRefused, StartupError
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connector import ConfiguredConnector
from pdserve.kvpool.core.events import LOCAL, AssignSlab, CommitRows, ReserveRows, SaveNamespaces
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config import UcxConfig
from pdserve.kvpool.node.memory.arena import Arena
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.node.serving import connection as connection_module
from pdserve.kvpool.node.ucx import worker as ucx_worker
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.protocol.slot_table import TableLayout
from pdserve.kvpool.transports import page_residency
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.ucx import UcxLibrary
from pdserve.up.locks import free_ports
from tests.support.kvpool.connectors import connect, fetch_status
from tests.support.kvpool.nodes import (
    Start,
    StartProcess,
    get,
    keys,
    open_namespace,
    put,
    raw_socket,
    reply_of,
    say_hello,
    serve_fails,
    serving,
    small_config,
    start_fails,
)
from tests.support.kvpool.pools import arena_dir, remove_arena
from tests.support.waiting import soon, until, until_in_loop

# --- coming back


@pytest.mark.parametrize(
    ("name", "size"), [("arena", 4096), ("table", 0), ("table", 40), ("table", 5000), ("namespaces.json", 3)]
)
def test_truncated_files_are_refused_in_one_line_and_the_node_starts_empty(
    start: Start, name: str, size: int
) -> None:
    pool = start()
    connection = pool.connect()
    names = keys(5, 1)
    put(connection, open_namespace(connection), names)
    connection.close()
    pool.kill()
    with pool.arena_path.with_name(name).open("r+b") as file:
        file.truncate(size)
    pool.restart()
    warnings = [line for line in pool.log().splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    connection = pool.connect()
    ns = open_namespace(connection)
    assert get(connection, ns, names) == []
    assert put(connection, ns, names) == names
    connection.close()


def test_memory_of_another_size_is_replaced_and_said_so(start: Start) -> None:
    pool = start(name="resized")
    connection = pool.connect()
    put(connection, open_namespace(connection), keys(5, 1))
    connection.close()
    pool.kill()
    pool.restart(capacity_bytes=8 << 20)
    assert "other sizes" in pool.log()
    assert fetch_status(pool.address, soon()).pages == 0


async def of_namespace(node: PoolNode, work: Callable[..., list[bytes]], names: list[bytes]) -> list[bytes]:
    """What a client of the node makes of these keys."""

    def in_thread() -> list[bytes]:
        with contextlib.closing(connect(node.config.address, soon())) as connection:
            return work(connection, open_namespace(connection), names)

    return await asyncio.to_thread(in_thread)


async def test_a_clean_stop_keeps_pages_when_told_to_and_fresh_forgets_them(tmp_path: Path) -> None:
    names = keys(3, 1)
    for fresh, work, found in ((False, put, names), (False, get, names), (True, get, [])):
        async with serving(tmp_path, keep=True, fresh=fresh) as node:
            assert await of_namespace(node, work, names) == found
    remove_arena(node.config)
    arena_dir().rmdir()


# --- a bug


async def test_an_unexpected_error_stops_the_node_and_the_next_start_has_its_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written, unlucky = keys(6, 1), keys(4, 2)

    def put_both(connection: Connection, ns: int, names: list[bytes]) -> list[bytes]:
        assert put(connection, ns, written) == written
        return put(connection, ns, unlucky)

    async def put_on_one_with_a_bug() -> None:
        async with serving(tmp_path) as node:
            commit, commits = node.state.store.commit, []

            def broken(slots: list[int], checksums: list[int], *rest: Any) -> None:
                """Fails in the middle of the second batch."""
                commits.append(commit(slots[:2], checksums[:2], *rest))
                if len(commits) == 2:
                    raise KeyError("a bug")
                commit(slots[2:], checksums[2:], *rest)

            node.state.store.commit = broken  # type: ignore[method-assign]
            with pytest.raises(PoolError):
                await of_namespace(node, put_both, [])

    with pytest.raises(NodeFailed, match="KeyError"):
        await put_on_one_with_a_bug()
    [critical] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "while handling Commit" in critical.getMessage()
    assert critical.exc_info is not None
    assert not (tmp_path / "n.sock").exists()
    async with serving(tmp_path) as node:
        assert set(await of_namespace(node, get, written + unlucky)) == set(written)


FAILING = {
    "lookup": ("pdserve.kvpool.core.lookups.Lookups.answer", m.Exists(7, 1, keys(1, 9))),
    "namespace": ("pdserve.kvpool.core.namespace_admin.check_record", m.OpenNamespace(7, "b", {})),
    "status": ("pdserve.kvpool.core.state.NodeState.status", m.Status(7)),
}


@pytest.mark.parametrize("what", FAILING)
async def test_an_error_before_anything_changed_costs_one_client_its_connection_and_not_the_node(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OverflowError("a bug")

    written, (target, message) = keys(6, 1), FAILING[what]
    async with serving(tmp_path) as node:
        assert await of_namespace(node, put, written) == written
        reader, writer = await say_hello(node.config, "none")
        assert isinstance(await reply_of(reader), m.Welcome)
        with monkeypatch.context() as patched:
            patched.setattr(target, broken)
            writer.write(encode_frame(message))
            assert await asyncio.wait_for(reader.read(), 20) == b"", "the connection ends"
        writer.close()
        assert await of_namespace(node, get, written) == written
        status = await asyncio.to_thread(fetch_status, node.config.listen[0], soon())
        assert status.counters["requests_failed"] == 1
    [line] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "OverflowError" in line.getMessage()
    assert "\n" not in line.getMessage()


# --- what keeps it from starting


def test_what_is_wrong_at_the_start_is_said_in_one_line(start: Start) -> None:
    first = start(name="first")
    assert re.search(rf"in use .*pid {os.getpid()}", start_fails(name="first"))
    assert "another process" in start_fails(listen=[first.address])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert re.search(rf"{port}.*already in use", start_fails(listen=[f"tcp:127.0.0.1:{port}"]))
    assert "at most 107 bytes" in start_fails(listen=["unix:/tmp/" + "x" * 120])
    assert not (arena_dir() / "second").exists(), "a start that failed leaves no memory behind"
    line = serve_fails("--name", "second", "--capacity-bytes", "900TiB")
    assert re.search(r"does not fit in .* GiB free\): lower capacity_bytes", line)
    assert not (arena_dir() / "second").exists()
    assert '"unix:/path" or "tcp:host:port"' in serve_fails("--listen", "7700")


def test_open_files_are_raised_to_what_is_allowed_and_too_few_are_said(start_process: StartProcess) -> None:
    pool = start_process()
    soft, hard = resource.prlimit(pool.pid, resource.RLIMIT_NOFILE)
    assert soft == hard
    assert "open files" not in pool.log()
    pool.kill()
    pool.restart(max_connections=hard)
    [line] = [line for line in pool.log().splitlines() if "open files" in line]
    assert "WARNING" in line
    assert f"needs {2 * hard + 64} open files, this process may have {hard}" in line


def test_a_start_that_fails_at_its_second_address_leaves_no_socket_at_the_first(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        second = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        node = PoolNode(small_config(listen=[f"unix:{tmp_path}/n.sock", second]))
        with pytest.raises(StartupError, match="cannot listen"):
            asyncio.run(node.serve())
    assert not (tmp_path / "n.sock").exists()
    arena_dir().rmdir()


def test_an_arena_that_cannot_be_made_leaves_no_files(tmp_path: Path) -> None:
    layout = TableLayout(1 << 50, 1 << 40, 1 << 30)
    with pytest.raises(StartupError, match="does not fit"):
        Arena("x", tmp_path / "x", layout, 1, fresh=False)
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot use"):
        Arena("x", tmp_path / "file" / "x", layout, 1, fresh=False)


def test_files_of_others_are_never_taken_for_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = TableLayout(1 << 20, 1 << 20, 1 << 13)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartupError, match="is a symbolic link"):
        Arena("x", tmp_path / "link", layout, 1, fresh=False)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StartupError, match="can be written by other users"):
        Arena("x", tmp_path / "open", layout, 1, fresh=False)
    (tmp_path / "open").chmod(0o755)
    Arena("x", tmp_path / "open", layout, 1, fresh=False).close(keep=True)
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StartupError, match="belongs to user"):
        Arena("x", tmp_path / "open", layout, 1, fresh=False)


def test_namespaces_that_cannot_be_saved_are_served_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arena = Arena("x", tmp_path / "x", TableLayout(1 << 20, 1 << 20, 1 << 13), 1, fresh=False)
    (tmp_path / "x" / "namespaces.new").mkdir()  # stands for a full tmpfs
    arena.save_namespaces(SaveNamespaces(Namespaces().dump()))
    assert "not saved" in caplog.text
    (tmp_path / "x" / "namespaces.new").rmdir()
    (tmp_path / "x" / "notes").write_text("not ours")
    arena.close(keep=False)
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["notes"]


@pytest.mark.parametrize("how", ["clear", "drop"])
def test_pages_that_were_dropped_while_the_list_could_not_be_saved_do_not_come_back(
    tmp_path: Path, how: str
) -> None:
    layout = TableLayout(1 << 20, 1 << 20, 1 << 13)
    arena = Arena("x", tmp_path / "x", layout, 1, fresh=False)
    spaces = Namespaces()
    for record in (NamespaceRecord("gone", 1, 1, {}), NamespaceRecord("other", 1, 1, {})):
        spaces.registry.learn(record)
        spaces.add(record)
    gone, other = spaces.numbers_of_spaces
    arena.save_namespaces(SaveNamespaces(spaces.dump()))
    arena.assign_slab(AssignSlab(0, 1 << 13))
    arena.reserve_rows(ReserveRows([0, 1, 2], gone))
    arena.commit_rows(CommitRows([0, 1], [bytes(32)] * 2, [gone, other], [4096] * 2, [7] * 2, [8, 9], 1.0))
    (tmp_path / "x" / "namespaces.new").mkdir()  # stands for a full tmpfs
    if how == "clear":
        spaces.clear(1)
    else:
        spaces.drop("gone")
    arena.save_namespaces(SaveNamespaces(spaces.dump()))
    arena.close(keep=True)  # as a crash leaves it
    (tmp_path / "x" / "namespaces.new").rmdir()
    again = Arena("x", tmp_path / "x", layout, 2, fresh=False)
    again.recover(again.namespaces)
    assert again.contents is not None
    assert again.contents.slots.tolist() == [1]
    assert again.contents.quarantined == [2], "somebody may be writing there"
    again.close(keep=False)


# --- bad clients


async def test_a_client_that_is_closed_and_never_reads_its_last_replies_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CLOSE_TIMEOUT_S", 0.05)
    async with serving(tmp_path) as node:
        sock = socket.socket(socket.AF_UNIX)
        with sock:
            sock.connect(f"{tmp_path}/n.sock")
            hello = encode_frame(make_hello("deaf", "", "none"))
            opened = encode_frame(m.OpenNamespace(1, "large", {"text": "x" * 60_000}))
            asked = b"".join(encode_frame(m.Status(i)) for i in range(6))  # more than a socket holds
            await asyncio.to_thread(sock.sendall, hello + opened + asked + bytes(4))
            await until_in_loop(
                lambda: (
                    bool(node._last_connection) and not (node.state.sessions.keys() - {LOCAL} or node.sockets)
                )
            )


@pytest.mark.parametrize("step", [1, 0])
async def test_half_a_frame_is_waited_for_a_bounded_time_however_slowly_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(connection_module, "HALF_FRAME_TIMEOUT_S", 0.2)
    async with serving(tmp_path) as node:
        reader, writer = await say_hello(node.config, "none")
        ping = encode_frame(m.Ping(7))
        writer.write(ping + ping[:3])  # whole frames are answered all the while
        long = (100_000).to_bytes(4, "little")
        writer.write(ping[3:] + long)
        began_s = time.monotonic()
        while not reader.at_eof():
            writer.write(b"\x90" * step)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(4096), 0.02)
            assert time.monotonic() - began_s < 30
        assert time.monotonic() - began_s > 0.1
        writer.close()


async def test_a_client_that_never_says_hello_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "n.sock"))
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
    assert "no Hello" in caplog.text


def test_a_deadline_that_is_due_at_once_does_not_disturb_what_comes_next(start: Start) -> None:
    pool = start()
    connection = pool.connect()
    ns = open_namespace(connection)
    with raw_socket(pool) as sock:
        sock.sendall(encode_frame(make_hello("x", "", "none")))
        frames, replies = FrameBuffer(), []
        # in one piece, so that the node takes the second before its timer for the first
        hasty = [m.Wait(1, ns, [bytes(32)], 1e-6), m.Ping(2), m.Wait(3, ns, [bytes(32)], 1e-6), m.Ping(4)]
        sock.sendall(b"".join(map(encode_frame, hasty)))
        while len(replies) < 5:
            data = sock.recv(4096)
            assert data
            replies += [decode_reply(body) for body in frames.feed(data)]
    absent = [reply.id for reply in replies if isinstance(reply, m.Present) and reply.mask == b"\0"]
    assert sorted(absent) == [1, 3]
    connection.close()


@pytest.fixture
def ucx_loads_when_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """UCX is not loaded before this is set."""
    told = threading.Event()

    def load_when_told() -> UcxLibrary:
        assert told.wait(20)
        return UcxLibrary()

    monkeypatch.setattr(ucx_worker, "UcxLibrary", load_when_told)
    yield told
    told.set()


async def test_while_ucx_is_loaded_others_are_served_and_who_goes_meanwhile_leaves_nothing(
    tmp_path: Path, ucx_loads_when_told: threading.Event
) -> None:
    async with serving(tmp_path) as node:
        _, gone = await say_hello(node.config, "ucx")
        staying, writer = await say_hello(node.config, "ucx")
        gone.close()
        await gone.wait_closed()
        near, other = await say_hello(node.config, "none")  # seen after the end of the first
        assert isinstance(await reply_of(near), m.Welcome)
        other.write(encode_frame(m.Ping(1)))
        assert await reply_of(near) == m.Done(1)
        ucx_loads_when_told.set()
        welcome = await reply_of(staying)
        assert isinstance(welcome, m.Welcome)
        assert welcome.ucx is not None
        assert node.data_paths.ucx._worker is not None
        peers = node.data_paths.ucx._worker._peers
        await until_in_loop(lambda: len(peers) == len(node.connections) - 1 == 1)
        writer.close()
        other.close()


async def test_a_client_waits_for_ucx_no_longer_than_the_handshake_may_take(
    tmp_path: Path,
    ucx_loads_when_told: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path) as node:
            reader, writer = await say_hello(node.config, "ucx")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            ucx_loads_when_told.set()

    assert "the data path was not ready" in caplog.text


def test_connections_share_one_mapping_and_the_last_one_is_not_held_up_by_its_end(
    start_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start_process()
    going_on, advise = threading.Event(), page_residency._advise

    def advise_when_told(reference: Callable[[], Any], advice: int) -> None:
        if advice == page_residency.MADV_DONTNEED:
            assert going_on.wait(20)
        advise(reference, advice)

    def until_mapped(times: int) -> None:
        """The thread that made a mapping's memory present may have it for a moment after its last user. Those
        of earlier tests' arenas at the same path end in "(deleted)".
        """
        until(lambda: sum(line.endswith(str(pool.arena_path)) for line in maps()) == times)

    def maps() -> list[str]:
        return Path("/proc/self/maps").read_text().splitlines()

    connections = [pool.connect() for _ in range(3)]
    until_mapped(1)  # no more that of who looked whether the node serves
    for thread in threading.enumerate():
        if thread.name == page_residency.THREAD:  # it makes the memory present
            thread.join()
    monkeypatch.setattr(page_residency, "_advise", advise_when_told)
    ns = open_namespace(connections[0])
    assert put(connections[0], ns, keys(2, 0)) == get(connections[2], ns, keys(2, 0))
    while connections:
        until_mapped(1)
        connections.pop().close()
    until_mapped(1)  # and we are here
    going_on.set()
    until_mapped(0)


def test_memory_is_made_present_once_and_for_clients_that_want_it(
    start_process: StartProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, config = start_process(), PoolClientConfig(data_path="shm")
    advised: list[int] = []
    monkeypatch.setattr(page_residency, "_advise", lambda _, advice: advised.append(advice))
    with contextlib.ExitStack() as connections:

        def connect(populate: bool) -> None:
            connector = ConfiguredConnector(config, "client", populate=populate)
            connections.callback(connector.connect(pool.address, soon()).close)

        connect(populate=False)
        assert advised == []
        connect(populate=True)
        connect(populate=True)
        for thread in threading.enumerate():
            if thread.name == page_residency.THREAD:
                thread.join()
        assert advised == [page_residency.MADV_POPULATE_WRITE]


async def test_a_node_is_reached_by_ipv6_alone_and_by_a_name_of_any_letters(tmp_path: Path) -> None:
    """UCXX listens on IPv4 only, so a client that may choose gets TCP also where UCX is allowed."""
    name = 'Mödel "x" モデル@0123'
    port = next(free_ports("::1", random.Random()))
    listen = [f"unix:{tmp_path}/n.sock", f"tcp:[::1]:{port}"]

    def used(path: m.DataPathChoice) -> tuple[list[bytes], list[bytes]]:
        connection = connect(f"tcp:[::1]:{port}", soon(), path)
        try:
            space, wanted = open_namespace(connection, name), keys(3, seed=ord(path[0]))
            return put(connection, space, wanted), get(connection, space, wanted)
        finally:
            connection.close()

    ucx = UcxConfig(trusted_network=True)
    async with serving(tmp_path, listen=listen, ucx=ucx, insecure=True) as node:
        for path in ("shm", "tcp"):
            wanted = keys(3, seed=ord(path[0]))
            assert await asyncio.to_thread(used, path) == (wanted, wanted)
        with pytest.raises(PoolRefused, match="no UCX over IPv6"):
            await asyncio.to_thread(used, "ucx")
        status = await asyncio.to_thread(fetch_status, node.config.listen[0], soon())
        assert name in [space.name for space in status.namespaces]
