"""Random streams against the control port of a real node and the public port of a real router.

Beside each stream an honest client works. PDSERVE_FUZZ_EXAMPLES sets the number of streams, for a long run at
night: 20,000 take about ten minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import get_args

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import Drain, Upgrade
from pdserve.kvpool.protocol.frames import encode_frame
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.shm import host_id
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, raw_socket, small_config, soon
from tests.support.kvpool.odd_messages import message_of
from tests.support.kvpool.pools import ProcessPool
from tests.support.suite.extended import examples

EXAMPLES = int(os.environ.get("PDSERVE_FUZZ_EXAMPLES", examples(250)))
MIB = 1 << 20
ADMIN_TOKEN = "the-token-of-this-pools-operator"
READ_TOKEN = "the-token-of-a-reader-of-pages"
KINDS = [part for kind in get_args(m.Request) for part in (get_args(kind) or (kind,))]
KINDS = [kind for kind in KINDS if kind not in (Drain, Upgrade)]  # which a node does for its operator
MESSAGES = st.one_of([st.deferred(lambda kind=kind: message_of(kind)) for kind in KINDS])  # type: ignore[misc]
pytestmark = [pytest.mark.timeout(60 + EXAMPLES)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    directory = tmp_path_factory.mktemp("pool")
    config = small_config(name="fuzzed", admin_token=ADMIN_TOKEN, arena_dir=directory / "arena")
    pool = ProcessPool(config, directory, "shm", f'namespace_defaults.read_token = "{READ_TOKEN}"\n')
    try:
        yield pool
    finally:
        pool.close()
    assert "Traceback" not in pool.log.read_text()


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Frames of odd messages, with bits flipped, pieces missing or noise in between."""
    data = bytearray()
    for message in draw(st.lists(MESSAGES, max_size=6)):
        with contextlib.suppress(Exception):  # one that cannot be sent
            data += encode_frame(message)
        if draw(st.integers(0, 9)) == 0:
            data += draw(st.binary(max_size=64))
    for at in draw(st.lists(st.integers(0, max(0, len(data) - 1)), max_size=4)) if data else ():
        data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@given(who=st.sampled_from(["", READ_TOKEN, ADMIN_TOKEN]), stream=streams(), greets=st.booleans())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
def test_whatever_is_sent_to_a_node_it_serves_the_others_and_keeps_to_its_memory(
    pool: ProcessPool, who: str, stream: bytes, greets: bool
) -> None:
    hello = encode_frame(make_hello("stranger", host_id(), "shm", who)) if greets else b""  # as old clients
    with raw_socket(pool) as sock, contextlib.suppress(OSError):
        sock.sendall(hello + stream)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    honest = connect(pool.address, soon(), "shm", token=ADMIN_TOKEN)
    try:
        namespace, some = open_namespace(honest, "honest"), keys(2, len(stream))
        put(honest, namespace, some)
        assert set(get(honest, namespace, some)) <= set(some), "and no wrong byte"
    finally:
        honest.close()
    assert psutil.Process(pool.pid).memory_info().rss < 400 * MIB


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Where a router without a worker listens. It may not end by itself, nor tell of faults."""
    log = tmp_path_factory.mktemp("router") / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ("127.0.0.1", int(free.getsockname()[1]))
    command = [sys.executable, "-m", "pdserve", "router", "--port", str(address[1])]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--decode", "http://127.0.0.1:9"], stdout=out, stderr=out)
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
