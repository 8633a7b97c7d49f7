"""What tests of a real node share: small nodes, pages with known bytes, raw connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import PdserveError
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import decode_reply, encode_frame
from pdserve.kvpool.transports.base import OK, Connection
from pdserve.kvpool.transports.control import make_hello
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.pools import ProcessPool, arena_dir
from tests.support.waiting import soon

KIB = 1024


PAGE_BYTES = 24 * KIB


Start = Callable[..., LocalNode]
StartProcess = Callable[..., ProcessPool]


def small_config(**options: Any) -> PoolNodeConfig:
    usual = {"name": "node", "arena_dir": arena_dir(), "capacity_bytes": 16 << 20, "max_client_share": 1.0}
    return PoolNodeConfig(**usual | options)


def page_of(key: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that belong to a key: so a reader knows what is right."""
    return np.frombuffer((key * (PAGE_BYTES // 32 + 1))[:PAGE_BYTES], np.uint8)


def open_namespace(connection: Connection, name: str = "ns", **geometry: str) -> int:
    reply = connection.call(m.OpenNamespace(1, name, geometry), soon())
    assert isinstance(reply, m.Opened)
    return reply.namespace


def put(connection: Connection, ns: int, keys: list[bytes]) -> list[bytes]:
    """Write pages; the keys whose commit was acknowledged."""
    if len(keys) > m.MAX_PAGES:
        return put(connection, ns, keys[: m.MAX_PAGES]) + put(connection, ns, keys[m.MAX_PAGES :])
    reserved = connection.call(m.Reserve(2, ns, keys, [PAGE_BYTES]), soon())
    assert isinstance(reserved, m.Reserved)
    granted = [(k, g) for k, g in zip(keys, reserved.grants, strict=True) if g.status == m.GRANTED]
    grants = [g for _, g in granted]
    sums = connection.write_pages(grants, [[page_of(k)] for k, _ in granted], soon())
    commit = m.Commit(3, [g.slot for g in grants], [g.sequence for g in grants], sums)
    committed = connection.call(commit, soon())
    assert isinstance(committed, m.Committed)
    return [k for (k, _), ok in zip(granted, committed.mask, strict=True) if ok]


def get(connection: Connection, ns: int, keys: list[bytes]) -> list[bytes]:
    """The keys found. Fails when any delivered page has wrong bytes."""
    if len(keys) > m.MAX_PAGES:
        return get(connection, ns, keys[: m.MAX_PAGES]) + get(connection, ns, keys[m.MAX_PAGES :])
    got = connection.call(m.Get(4, ns, keys, [PAGE_BYTES]), soon())
    assert isinstance(got, m.Got)
    hits = [(k, p) for k, p in zip(keys, got.pins, strict=True) if p.status == m.HIT]
    pages = [[np.zeros(PAGE_BYTES, np.uint8)] for _ in hits]
    outcomes = connection.read_pages([p for _, p in hits], pages, soon())  # type: ignore[arg-type]
    for (key, _), outcome, [page] in zip(hits, outcomes, pages, strict=True):
        assert outcome != OK or np.array_equal(page, page_of(key))
    connection.post(m.Release([p.slot for _, p in hits], [p.sequence for _, p in hits]))
    return [k for (k, _), outcome in zip(hits, outcomes, strict=True) if outcome == OK]


def keys(count: int, seed: int = 1) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(32) for _ in range(count)]


def start_fails(**options: Any) -> str:
    """The one line that a node which does not start is ended with. It has a name of its own."""
    with pytest.raises(PdserveError) as error:
        asyncio.run(PoolNode(small_config(**{"name": "second", **options})).serve())
    assert "\n" not in str(error.value)
    return str(error.value)


def serve_fails(*flags: str) -> str:
    """The one line that `pdserve pool serve` ends with, as a process."""
    code = "import sys; from pdserve.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "pool", "serve", "--arena-dir", str(arena_dir()), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def raw_socket(pool: LocalNode | ProcessPool) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(pool.address.removeprefix("unix:"))
    return sock


@contextlib.asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[PoolNode]:
    """A node in this event loop. At its end it must leave no memory behind, where it is not to keep it."""
    config = small_config(**{"listen": [f"unix:{directory}/n.sock"], "keep": False, **options})
    node = PoolNode(config)
    ready = asyncio.Event()
    task = asyncio.create_task(node.serve(ready.set))
    task.add_done_callback(lambda _: ready.set())  # it did not start
    try:
        await ready.wait()
        if task.done():
            await task
        yield node
    finally:
        node.stop()
        await task
    if not config.keep:
        arena_dir().rmdir()


async def say_hello(config: PoolNodeConfig, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(config.listen[0].removeprefix("unix:"))
    writer.write(encode_frame(make_hello("x", "", path)))  # type: ignore[arg-type]
    return reader, writer


async def reply_of(reader: asyncio.StreamReader) -> m.Reply:
    size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), 20), "little")
    return decode_reply(await asyncio.wait_for(reader.readexactly(size), 20))
