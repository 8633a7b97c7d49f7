"""Redis: a server on a Unix socket, batches as one MSET and one MGET.

Redis hands out each value as a Python object; copying it into the page's buffer is part of the get, because a
KV cache needs the bytes there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import server
from benchmarks.stores import BenchError, PageStore
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

HOW_TO_INSTALL = "apt-get install redis-server; pip install '.[bench]' in the checkout"


class RedisStore:
    """A connection to the server."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def lend(self, blocks: Sequence[Bytes1D]) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        values = {key: page.data for key, (page,) in zip(keys, pages, strict=True)}
        if not self._client.mset(values):
            raise BenchError("redis did not store a batch")

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        values = self._client.mget(keys)
        for value, (page,) in zip(values, pages, strict=True):
            if value is None:
                raise BenchError("redis did not return a page that was just put")
            np.copyto(page, np.frombuffer(value, np.uint8))

    def forget(self, keys: Sequence[bytes]) -> None:
        self._client.unlink(*keys)


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[tuple[Path, Any]]:
    """A server without persistence: its socket, and a connection to it. Raises BenchError."""
    program = shutil.which("redis-server")
    try:
        import redis
    except ModuleNotFoundError:
        program = None
    if program is None:
        raise BenchError(f"redis is not installed: {HOW_TO_INSTALL}")
    path = directory / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", *options]
    client = redis.Redis(unix_socket_path=str(path), socket_timeout=60)

    def ready() -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    with server("redis", command, directory / "redis.log", ready):
        try:
            yield path, client
        except redis.RedisError as error:
            raise BenchError(f"redis: {error}") from error
        finally:
            client.close()


@contextmanager
def redis_store(capacity_bytes: int, directory: Path) -> Iterator[PageStore]:
    """A server, and a connection to it. Raises BenchError."""
    with redis_server(directory, "--maxmemory", str(2 * capacity_bytes)) as (_, client):
        yield RedisStore(client)
