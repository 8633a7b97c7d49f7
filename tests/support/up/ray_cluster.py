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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.up.cluster import wait_until
from tests.support.up.slurm_cluster import free_ports

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
    if "RAY_ADDRESS" in os.environ:
        yield {"PYTHON": python}
        return
    port, *others = free_ports(1 + 2 * len(PORTS))
    own = _own_address()  # Ray takes no loopback
    address = f"{own}:{port}"
    raylets = (
        ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}"],
        [f"--address={address}"],
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words in raylets:
            # ports that Ray chooses itself are waited for, and not long on a busy machine
            ports = [f"{option}={others.pop()}" for option in PORTS]
            log = directory / f"raylet{len(started)}.log"
            started.append(_raylet(python, [*words, f"--node-ip-address={own}", *ports], log))
            wait_until(lambda: _is_up(started[-1], log), "Ray runs", TIMEOUT_S)  # noqa: B023 - done in this turn
        yield {"RAY_ADDRESS": address, "PYTHON": python, "RAY_DEDUP_LOGS": "0"}
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _raylet(python: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """One node, as `ray start` runs it. It starts no processes for work that may come."""
    common = ["--block", "--num-cpus=1", "--disable-usage-stats", "--object-store-memory=100000000"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [python, "-m", "ray.scripts.scripts", "start", *common, *words],
            stdout=output,
            stderr=output,
            env={**os.environ, "RAY_prestart_worker_first_driver": "0"},
            start_new_session=True,
        )


def _is_up(raylet: subprocess.Popen[bytes], log: Path) -> bool:
    assert raylet.poll() is None, log.read_text()
    return "Ray runtime started." in log.read_text()


def _own_address() -> str:
    """Of the interface towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
