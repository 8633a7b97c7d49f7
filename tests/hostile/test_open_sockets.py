"""A stranger who opens as many connections as a process may have files."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kvpool.nodes import soon

LOOP = "127.0.0.1"
FILES = 256


@pytest.fixture
def router(tmp_path: Path) -> Iterator[int]:
    """The port of a router that may open few files."""
    with socket.create_server((LOOP, 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "pdserve", "router", "--port", str(port), "--decode", f"http://{LOOP}:9"]
    limited = ["bash", "-c", f'ulimit -n {FILES}; exec "$0" "$@"', *command]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(limited, stdout=out, stderr=out)
    try:
        deadline_s = soon(60)
        while b"listening on" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)  # between looks
        yield port
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait(10)


def test_many_open_sockets_keep_no_client_out_of_a_router(router: int) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2 * FILES):
            held.enter_context(socket.create_connection((LOOP, router), 10))
        for _ in range(3):
            asked = http.client.HTTPConnection(LOOP, router, timeout=20)
            with contextlib.closing(asked):
                asked.request("GET", "/health")
                assert asked.getresponse().status == 200
