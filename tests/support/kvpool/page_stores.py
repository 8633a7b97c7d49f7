"""Stores of pages under test: one in this process, and how each kind is run for the contract suite."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from docs.examples.store import DirectoryStore
from docs.generate.product import ROOT
from pdserve.errors import PoolError, PoolUnavailable
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.stores.base import MakeStore, StoreSettings
from pdserve.kvpool.stores.client import PageClient, StoreClient
from pdserve.kvpool.stores.mooncake import MooncakeStore
from pdserve.kvpool.stores.registry import GROUP
from tests.support.kvpool.pools import KIB, ProcessPool, arena_dir, remove_arena, remove_arena_dir
from tests.support.mooncake import mooncake_servers
from tests.support.processes import free_ports

MIB = KIB * KIB
GEOMETRY = {"page_size": "64"}
RETRY_S = 0.02
LEASE_MS = 1000
"""For which Mooncake keeps what was asked for. A read that takes longer is a miss. Its default is 5 s."""


class MemoryServer:
    """What all clients of the store in this process see. `is_down`: it serves nobody."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, bytes], bytes] = {}
        self.is_down = False
        self.lock = threading.Lock()
        self.before: Callable[[str], None] = lambda call: None
        """Called at the begin of each call, outside of the lock."""

    def store(self, settings: StoreSettings) -> MemoryStore:
        return MemoryStore(self, settings)


class MemoryStore:
    """A `PageStore`."""

    def __init__(self, server: MemoryServer, settings: StoreSettings) -> None:
        self._server = server
        self._namespace = settings.namespace
        self._closed = False

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._pages("exists") as pages:
            return [(self._namespace, key) in pages for key in keys]

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        with self._pages("get") as stored:
            found = [stored.get((self._namespace, key)) for key in keys]
        return [_fill(page, data) for page, data in zip(pages, found, strict=True)]

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        with self._pages("put") as stored:
            for key, page in zip(keys, pages, strict=True):
                stored.setdefault((self._namespace, key), b"".join(map(bytes, page)))
        return [True] * len(keys)

    def clear(self) -> int:
        with self._pages("clear") as stored:
            own = [name for name in stored if name[0] == self._namespace]
            for name in own:
                del stored[name]
        return len(own)

    def check(self) -> dict[str, PoolError | None]:
        try:
            with self._pages("check"):
                return {"memory": None}
        except PoolError as error:
            return {"memory": error}

    def close(self) -> None:
        self._closed = True

    @contextmanager
    def _pages(self, call: str) -> Iterator[dict[tuple[str, bytes], bytes]]:
        self._server.before(call)
        if self._server.is_down or self._closed:
            raise PoolUnavailable("the store is down")
        with self._server.lock:
            yield self._server.pages


def _fill(page: PageBuffers, data: bytes | None) -> bool:
    if data is None or len(data) != sum(segment.nbytes for segment in page):
        return False
    start = 0
    for segment in page:
        segment[:] = np.frombuffer(data[start : start + segment.nbytes], np.uint8)
        start += segment.nbytes
    return True


def install(name: str, make: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind is found by its entry point in processes that start now."""
    installed = directory / "site" / f"{name}-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {make}\n")
    path = [str(ROOT), str(installed.parent), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


class Kind(Protocol):
    """A store that runs. `keeps`: its pages outlive its death."""

    keeps: bool

    def client(self, namespace: str, geometry: Mapping[str, str] = GEOMETRY) -> PageClient: ...

    def kill(self) -> None:
        """Let it serve nobody, without notice."""
        ...

    def restart(self) -> None: ...

    def close(self) -> None: ...


class PoolKind:
    """A pool node as a process, by the pool's own client."""

    keeps = True

    def __init__(self, directory: Path) -> None:
        self._config = PoolNodeConfig(
            name="contract",
            arena_dir=arena_dir(),
            capacity_bytes="16MiB",
            slab_bytes="1MiB",
            max_reserved_share=1.0,
            quarantine_s=0.2,
        )
        self._node = ProcessPool(self._config, directory, "shm")

    def client(self, namespace: str, geometry: Mapping[str, str] = GEOMETRY) -> PoolClient:
        refs = [PoolNodeRef(node="contract", address=self._node.address)]
        return PoolClient(PoolClientConfig(nodes=refs, retry_after_s=RETRY_S), namespace, dict(geometry))

    def kill(self) -> None:
        self._node.kill()

    def restart(self) -> None:
        self._node.restart()

    def close(self) -> None:
        self._node.kill()
        remove_arena(self._config)
        remove_arena_dir()


class StoreKind:
    """A store of another engine, as a worker uses it."""

    keeps = True

    def __init__(self, make: MakeStore, **options: str | int | float | bool) -> None:
        self._make = make
        self._config = PoolClientConfig(engine="contract", options=options, retry_after_s=RETRY_S)
        self.memory: list[Bytes1D] = []

    def client(self, namespace: str, geometry: Mapping[str, str] = GEOMETRY) -> StoreClient:
        return StoreClient(self._config, namespace, geometry, self._make, self.memory)

    def close(self) -> None:
        pass


class MemoryKind(StoreKind):
    def __init__(self, directory: Path) -> None:
        self.server = MemoryServer()
        super().__init__(self.server.store)

    def kill(self) -> None:
        self.server.is_down = True

    def restart(self) -> None:
        self.server.is_down = False


class DirectoryKind(StoreKind):
    def __init__(self, directory: Path) -> None:
        self._path, self._away = directory / "pages", directory / "away"
        self._path.mkdir()
        super().__init__(DirectoryStore, path=str(self._path))

    def kill(self) -> None:
        self._path.rename(self._away)

    def restart(self) -> None:
        self._away.rename(self._path)


class MooncakeKind(StoreKind):
    """Real Mooncake over TCP on loopback: its master, and one process with 64 MiB."""

    keeps = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        [self._port] = free_ports(1)
        self._running = ExitStack()
        super().__init__(MooncakeStore, master=f"127.0.0.1:{self._port}")
        self.restart()

    def kill(self) -> None:
        self._running.close()

    def restart(self) -> None:
        flags = [f"-default_kv_lease_ttl={LEASE_MS}"]
        directory = Path(tempfile.mkdtemp(dir=self._directory))  # logs of its own
        servers = mooncake_servers(64 * MIB, directory, self._port, flags)
        self._running.enter_context(servers)

    def close(self) -> None:
        self._running.close()


KINDS: dict[str, Callable[[Path], Kind]] = {
    "pool": PoolKind,
    "memory": MemoryKind,
    "directory": DirectoryKind,
    "mooncake": MooncakeKind,
}
