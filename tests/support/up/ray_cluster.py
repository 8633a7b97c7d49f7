"""A Ray cluster of two raylets on this machine, if there is a Python with Ray: this one, or that of
`PDSERVE_RAY_PYTHON`, which must have pdserve's own dependencies, too. `RAY_ADDRESS` names a cluster that runs
already.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import free_ports
from tests.support.up.cluster import wait_until

TIMEOUT_S = 120.0
PORTS = (
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
)


def python_with_ray() -> str:
    """Skips the test, with the reason, where there is none."""
    given = os.environ.get("PDSERVE_RAY_PYTHON", "")
    if not given and importlib.util.find_spec("ray") is None:
        pytest.skip(
            "Ray is not installed, so --on ray is NOT tested: pip install ray, or set PDSERVE_RAY_PYTHON"
        )
    return given or sys.executable


@contextmanager
def ray_cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Variables by which a driver finds it."""
    python = python_with_ray()
    if address := os.environ.get("RAY_ADDRESS"):
        yield {"RAY_ADDRESS": address, "PYTHON": python}
        return
    port = free_ports(1)[0]
    address = f"{_own_address()}:{port}"
    head = ["--head", f"--port={port}", "--include-dashboard=false"]
    with (
        tempfile.TemporaryDirectory(prefix="ray") as sockets,  # a path of pytest's is too long for them
        _node(python, [*head, f"--temp-dir={sockets}"], directory / "head.log"),
        ray_node(address, directory),
    ):
        yield {"RAY_ADDRESS": address, "PYTHON": python}


@contextmanager
def ray_node(address: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One more node, the leader of a session of its own."""
    with _node(python_with_ray(), [f"--address={address}"], directory / "node.log") as node:
        yield node


@contextmanager
def _node(python: str, words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As `ray start` runs it. It starts no processes for work that may come."""
    common = ["--block", "--num-cpus=1", "--disable-usage-stats", "--object-store-memory=100000000"]
    common.append(f"--node-ip-address={_own_address()}")
    common += ["--min-worker-port=0", "--max-worker-port=0"]  # any; else from where our own ports are
    # ports that Ray chooses itself are waited for, and not long on a busy machine
    ports = [f"{option}={port}" for option, port in zip(PORTS, free_ports(len(PORTS)), strict=True)]
    with log.open("wb") as output:
        node = subprocess.Popen(
            [python, "-m", "ray.scripts.scripts", "start", *common, *ports, *words],
            stdout=output,
            stderr=output,
            env={**os.environ, "RAY_prestart_worker_first_driver": "0"},
            start_new_session=True,
        )
    try:
        wait_until(lambda: _is_up(node, log), "Ray runs", TIMEOUT_S)
        yield node
    finally:
        node.terminate()
        try:
            node.wait(30)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


def _is_up(raylet: subprocess.Popen[bytes], log: Path) -> bool:
    assert raylet.poll() is None, log.read_text()
    return "Ray runtime started." in log.read_text()


def _own_address() -> str:
    """Of the interface towards others, as Ray takes no loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
