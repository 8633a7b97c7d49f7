"""Nodes to run the transport contract against: in this process, or as real `pdserve pool serve` processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from pdserve.errors import PoolError
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.memory.slab_size import MIN_SLOT_BYTES
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.kvpool.protocol.slot_table import TableLayout
from pdserve.kvpool.transports.base import Connection
from pdserve.security.tls import Certificates
from pdserve.security.tokens import reveal_secret
from pdserve.settings.config_file import to_toml
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.inproc import InprocConnector, InprocNode

KIB = 1024
START_TIMEOUT_S = 120.0


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


class ProcessPool:
    """The node is a process; `data_path` is how its clients move pages."""

    code = "import sys; from pdserve.cli import main; main(sys.argv[1:])"

    def __init__(self, config: PoolNodeConfig, directory: Path, data_path: DataPathChoice) -> None:
        self.address = f"unix:{directory}/{config.name}.sock"
        self.config = replace(config, listen=[self.address], keep=False)
        self._tls = Certificates(config.tls).client_context
        self.data_path = data_path
        self.log = directory / f"{config.name}.log"
        self._file = directory / f"{config.name}.toml"
        self.configure()
        self._process = self._start()

    def configure(self, **options: Any) -> None:
        """What counts from its next start, or its next upgrade, on."""
        self.config = replace(self.config, **options)
        self._file.write_text(to_toml(to_builtins(self.config, enc_hook=reveal_secret)))

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = ["pool", "serve", "--config", str(self._file)]
        with self.log.open("ab") as log:
            process = subprocess.Popen([sys.executable, "-c", self.code, *arguments], stderr=log, stdout=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                connect(self.address, time.monotonic() + 1).close()
                return process
            except PoolError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError(
                        f"the node did not start: {error}\n{self.log.read_text()}"
                    ) from error
            time.sleep(0.02)  # between attempts to connect

    def connect(self, *, checksum: bool = True, timeout_s: float = 5.0) -> Connection:
        deadline = time.monotonic() + timeout_s
        return connect(self.address, deadline, self.data_path, checksum=checksum, tls=self._tls)

    @property
    def arena_path(self) -> Path:
        return self.config.arena_dir / self.config.name / "arena"

    def flip_bit(self, offset: int) -> None:
        arena = np.memmap(self.arena_path, dtype=np.uint8, mode="r+")
        arena[offset] ^= 1

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def restart(self, **options: Any) -> None:
        assert self._process.poll() is not None
        self.configure(**options)
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop it as an operator would; a node that is not dead must end cleanly and leave nothing."""
        if self._process.poll() is None:
            self.resume()
            self._process.terminate()
            assert self._process.wait(15) == 0, self.log.read_text()
            assert not self.arena_path.parent.exists()
        assert "Traceback" not in self.log.read_text(), self.log.read_text()


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
