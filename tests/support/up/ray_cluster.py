"""A Ray cluster of two raylets on this machine, if there is a Python with Ray: this one, or that of
`PDSERVE_RAY_PYTHON`, which must have pdserve's own dependencies, too.
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

TIMEOUT_S = 120.0


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = _own_address()  # Ray takes no loopback
    address = f"{own}:{port}"
    common = ["--num-cpus=4", "--disable-usage-stats", "--object-store-memory=100000000"]
    variables = {"RAY_ADDRESS": address, "PYTHON": python, "RAY_DEDUP_LOGS": "0"}
    raylets = [
        ["--head", f"--port={port}", f"--node-ip-address={own}", f"--temp-dir={directory}"],
        [f"--address={address}", f"--node-ip-address={own}"],
    ]
    started: list[subprocess.Popen[bytes]] = []
    log = (directory / "raylets.log").open("wb")
    try:
        for words in raylets:
            command = [python, "-m", "ray.scripts.scripts", "start", "--block", "--include-dashboard=false"]
            if words[0] != "--head":
                command.remove("--include-dashboard=false")
            started.append(
                subprocess.Popen([*command, *common, *words], stdout=log, stderr=log, start_new_session=True)
            )
            _wait_for_nodes(python, address, len(started))
        yield variables
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.close()


def _own_address() -> str:
    """Of the interface towards others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


WAIT = """
import sys, time, ray
deadline = time.monotonic() + 100
while True:
    try:
        ray.init(address=sys.argv[1], log_to_driver=False)
        if sum(node["Alive"] for node in ray.nodes()) >= int(sys.argv[2]):
            break
        ray.shutdown()
    except (ConnectionError, RuntimeError):
        pass
    if time.monotonic() > deadline:
        sys.exit("no Ray in time")
    time.sleep(0.2)
"""


def _wait_for_nodes(python: str, address: str, count: int) -> None:
    done = subprocess.run(
        [python, "-c", WAIT, address, str(count)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
