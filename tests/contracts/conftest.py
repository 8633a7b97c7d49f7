"""Every contract test runs once per transport. To add one, name it here and let `pools.py` connect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.kvpool.node.config import PoolNodeConfig
from tests.support.certificates import Authority
from tests.support.kvpool.pools import (
    KIB,
    ProcessPool,
    arena_dir,
    remove_arena,
    remove_arena_dir,
)

TRANSPORTS = ("shm", "ucx", "tcp", "tcp-tls")
_numbers = itertools.count()


@pytest.fixture(params=TRANSPORTS, scope="module")
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def make_pool(
    transport: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ProcessPool]]:
    """Start a node of 4 slabs of 4 MiB; `options` are those of PoolNodeConfig. Stopped after the module."""
    pools: list[ProcessPool] = []
    configs: list[PoolNodeConfig] = []

    def make(**options: Any) -> ProcessPool:
        defaults: dict[str, Any] = {
            "capacity_bytes": 16 * KIB * KIB,
            "page_bytes": 4 * KIB * KIB,
            "max_client_share": 1.0,
        }
        name = f"n{next(_numbers)}"
        if transport == "tcp-tls":
            defaults["tls"] = Authority(tmp_path_factory.mktemp("ca")).host(mutual=True)
        config = PoolNodeConfig(name=name, arena_dir=arena_dir(), **{**defaults, **options})
        configs.append(config)
        data_path: Any = transport.removesuffix("-tls")
        pools.append(ProcessPool(config, tmp_path_factory.mktemp(name), data_path))
        return pools[-1]

    try:
        yield make
        for pool in pools:
            pool.close()
    finally:
        for pool in pools:
            pool.kill()
        for config in configs:
            remove_arena(config)
        remove_arena_dir()


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., ProcessPool]) -> ProcessPool:
    """A node that many tests share: each takes a namespace of its own, and leaves the node alive."""
    return make_pool()
