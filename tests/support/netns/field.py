"""A pool node in one network namespace and a client in another, and the field between them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.protocol.messages import StatusReport
from tests.support.kvpool import made_pages as p
from tests.support.netns.lab import Lab, last_lines
from tests.support.netns.program import Program

START_TIMEOUT_S = 120.0
HANGS_S = 60.0  # no bound of the product's: after it a test is taken to hang
LEASE_S = 1.0
PAGES = 16
SERVE = """
import sys
from pdserve.cli import main
from pdserve.kvpool.node.serving import connection
connection.KEEPALIVE_IDLE_S = connection.KEEPALIVE_INTERVAL_S = 1
connection.KEEPALIVE_PROBES = 2
main(sys.argv[1:])
"""
"""A node that takes a client for lost after 3 s of silence, instead of 15."""


class FarNode:
    """A node at SUBNET.1. Asked how it is over a Unix socket, which needs no network."""

    def __init__(self, network: Lab, directory: Path, *, trusted: bool = True) -> None:
        """`trusted`: the network is, so pages go by UCX; else by TCP."""
        self.directory = directory
        self.arena_dir = Path("/dev/shm") / f"pdserve-netns-{directory.name}"
        self.address = f"tcp:{network.address('far')}:7700"
        self._socket = f"unix:{directory}/far.sock"
        self._log_path = directory / "far.log"
        config = directory / "far.toml"
        config.write_text(
            f'name = "far"\nlisten = ["{self.address}", "{self._socket}"]\narena_dir = "{self.arena_dir}"\n'
            f'capacity_bytes = "256MiB"\nkeep = false\nlease_s = {LEASE_S}\n'
            f"insecure = true\nucx.trusted_network = {str(trusted).lower()}\n"
        )
        with self._log_path.open("wb") as log:
            command = ("-c", SERVE, "pool", "serve", "--config", str(config))
            self._process = network.start("far", *command, log=log)

    def await_ready(self) -> None:
        until(lambda: f"pool node far is ready at {self.address}" in self.log(), self.log)

    def status(self) -> StatusReport:
        asked = NodeClient(self._socket)
        try:
            return asked.status()
        finally:
            asked.close()

    def log(self) -> str:
        return last_lines(self._log_path)

    def flip_bits(self) -> None:
        """One in every 4 KiB of its memory."""
        memory = np.memmap(self.arena_dir / "far" / "arena", dtype=np.uint8, mode="r+")
        memory[::4096] ^= 1

    def close(self) -> None:
        """It must still be able to stop as asked."""
        self._process.terminate()
        try:
            assert self._process.wait(15) == 0, self.log()
        finally:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self.arena_dir, ignore_errors=True)
        assert "Traceback" not in self._log_path.read_text(), self.log()


class NearClient(Program):
    """A guest at SUBNET.2."""

    def __init__(self, network: Lab, node: FarNode, directory: Path) -> None:
        module = "tests.support.netns.guest"
        super().__init__(network, "near", directory / "near.log", "-m", module, node.address, "near")


class Field:
    """All three. A client that was killed is replaced by `get_ready`."""

    def __init__(self, network: Lab, node: FarNode, directory: Path) -> None:
        self.network = network
        self.node = node
        self._directory = directory
        self._tests = 0
        self.client = NearClient(network, node, directory)

    def get_ready(self) -> None:
        """For the next test: the network is whole, and the client connected."""
        self._tests += 1
        self.network.heal()
        if not self.client.runs:
            self.client = NearClient(self.network, self.node, self._directory)
        assert self.client.do("connect", within_s=START_TIMEOUT_S / 2) == {"problems": []}

    @property
    def pages(self) -> list[int]:
        """Numbers that no other test has."""
        first = self._tests * PAGES
        return [p.number(p.OWNED, 1, which * p.LARGE_EVERY) for which in range(first, first + PAGES)]


def until(holds: Callable[[], bool], why: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def assert_nothing_is_held(node: FarNode) -> None:
    """Once every lease is over: no pin, no reserved byte, every byte somewhere."""

    def held() -> tuple[int, int, int]:
        report = node.status()
        parts = report.free_bytes, report.used_bytes, report.reserved_bytes, report.quarantined_bytes
        assert sum(parts) == report.capacity_bytes
        return report.pins, report.reserved_bytes, report.quarantined_bytes

    until(lambda: not any(held()), held)
