"""A real node, an innocent client at work, and beside it somebody who sends what nobody should: a clear
error on that side, nothing on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, PoolError
from pdserve.kvpool.admin.node_client import fetch_status
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.process import run_node
from pdserve.kvpool.node.serving import connection as connection_module
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.transports.control import make_hello
from pdserve.settings.config_file import load_config
from tests.support.kvpool.clients import until
from tests.support.kvpool.mounts import mounted
from tests.support.kvpool.nodes import (
    get,
    keys,
    open_namespace,
    put,
    raw_socket,
    say_hello,
    serving,
    small_config,
    soon,
    start_fails,
)
from tests.support.kvpool.pools import ProcessPool, arena_dir

HANGS_S = 30.0  # no bound of the product's: after it a test is taken to hang
HELLO = encode_frame(make_hello("attacker", "", "none"))
_seeds = itertools.count()  # no two rounds of the whole module write the same keys


class Innocent:
    """Writes and reads in a thread until told to stop; checks every byte."""

    def __init__(self, pool: ProcessPool) -> None:
        self.rounds = 0
        self._connection = pool.connect()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            ns = open_namespace(self._connection, "innocent")
            while not self._stop.is_set():
                some = keys(8, next(_seeds))
                assert put(self._connection, ns, some) == some
                assert get(self._connection, ns, some) == some
                self.rounds += 1
        except (AssertionError, PoolError) as error:
            self._error = error

    def goes_on(self, rounds: int = 5) -> None:
        """It does as many more rounds from now on."""
        wanted, deadline = self.rounds + rounds, soon(HANGS_S)
        while self.rounds < wanted and self._error is None:
            assert time.monotonic() < deadline, "the innocent client is held up"
            time.sleep(0.005)
        self._check()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(HANGS_S)
        self._connection.close()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """One for all: it has to outlive them."""
    home = Path(f"{arena_dir()}-attacked")
    pool = ProcessPool(small_config(arena_dir=home), tmp_path_factory.mktemp("node"), "shm")
    pid = pool.pid
    yield pool
    assert pool.pid == pid
    pool.close()
    home.rmdir()


@pytest.fixture
def innocent(node: ProcessPool) -> Iterator[tuple[ProcessPool, Innocent]]:
    """The node with a client at work, and afterwards still so."""
    pool = node
    client = Innocent(pool)
    try:
        client.goes_on()
        yield pool, client
        client.goes_on()
    finally:
        client.end()
    assert "Traceback" not in pool.log.read_text()
    assert "CRITICAL" not in pool.log.read_text()


def said_before_the_end(pool: ProcessPool, data: bytes) -> str | None:
    """The Fault that the node answers this with; None when it just hangs up."""
    with raw_socket(pool) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)
        received = FrameBuffer()
        while more := sock.recv(65536):
            for body in received.feed(more):
                if isinstance(reply := decode_reply(body), m.Fault):
                    return reply.message
    return None


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


ENDS_WITH_A_WORD = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "does not speak the pdserve pool protocol"),
    "a frame of 4 GiB": (b"\xff\xff\xff\xff", "frame of 4294967295 bytes, allowed are 1 to 4096"),
    "no msgpack": (frame(b"\xc1\xc1"), "not a pool request"),
    "no hello": (encode_frame(m.Ping(1)), "must be Hello"),
    "another version": (
        encode_frame(m.Hello(99, "new", 1, "h")),
        "speaks version 1 of the pool protocol, client new version 99",
    ),
    "a data path there is not": (encode_frame(m.Hello(1, "x", 1, "h", "pigeon")), "not a pool request"),  # type: ignore[arg-type]
    "hello twice": (HELLO + HELLO, None),
    "too many keys": (
        HELLO + encode_frame(m.Exists(1, 1, [bytes(32)] * 5000)),
        "5000 keys in one message, at most 4096",
    ),
}


@pytest.mark.parametrize("what", ENDS_WITH_A_WORD)
def test_what_is_no_request_ends_its_own_connection_with_a_word(
    innocent: tuple[ProcessPool, Innocent], what: str
) -> None:
    pool, _ = innocent
    data, word = ENDS_WITH_A_WORD[what]
    before = len(pool.log.read_text().splitlines())
    said = said_before_the_end(pool, data)
    assert word is None or (said is not None and word in said), said

    def lines() -> list[str]:
        return pool.log.read_text().splitlines()[before:]

    until(lambda: bool(lines()))  # the node writes it as it hangs up
    assert len(lines()) == 1, lines()
    assert re.search("(closing|turning away) the connection of", lines()[0])


def test_a_name_with_control_characters_makes_no_line_of_its_own_in_the_log(
    innocent: tuple[ProcessPool, Innocent],
) -> None:
    pool, _ = innocent
    hello = encode_frame(make_hello("x\n2026 ERROR \x1b[31mlies" + "y" * 3_000, "", "none"))
    lines: list[str] = []
    deadline = soon()
    while not lines:  # strangers get some lines a second, which the test before may have used up
        assert time.monotonic() < deadline
        said_before_the_end(pool, hello + bytes(4))
        lines = [line for line in pool.log.read_text().splitlines() if "lies" in line]
    for line in lines:
        assert "x?2026 ERROR ?[31mlies" in line
        assert len(line) < 400


def test_a_thousand_sockets_that_say_nothing_leave_the_others_their_node(
    innocent: tuple[ProcessPool, Innocent],
) -> None:
    pool, client = innocent
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    silent = []
    try:
        for _ in range(1500):  # more than max_connections and those that may shake hands beside them
            sock = socket.socket(socket.AF_UNIX)
            silent.append(sock)
            deadline = soon()
            while sock.connect_ex(pool.address.removeprefix("unix:")) == errno.EAGAIN:  # the backlog is full
                assert time.monotonic() < deadline
                time.sleep(0.001)
        deadline = soon()
        while "too many connections" not in pool.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.goes_on()
    finally:
        for sock in silent:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    deadline = soon()
    while True:
        try:
            assert fetch_status(pool.address, soon()).connections == 2
            return
        except PoolError:  # until the node has seen that they went
            assert time.monotonic() < deadline
            time.sleep(0.01)


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
            assert time.monotonic() - began_s < HANGS_S
        assert time.monotonic() - began_s > 0.1
        writer.close()


def test_geometries_of_any_size_leave_a_status_that_can_be_read(
    innocent: tuple[ProcessPool, Innocent],
) -> None:
    pool, _ = innocent
    connection = pool.connect()
    replies = [
        connection.call(m.OpenNamespace(1, f"large-{at}", {"text": "x" * 60_000}), soon())
        for at in range(100)
    ]
    assert isinstance(replies[-1], m.Fault)
    opened = sum(isinstance(reply, m.Opened) for reply in replies)
    assert len(fetch_status(pool.address, soon()).namespaces) == opened + 1
    for at in range(opened):
        assert isinstance(connection.call(m.DropNamespace(2, f"large-{at}"), soon()), m.Done)
    connection.close()


# --- full and read-only


def small_tmpfs(directory: Path, size: str) -> contextlib.AbstractContextManager[Path]:
    return mounted(directory, "tmpfs", f"size={size},mode=700")


def test_a_tmpfs_too_small_for_the_arena_is_said_and_left_clean(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", "20m") as directory:
        line = start_fails(arena_dir=directory, capacity_bytes="32MiB")
        assert f"does not fit in {directory}" in line
        assert "lower capacity_bytes" in line
        assert list(directory.iterdir()) == []


def test_when_the_tmpfs_is_full_namespaces_that_cannot_be_saved_are_served_all_the_same(
    tmp_path: Path,
) -> None:
    with small_tmpfs(tmp_path / "full", "17m") as directory:
        pool = ProcessPool(small_config(name="full", arena_dir=directory), tmp_path, "shm")
        client = Innocent(pool)
        try:
            client.goes_on()
            filler = os.open(directory / "filler", os.O_WRONLY | os.O_CREAT)
            with contextlib.suppress(OSError):
                while True:
                    os.write(filler, bytes(4096))
            os.close(filler)
            connection = pool.connect()
            ns = open_namespace(connection, "new", text="x" * 50_000)
            some = keys(5, 3)
            assert put(connection, ns, some) == some
            assert get(connection, ns, some) == some
            [line] = [line for line in pool.log.read_text().splitlines() if "not saved" in line]
            assert "No space left" in line
            connection.close()
            client.goes_on()
        finally:
            client.end()
            pool.kill()


def test_a_read_only_arena_directory_is_said_in_one_line(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "ro", "64m") as directory:
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        line = start_fails(arena_dir=directory)
        assert f"cannot use {directory}/second for the arena: Read-only file system" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('capacity_bytes = "1MiB"', "min_slot_bytes <= slab_bytes <= capacity_bytes"),
        ('capacity_bytes = "-1"', "not a size"),
        ("capacity_bytes = []", "capacity_bytes"),
        ("capactiy_bytes = 5", "unknown key 'capactiy_bytes' (did you mean 'capacity_bytes'?)"),
        ("lease_s = nan", "lease_s"),
        ("max_connections = 0", "max_connections"),
        ("name = 'a b'", "name"),
        ("metrics = 'here'", "metrics must be host:port"),
        ("log_format = 'xml'", "log_format"),
        ("[[namespaces]]\nname = 'n'\npolicy = 'newest'", "policy"),
        ("[[namespaces]]\nname = 'n'\nquota_bytes = '900TiB'", "quota"),
        ("listen = ['tcp:0.0.0.0:1']", "insecure = true"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_configuration_that_cannot_be_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text + "\n")
    with pytest.raises(ConfigError) as error:
        run_node(load_config(PoolNodeConfig, file, {"arena_dir": str(tmp_path / "arena")}))
    assert said in str(error.value)
    assert str(error.value).count("\n") == 0
    assert not (tmp_path / "arena").exists()
