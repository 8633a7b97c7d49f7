"""Peers by the names of `python -m benchmarks pool --peer`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.mooncake import mooncake_store
from benchmarks.peers.redis import redis_store
from benchmarks.peers.sockets import WAYS, sockets_gbps
from benchmarks.peers.ucx_perftest import ucx_perftest_gbps
from benchmarks.stores import PageStore
from pdserve.kvpool.transports.ucx import ucx_options

STORES: Final[dict[str, Callable[[int, Path], AbstractContextManager[PageStore]]]] = {
    "mooncake": mooncake_store,
    "redis": redis_store,
}


@contextmanager
def stores(names: Sequence[str], capacity_bytes: int) -> Iterator[dict[str, PageStore]]:
    """The named stores, running, each with room for at least `capacity_bytes`. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="pdserve-peers-") as directory, ExitStack() as running:
        yield {name: running.enter_context(STORES[name](capacity_bytes, Path(directory))) for name in names}


def bandwidth_gbps(name: str, page_bytes: int) -> float:
    """Bandwidth of what is no store, in 10^9 bytes/s: `ucx_perftest`, `ucx_perftest_tuned`, or one of
    `sockets.WAYS`. Raises BenchError.
    """
    if name in WAYS:
        return sockets_gbps(name, page_bytes)
    settings = {"ucx_perftest": {"TLS": "tcp"}, "ucx_perftest_tuned": ucx_options({})}
    return ucx_perftest_gbps(page_bytes, settings[name])
