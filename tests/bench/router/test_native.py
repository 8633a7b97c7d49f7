"""The compiled load and mock worker count as the Python ones do."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.router.contenders import mock_worker
from benchmarks.router.load import PATH, Load, Loaded, run_load
from benchmarks.router.mock import MODEL
from benchmarks.router.native.instruments import Instruments, build
from benchmarks.stores import BenchError
from pdserve.discovery.host_socket import connect_here

STREAMS = Load(streams=4, seconds=0.3, chunks=5, interval_us=2000, ramp_s=0.002)
WHOLE = Load(streams=4, seconds=0.3, prompt_bytes=20_000)
LONG = Load(streams=4, seconds=0.3, prompt_bytes=128 * 1024)
PIPELINED = Load(streams=4, seconds=0.3, pipelined=8)
STREAMS_PIPELINED = Load(streams=4, seconds=0.3, chunks=3, pipelined=2)
"""The worker in Python knows one stream at a time on each connection."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Instruments:
    said: list[str] = []
    made = build(tmp_path_factory.mktemp("native"), said.append)
    assert made is not None, said
    return made


def by_native(native: Instruments, load: Load, port: int) -> Loaded:
    done, before, after = native.run_load(load, port, lambda loading: loading.cpu_times())
    assert sum(after[:2]) >= sum(before[:2])
    return done


@pytest.mark.parametrize("worker", ["native", "python"])
@pytest.mark.parametrize(
    "load", [STREAMS, WHOLE, LONG, PIPELINED], ids=["streams", "whole", "long", "pipelined"]
)
def test_the_compiled_load_counts_what_either_worker_answers(
    native: Instruments, tmp_path: Path, worker: str, load: Load
) -> None:
    with mock_worker("decode", tmp_path, instruments=native if worker == "native" else None) as there:
        done = by_native(native, load, there.port)
        if worker == "native":
            streams = by_native(native, STREAMS_PIPELINED, there.port)
            assert (streams.errors, streams.first_error, streams.requests > 0) == (0, "", True)
    assert (done.errors, done.first_error) == (0, "")
    assert done.requests > 0
    assert done.seconds == pytest.approx(0.3, abs=0.2)
    assert len(done.chunk_ms) >= load.chunks * (done.requests - 4 * load.pipelined)
    assert bool(done.first_ms) == (load.pipelined == 1)
    assert all(0 < ms < 60_000 for ms in (*done.chunk_ms, *done.first_ms))


@pytest.mark.parametrize("load", [STREAMS, WHOLE], ids=["streams", "whole"])
def test_the_python_load_gets_the_same_of_the_compiled_worker(
    native: Instruments, tmp_path: Path, load: Load
) -> None:
    with mock_worker("decode", tmp_path, instruments=native) as there:
        done, _, _ = asyncio.run(run_load(load, there.port, lambda: None))
    assert (done.errors, done.first_error) == (0, "")
    assert done.requests > 0


@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_the_compiled_worker_reads_a_body_in_either_form_and_in_pieces(
    native: Instruments, tmp_path: Path, coding: str
) -> None:
    body = json.dumps({"model": MODEL, "messages": [], "stream": True, "max_tokens": 3}).encode()
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    headers = {"content-length": str(len(body))} if coding == "length" else {}
    with mock_worker("decode", tmp_path, instruments=native) as there:
        connection = http.client.HTTPConnection("127.0.0.1", there.port, timeout=10)
        for _ in range(2):  # on one connection
            connection.request("POST", PATH, iter(pieces), headers, encode_chunked=coding == "chunked")
            answer = connection.getresponse().read()
            assert answer.count(b'"content":"T') == 3
            assert answer.endswith(b"data: [DONE]\n\n")
        connection.close()


def test_the_compiled_worker_answers_on_a_unix_socket_too_and_tells_its_name(
    native: Instruments, tmp_path: Path
) -> None:
    with mock_worker("decode", tmp_path, instruments=native, has_host_socket=True) as there:
        info = httpx.get(f"http://127.0.0.1:{there.port}/pd/info", trust_env=False).json()
        connected = connect_here(info["host_socket"])
        assert connected is not None
        with connected:
            connected.setblocking(True)
            connected.settimeout(10)
            connected.sendall(b"GET /pd/info HTTP/1.1\r\nhost: test\r\n\r\n")
            assert info["host_socket"].encode() in connected.recv(65536)
        assert by_native(native, WHOLE, there.port).errors == 0


def test_the_compiled_prefill_worker_streams_one_token_and_so_the_load_sees_an_error(
    native: Instruments, tmp_path: Path
) -> None:
    with mock_worker("prefill", tmp_path, instruments=native) as there:
        done = by_native(native, Load(streams=2, seconds=0.1, chunks=5), there.port)
    assert done.errors == 2, "each connection ends with its error"
    assert (done.requests, done.first_error) == (0, "status 200, 1 of 5 chunks")


def test_nobody_there_is_an_error_in_words(native: Instruments) -> None:
    with pytest.raises(BenchError, match="the load on port 1 failed: connect: Connection refused"):
        native.run_load(Load(streams=1, seconds=0.1), 1, psutil.Process.cpu_times)


def test_without_a_compiler_python_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    assert build(tmp_path, said.append) is None
    assert "no C compiler" in said[0]
