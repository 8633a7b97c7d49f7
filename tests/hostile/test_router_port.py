"""Strangers at the public port of a real router: random streams, after each of which an honest client is
served, and as many connections as a process may have files. A node's messages are fuzzed without sockets:
tests/kvpool/core/test_fuzz.py.

PDSERVE_FUZZ_EXAMPLES sets the number of streams, for a long run at night.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.suite.extended import examples
from tests.support.waiting import soon

EXAMPLES = int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", examples(250)))
pytestmark = [pytest.mark.timeout(60 + EXAMPLES)]


@contextlib.contextmanager
def serving(log: Path, files: int) -> Iterator[tuple[str, int]]:
    """Where a router without a worker listens that may open so many files. It may not end by itself, nor tell
    of faults.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ("127.0.0.1", int(free.getsockname()[1]))
    command = [sys.executable, "-m", "pdserve", "router", "--port", str(address[1])]
    limited = ["bash", "-c", f'ulimit -n {files}; exec "$0" "$@"', *command, "--decode", "http://127.0.0.1:9"]
    with log.open("wb") as out:
        process = subprocess.Popen(limited, stdout=out, stderr=out)
    try:
        deadline_s = soon(60)
        while b"listening on" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)  # between looks
        yield address
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait(10)
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with serving(tmp_path_factory.mktemp("router") / "log", 1024) as address:
        yield address


def test_many_open_sockets_keep_no_client_out_of_a_router(tmp_path: Path) -> None:
    files = 256
    with serving(tmp_path / "log", files) as address, contextlib.ExitStack() as held:
        for _ in range(2 * files):
            held.enter_context(socket.create_connection(address, 10))
        for _ in range(3):
            asked = http.client.HTTPConnection(*address, timeout=20)
            with contextlib.closing(asked):
                asked.request("GET", "/health")
                assert asked.getresponse().status == 200


PIECES = st.one_of(
    st.sampled_from(
        [
            b"POST /v1/chat/completions HTTP/1.1\r\n",
            b"GET /v1/models HTTP/1.1\r\n",
            b"host: t\r\n",
            b"content-length: 12\r\n",
            b"content-length: 99999999999999999999\r\n",
            b"transfer-encoding: chunked\r\n",
            b"authorization: Bearer x\r\n",
            b"expect: 100-continue\r\n",
            b"connection: keep-alive\r\n",
            b"\r\n",
            b"0\r\n\r\n",
            b'c\r\n{"model":"m"}\r\n',
            b"ffffffffffffffff\r\n",
            b"0\r\nx: y\r\n\r\n",
            json.dumps({"model": "m", "messages": [], "n": 10**9}).encode(),
        ]
    ),
    st.binary(max_size=40),
)


@given(pieces=st.lists(PIECES, max_size=12))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_is_sent_to_a_router_it_serves_the_others(
    router: tuple[str, int], pieces: list[bytes]
) -> None:
    with socket.create_connection(router, timeout=10) as sock, contextlib.suppress(OSError):
        sock.sendall(b"".join(pieces))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    with socket.create_connection(router, timeout=10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
