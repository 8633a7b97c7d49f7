"""Workers over TLS: the router talks to none that it cannot verify, and workers to no router without a
certificate where they ask for one. Each refusal is one line in the log, and nothing hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.router.config.limits import Limits, Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError, WorkerTls
from pdserve.router.http.worker_connection import Upstream
from pdserve.security.tls import Certificates, TlsConfig
from tests.support.certificates import Authority
from tests.support.router.harness import PATIENT, Harness, before, routed
from tests.support.router.mock_worker import MockWorker, Received, Wire, workers

OFTEN = Probe(interval_s=0.05)
HANDSHAKE = b"\x16\x03"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def secured(tls: TlsConfig, role: str = "decode") -> MockWorker:
    worker = MockWorker(role)
    worker.tls = Certificates(tls).server_context
    return worker


@contextlib.asynccontextmanager
async def router_of(worker: MockWorker, tls: TlsConfig) -> AsyncIterator[Harness]:
    """A router before a decode worker, which may not answer."""
    config = RouterConfig(decode=(worker.url,), deadlines=PATIENT, probe=OFTEN, tls=tls)
    async with routed(config) as harness:
        yield harness


async def refusal(worker: MockWorker, tls: TlsConfig, caplog: pytest.LogCaptureFixture) -> str:
    """The line that the router logs of a worker that it does not use. Requests to it are answered with 503
    or 502.
    """
    caplog.set_level(logging.WARNING)
    async with workers(worker), router_of(worker, tls) as harness:
        assert (await harness.chat()).status in (502, 503, 404)
        upstream = harness.router.upstream
        with pytest.raises(UpstreamError) as error:
            await post(upstream, Worker("decode", worker.url))
        assert "\n" not in str(error.value)
    assert worker.requests == []
    [line] = {record.getMessage() for record in caplog.records if worker.id in record.getMessage()}
    assert "\n" not in line
    return f"{line} | {error.value}"


async def post(upstream: Upstream, worker: Worker) -> bytes:
    answer = await upstream.fetch(worker, "/x", b"", b"{}", limit_s=5.0, limit_bytes=1 << 20)
    return answer.body


@pytest.mark.parametrize("mutual", [False, True])
async def test_a_router_and_workers_of_one_authority_serve(authority: Authority, mutual: bool) -> None:
    tls = authority.host(mutual=mutual)
    own = authority.host("router") if mutual else authority.client()
    made = [secured(tls, role) for role in ("prefill", "decode")]
    async with before(*made, tls=TlsConfig(ca=own.ca, certificate=own.certificate, key=own.key)) as harness:
        assert (await harness.chat()).status == 200
        assert (await harness.chat(stream=True)).status == 200
    assert [len(worker.got("/pd/prefill")) for worker in made] == [2, 0]


async def test_a_worker_that_cannot_be_verified_or_cannot_verify_the_router_gets_no_request(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """tests/security/test_tls.py has which certificates are believed."""
    other = Authority(tmp_path / "other")
    assert "certificate verify failed" in await refusal(secured(other.host()), authority.client(), caplog)
    certificate, key = other.files("router")
    for own in (authority.client(), TlsConfig(ca=authority.ca, certificate=certificate, key=key)):
        caplog.clear()
        line = await refusal(secured(authority.host(mutual=True)), own, caplog)
        assert line.count("does it ask for a certificate (tls.client_ca)?") == 2


@pytest.mark.parametrize(("speaks", "says"), [(True, "SSL"), (False, "no connection in")])
async def test_a_worker_that_speaks_in_clear_at_an_https_address_or_says_nothing_is_left_in_time(
    authority: Authority, speaks: bool, says: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.read(2)) == HANDSHAKE
        if speaks:
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(Limits(), tls=WorkerTls(authority.client()), connect_s=0.5)
    try:
        with pytest.raises(UpstreamError, match=says) as error:
            await post(upstream, Worker("decode", f"https://127.0.0.1:{port}"))
        assert error.value.kind == "connect"
    finally:
        upstream.close()
        server.close()


async def test_who_joins_with_the_other_scheme_is_not_connected_to(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """By the admin API or etcd: nobody there brings the router to speak in clear."""
    caplog.set_level(logging.WARNING)
    plain, tls = MockWorker("decode"), secured(authority.host())
    async with workers(plain, tls):
        async with routed(RouterConfig(deadlines=PATIENT, probe=OFTEN, tls=authority.client())) as harness:
            harness.router.fleet.members.join(plain.url, "decode")
            await harness.until(lambda: "tls.ca asks for https" in caplog.text)
            with pytest.raises(UpstreamError, match=r"its URL is http, and tls\.ca asks for https"):
                await post(harness.router.upstream, Worker("decode", plain.url))
        async with routed(RouterConfig(deadlines=PATIENT, probe=OFTEN)) as harness:
            harness.router.fleet.members.join(tls.url, "decode")
            await harness.until(lambda: "https needs tls.ca" in caplog.text)
            with pytest.raises(UpstreamError, match=r"https needs tls\.ca"):
                await post(harness.router.upstream, Worker("decode", tls.url))
    assert plain.connections == tls.connections == 0


async def test_a_body_without_length_that_ends_with_the_connection_is_cut_over_tls(
    authority: Authority,
) -> None:
    """Whoever is on the wire can end a connection; a shorter answer must not pass for the whole one."""

    async def half(wire: Wire, _request: Received) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        wire.writer.close()
        await wire.writer.wait_closed()

    worker = secured(authority.host())
    worker.script("/x", half)
    async with workers(worker):
        upstream = Upstream(Limits(), tls=WorkerTls(authority.client()))
        try:
            with pytest.raises(UpstreamError) as error:
                await post(upstream, Worker("decode", worker.url))
            assert error.value.kind == "cut"
        finally:
            upstream.close()


async def test_renewed_certificates_are_used_by_requests_and_probes(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new authority: requests and probes of a running router believe its workers."""
    monkeypatch.setattr("pdserve.security.tls.LOOK_S", 0.0)
    new = Authority(tmp_path / "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.ca.read_bytes())
    worker = secured(new.host())
    async with workers(worker), router_of(worker, TlsConfig(ca=trusted)) as harness:
        assert (await harness.chat()).status != 200
        trusted.write_bytes(new.ca.read_bytes())
        await harness.until(lambda: any(each.ready for each in harness.router.fleet.workers))
        assert (await harness.chat()).status == 200
