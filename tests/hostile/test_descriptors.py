"""Who gets a node's memory, and what a client lets a node have it map: descriptors, never paths."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.errors import PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.node.config import NamespaceConfig, NamespaceDefaults
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, encode_frame
from pdserve.kvpool.protocol.slot_table import TABLE_MAGIC, TABLE_VERSION, TableLayout
from pdserve.kvpool.transports import shm
from pdserve.kvpool.transports.shm import host_id
from pdserve.security.tokens import Secret
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, small_config
from tests.support.kvpool.pools import ProcessPool
from tests.support.waiting import soon

KIB = 1024
NOBODY = 65534
INCARNATION = 77
LAYOUT = TableLayout(64 * KIB, 64 * KIB, 8 * KIB)
ADMIN_TOKEN = "the-token-of-this-pools-operator"
READ_TOKEN = "the-token-of-those-who-may-read-it"
WRITE_TOKEN = "the-token-of-those-who-may-write-it"


class FalseNode:
    """Answers every Hello with this memory, and all who connect to its descriptor socket as told."""

    def __init__(self, directory: Path, arena: m.ArenaInfo, give: Callable[[socket.socket], None]) -> None:
        welcome = m.Welcome(m.PROTOCOL_VERSION, "false", INCARNATION, host_id(), "shm", 30.0, arena)
        self.address = f"unix:{directory}/false.sock"
        self._listening = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self._open: list[socket.socket] = []
        for listener, name in zip(self._listening, ("false.sock", "descriptors"), strict=True):
            listener.bind(str(directory / name))
            listener.listen()
        self._threads = [
            threading.Thread(target=self._serve, args=(self._listening[0], self._greet(welcome))),
            threading.Thread(target=self._serve, args=(self._listening[1], give)),
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.settimeout(10)
                self._open.append(client)
                answer(client)

    def _greet(self, welcome: m.Welcome) -> Callable[[socket.socket], None]:
        def answer(client: socket.socket) -> None:
            frames = FrameBuffer()
            while not list(frames.feed(client.recv(65536))):
                pass
            client.sendall(encode_frame(welcome))

        return answer

    def close(self) -> None:
        while self._listening:
            listener = self._listening.pop()
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(10)
        for client in self._open:
            client.close()


def table_file(path: Path, layout: TableLayout = LAYOUT, incarnation: int = INCARNATION) -> Path:
    """A slot table as a client expects it."""
    path.write_bytes(bytes(layout.table_bytes))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        header = layout.header(memoryview(memory))
        header["version"], header["magic"], header["incarnation"] = TABLE_VERSION, TABLE_MAGIC, incarnation
        header["arena_bytes"], header["slab_bytes"] = layout.arena_bytes, layout.slab_bytes
        header["min_slot_bytes"] = layout.min_slot_bytes
        del header
    return path


@pytest.fixture
def false_node(tmp_path: Path) -> Iterator[Callable[..., FalseNode]]:
    nodes: list[FalseNode] = []

    def start(arena: m.ArenaInfo, give: Callable[[socket.socket], None]) -> FalseNode:
        nodes.append(FalseNode(tmp_path, arena, give))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def put_through(address: str) -> None:
    """What a client's put does with a node that grants it a slot."""
    connection = connect(address, soon(2))
    with contextlib.closing(connection):
        grant = m.Grant(m.GRANTED, 0, 0, 1)
        connection.write_pages([grant], [[np.full(8 * KIB, 7, np.uint8)]], soon())


class Gives:
    """A descriptor socket that sends these files."""

    def __init__(self, *files: tuple[Path, int]) -> None:
        self._files = files

    def __call__(self, client: socket.socket) -> None:
        fds = [os.open(path, flags) for path, flags in self._files]
        with client:
            socket.send_fds(client, [b"m"], fds)
        for fd in fds:
            os.close(fd)


def info(directory: Path, **changes: int) -> m.ArenaInfo:
    sizes = {"arena_bytes": LAYOUT.arena_bytes, "table_bytes": LAYOUT.table_bytes} | changes
    return m.ArenaInfo(f"{directory}/descriptors", sizes["arena_bytes"], sizes["table_bytes"])


def arena_file(path: Path, size: int = LAYOUT.arena_bytes) -> Path:
    path.write_bytes(bytes(size))
    return path


