"""Nodes as real `pdserve pool serve` processes, made of a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.security.tokens import reveal_secret
from tests.support.kvpool.node_processes import NodeProcess

KIB = 1024


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
