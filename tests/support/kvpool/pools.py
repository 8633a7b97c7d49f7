"""Nodes to run the transport contract against: in this process, or as real `pdserve pool serve` processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from msgspec import to_builtins
from msgspec.structs import replace

from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.memory.slab_size import MIN_SLOT_BYTES
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.kvpool.protocol.slot_table import TableLayout
from pdserve.kvpool.transports.base import Connection
from pdserve.security.tokens import reveal_secret
from tests.support.kvpool.inproc import InprocConnector, InprocNode
from tests.support.kvpool.node_processes import NodeProcess

KIB = 1024


class Pool(Protocol):
    """One node under test."""

    def connect(self, *, checksum: bool = True, timeout_s: float = 5.0) -> Connection: ...

    def flip_bit(self, offset: int) -> None:
        """Damage the arena behind everybody's back."""
        ...

    def pause(self) -> None:
        """Let the node do nothing until `resume`."""
        ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """Let the node die without notice."""
        ...

    def restart(self) -> None:
        """After `kill`: the next incarnation on the same memory."""
        ...

    def close(self) -> None: ...


class InprocPool:
    """The node is an object."""

    def __init__(self, config: PoolNodeConfig) -> None:
        limits = Limits(config.lease_s, config.lease_s, config.lease_s)
        layout = TableLayout(config.capacity, config.slab, MIN_SLOT_BYTES)
        self.node = InprocNode(config.name, layout, limits, config)

    def connect(self, *, checksum: bool = True, timeout_s: float = 5.0) -> Connection:
        connector = InprocConnector([self.node], checksum=checksum)
        return connector.connect(f"inproc:{self.node.name}", time.monotonic() + timeout_s)

    def flip_bit(self, offset: int) -> None:
        self.node.memory[offset] ^= 1

    def pause(self) -> None:
        self.node.paused = True

    def resume(self) -> None:
        self.node.paused = False

    def kill(self) -> None:
        self.node.stop()

    def restart(self) -> None:
        self.node.restart()

    def close(self) -> None:
        self.node.close()
        self.node.state.check()


class ProcessPool(NodeProcess):
    """The node of a configuration, which has started; `data_path` is how its clients move pages."""

    def __init__(self, config: PoolNodeConfig, directory: Path, data_path: DataPathChoice) -> None:
        """Raises HarnessError."""
        self.config = replace(config, listen=[f"unix:{directory}/{config.name}.sock"], keep=False)
        super().__init__(
            *(config.name, directory, self._settings),
            arena_dir=config.arena_dir,
            data_path=data_path,
            tls=config.tls,
        )
        self.start()

    @property
    def _settings(self) -> dict[str, Any]:
        found: dict[str, Any] = to_builtins(self.config, enc_hook=reveal_secret)
        return found

    def restart(self, **options: Any) -> None:
        """The next start, with these options changed."""
        assert not self.runs
        self.config = replace(self.config, **options)
        self.write(self._settings)
        self.start()

    def close(self) -> None:
        """Stop it as an operator would; a node that is not dead must end cleanly and leave nothing."""
        if self.runs:
            assert self.stop(), self.log()
            assert not self.arena_path.parent.exists()
        assert "Traceback" not in self.log(), self.log()


def remove_arena(config: PoolNodeConfig) -> None:
    """What a killed node left."""
    directory = config.arena_dir / config.name
    if directory.exists():
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


@contextmanager
def running_node(config: PoolNodeConfig, directory: Path) -> Iterator[ProcessPool]:
    """A node whose arena is in `arena_dir()`; it must end cleanly, and nothing is left."""
    pool = ProcessPool(config, directory, "shm")
    yield pool
    pool.close()
    remove_arena(config)
    remove_arena_dir()


def arena_dir() -> Path:
    """Of this test process alone."""
    return Path(f"/dev/shm/pdserve-test-{os.getpid()}")


def remove_arena_dir() -> None:
    """At the end of a test. Raises OSError: a node left its memory behind."""
    if arena_dir().exists():
        arena_dir().rmdir()