def test_memory_that_is_given_as_told_is_mapped_and_written(
    tmp_path: Path, false_node: Callable[..., FalseNode]
) -> None:
    arena = arena_file(tmp_path / "arena")
    gives = Gives((arena, os.O_RDWR), (table_file(tmp_path / "table"), os.O_RDONLY))
    put_through(false_node(info(tmp_path), gives).address)
    assert arena.read_bytes()[: 8 * KIB] == bytes([7]) * 8 * KIB


def test_memory_that_another_user_gives_is_not_mapped(
    tmp_path: Path, false_node: Callable[..., FalseNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    gives = Gives((arena_file(tmp_path / "arena"), os.O_RDWR), (table_file(tmp_path / "table"), os.O_RDONLY))
    monkeypatch.setattr(shm, "peer_uid", lambda _: NOBODY)
    with pytest.raises(PoolRefused, match="belongs to another user"):
        put_through(false_node(info(tmp_path), gives).address)


OTHERS: dict[str, Callable[[Path], Gives]] = {
    "a shorter arena": lambda at: Gives(
        (arena_file(at / "arena", 8), os.O_RDWR), (table_file(at / "table"), os.O_RDONLY)
    ),
    "a device": lambda at: Gives((Path("/dev/zero"), os.O_RDWR), (table_file(at / "table"), os.O_RDONLY)),
    "a longer table": lambda at: Gives(
        (arena_file(at / "arena"), os.O_RDWR),
        (table_file(at / "table", TableLayout(128 * KIB, 64 * KIB, 8 * KIB)), os.O_RDONLY),
    ),
    "the table of another incarnation": lambda at: Gives(
        (arena_file(at / "arena"), os.O_RDWR), (table_file(at / "table", incarnation=8), os.O_RDONLY)
    ),
    "one descriptor": lambda at: Gives((arena_file(at / "arena"), os.O_RDWR)),
    "three descriptors": lambda at: Gives(*[(arena_file(at / "arena"), os.O_RDWR)] * 3),
    "a file that is not for writing": lambda at: Gives(
        (arena_file(at / "arena"), os.O_RDONLY), (table_file(at / "table"), os.O_RDONLY)
    ),
}


def open_files(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("others", OTHERS)
def test_other_files_than_told_are_not_written(
    tmp_path: Path, false_node: Callable[..., FalseNode], others: str
) -> None:
    node = false_node(info(tmp_path), OTHERS[others](tmp_path))
    before = {path: path.read_bytes() for path in (tmp_path / "arena", tmp_path / "table") if path.exists()}
    open_before = open_files()
    with pytest.raises((PoolRefused, PoolUnavailable)):
        put_through(node.address)
    assert {path: path.read_bytes() for path in before} == before
    node.close()
    assert open_files() <= open_before


def test_a_slot_outside_the_memory_is_not_written(
    tmp_path: Path, false_node: Callable[..., FalseNode]
) -> None:
    arena = arena_file(tmp_path / "arena")
    gives = Gives((arena, os.O_RDWR), (table_file(tmp_path / "table"), os.O_RDONLY))
    connection = connect(false_node(info(tmp_path), gives).address, soon())
    page = [np.full(8 * KIB, 7, np.uint8)]
    for offset in (-8 * KIB, LAYOUT.arena_bytes - 1, LAYOUT.arena_bytes, 1 << 62):
        with pytest.raises(PoolUnavailable, match="outside"):
            connection.write_pages([m.Grant(m.GRANTED, 0, offset, 1)], [page], soon())
        with pytest.raises(PoolUnavailable, match="outside"):
            connection.read_pages([m.Pin(m.HIT, 0, offset)], [page], soon())
    for slot in (-1, LAYOUT.rows, 1 << 62):
        with pytest.raises(PoolUnavailable, match="outside"):
            connection.read_pages([m.Pin(m.HIT, slot, 0)], [page], soon())
    assert not any(arena.read_bytes())
    connection.close()


def test_a_descriptor_socket_that_says_nothing_is_left_at_the_deadline(
    tmp_path: Path, false_node: Callable[..., FalseNode]
) -> None:
    node = false_node(info(tmp_path), lambda client: None)
    with pytest.raises(PoolTimeout):
        connect(node.address, soon(0.3))


def test_one_that_hangs_up_is_a_node_that_has_ended(
    tmp_path: Path, false_node: Callable[..., FalseNode]
) -> None:
    node = false_node(info(tmp_path), socket.socket.close)
    with pytest.raises(PoolUnavailable):
        connect(node.address, soon())


@pytest.mark.parametrize("path", ["relative", "\0abstract", "/a\0b", "/" + "x" * 300, "/nowhere/at/all", "/"])
def test_a_name_that_is_no_sockets_is_refused(
    tmp_path: Path, false_node: Callable[..., FalseNode], path: str
) -> None:
    arena = m.ArenaInfo(path, LAYOUT.arena_bytes, LAYOUT.table_bytes)
    node = false_node(arena, socket.socket.close)
    with pytest.raises((PoolRefused, PoolUnavailable), match="cannot map its memory"):
        connect(node.address, soon())


# --- a real node


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    tokens = {"read_token": Secret(READ_TOKEN), "write_token": Secret(WRITE_TOKEN)}
    config = small_config(
        name="giving",
        admin_token=Secret(ADMIN_TOKEN),
        arena_dir=tmp_path / "arena",
        namespaces=[NamespaceConfig(name="guarded", **tokens)],
        namespace_defaults=NamespaceDefaults(**tokens),
    )
    pool = ProcessPool(config, tmp_path, "shm")
    try:
        yield pool
    finally:
        pool.close()


AS_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setresgid(*3 * [int(sys.argv[2])])
os.setresuid(*3 * [int(sys.argv[2])])
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(10)
    try:
        sock.connect(sys.argv[1])
        data, fds, _, _ = socket.recv_fds(sock, 16, 4)
    except PermissionError:
        sys.exit("refused by the file system")
    print(len(data), len(fds))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("name", ["readers", "writers"])
def test_another_user_gets_no_descriptor(pool: ProcessPool, tmp_path: Path, name: str) -> None:
    path = pool.arena_path.with_name(name)

    def as_nobody() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-c", AS_NOBODY, str(path), str(NOBODY)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert "refused by the file system" in as_nobody().stderr
    path.chmod(0o777)
    for directory in path.parents[:-2]:
        directory.chmod(directory.stat().st_mode | 0o111)
    try:
        assert as_nobody().stdout == "0 0\n"
    finally:
        path.parent.chmod(0o700)
        tmp_path.parent.chmod(0o700)


def test_who_may_only_read_gets_memory_that_he_cannot_write(pool: ProcessPool) -> None:
    writer = connect(pool.address, soon(), token=WRITE_TOKEN)
    reader = connect(pool.address, soon(), token=READ_TOKEN)
    some = keys(3, 1)
    assert put(writer, open_namespace(writer, "guarded"), some) == some
    assert get(reader, open_namespace(reader, "guarded"), some) == some
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert sorted(line[1] for line in maps if line[-1] == str(pool.arena_path)) == ["r--s", "rw-s"]
    page = [np.zeros(8 * KIB, np.uint8)]
    with pytest.raises(PoolUnavailable, match="for reading"):
        reader.write_pages([m.Grant(m.GRANTED, 0, 0, 1)], [page], soon())
    arena = reader.welcome.arena
    assert arena is not None
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(arena.socket_path)
        _, fds, _, _ = socket.recv_fds(sock, 1, 2)
    for fd in fds:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
    writer.close()
    reader.close()


def test_hundreds_who_ask_at_once_leave_nothing_open_and_all_get_theirs(pool: ProcessPool) -> None:
    connect(pool.address, soon(), token=WRITE_TOKEN).close()
    path = str(pool.arena_path.with_name("readers"))
    before = open_files(pool.pid)
    waiting = []
    for _ in range(300):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(path)
        waiting.append(sock)
    for sock in waiting:
        with sock:
            _, given, _, _ = socket.recv_fds(sock, 1, 2)
            assert len(given) == 2
            for fd in given:
                os.close(fd)
    connect(pool.address, soon(), token=WRITE_TOKEN).close()
    assert open_files(pool.pid) <= before + 2  # connections of this test that the node has yet to close


def test_a_node_that_was_killed_leaves_sockets_that_the_next_replaces(pool: ProcessPool) -> None:
    some = keys(3, 2)
    writer = connect(pool.address, soon(), token=WRITE_TOKEN)
    assert put(writer, open_namespace(writer, "guarded"), some) == some
    arena = writer.welcome.arena
    assert arena is not None
    pool.kill()
    writer.close()
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as sock:
        sock.connect(arena.socket_path)
    pool.restart()
    reader = connect(pool.address, soon(), token=READ_TOKEN)
    assert get(reader, open_namespace(reader, "guarded"), some) == some
    reader.close()
