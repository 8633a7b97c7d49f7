"""A pool node of the benchmark's own, and clients to it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

from pdserve.bench.node_processes import NodeProcess, client_of, pool_of
from pdserve.bench.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.messages import DataPathChoice

TIMEOUTS: Final = {"connect_timeout_s": 10.0, "get_timeout_s": 60.0, "put_timeout_s": 60.0}

Connect = Callable[[DataPathChoice, bool], AbstractContextManager[PoolClient]]


@contextmanager
def bench_node(capacity: str, slab_bytes: int) -> Iterator[Connect]:
    """Start a node in a temporary directory; yields `connect(path, checksum)`. Raises BenchError."""
    settings = {"capacity_bytes": capacity, "slab_bytes": slab_bytes, "keep": False}
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory,
        pool_of(1, Path(directory), settings) as (node,),
    ):
        yield lambda path, checksum: _client(node, path, checksum)
        node.stop()


@contextmanager
def _client(node: NodeProcess, path: DataPathChoice, checksum: bool) -> Iterator[PoolClient]:
    config = client_of([node], path, checksum=checksum, **TIMEOUTS)
    with closing(PoolClient(config, "bench", {"bench": "1"}, name="bench")) as client:
        if (problem := client.check()[node.name]) is not None:
            raise BenchError(str(problem)) from problem
        yield client
        client.clear()
