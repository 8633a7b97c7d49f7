"""A pool node of the benchmark's own, and clients to it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, cast

from pdserve.bench.node_processes import NodeProcess
from pdserve.bench.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol.messages import DataPathChoice

CONNECT_TIMEOUT_S: Final = 10.0
NODE_NAME: Final = "bench"

Connect = Callable[[str, bool], AbstractContextManager[PoolClient]]


@contextmanager
def bench_node(capacity: str, slab_bytes: int) -> Iterator[Connect]:
    """Start a node in a temporary directory; yields `connect(path, checksum)`. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        settings = {"capacity_bytes": capacity, "slab_bytes": slab_bytes, "keep": False}
        node = NodeProcess(NODE_NAME, Path(directory), settings)
        try:
            node.start()
            yield lambda path, checksum: _client(node.address, path, checksum)
            node.stop()
        finally:
            node.close()


@contextmanager
def _client(address: str, path: str, checksum: bool) -> Iterator[PoolClient]:
    config = PoolClientConfig(
        nodes=[PoolNodeRef(node=NODE_NAME, address=address)],
        data_path=cast(DataPathChoice, path),
        checksum=checksum,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        get_timeout_s=60.0,
        put_timeout_s=60.0,
    )
    client = PoolClient(config, "bench", {"bench": "1"}, name="bench")
    try:
        problem = client.check()[NODE_NAME]
        if problem is not None:
            raise BenchError(str(problem)) from problem
        yield client
        client.clear()
    finally:
        client.close()
