"""A worker's HTTP server: who is let in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.engine.model_dir import bind_address
from pdserve.engine.sglang.http_server import BoundedHeads, HttpServer
from pdserve.security.tls import Certificates, TlsConfig
from tests.support.certificates import Authority

TIMEOUT_S = 10.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def application(scope: Any, _receive: Any, send: Callable[[Any], Any]) -> None:
    if scope["type"] == "http":
        where = f"client: {scope['client']}, server: {scope['server']}".encode()
        length = (b"content-length", b"%d" % len(where))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": where})


@contextmanager
def worker(tls: TlsConfig) -> Iterator[str]:
    """A server in a thread; its URL."""
    first = threading.Event()
    [bound] = bind_address("127.0.0.1", 0)
    files = {
        name: str(path)
        for name, path in (("ssl_certfile", tls.certificate), ("ssl_keyfile", tls.key))
        if path
    }

    async def begun() -> None:
        first.set()

    server = HttpServer(
        application, Certificates(tls), [bound], begun, log_config=None, lifespan="off", **files
    )
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),))
    thread.start()
    try:
        assert first.wait(TIMEOUT_S), "what comes first runs once the server listens"
        yield f"{'https' if files else 'http'}://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.stop()
        thread.join(TIMEOUT_S)


def ask(url: str, tls: TlsConfig) -> int:
    """The status, over a new connection. Raises httpx.HTTPError."""
    context: Any = Certificates(tls).client_context
    return httpx.get(url, verify=context, timeout=TIMEOUT_S, trust_env=False).status_code


def test_routers_with_a_certificate_are_let_in_and_nobody_else(authority: Authority, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / "other").files("router")
    with worker(authority.host(mutual=True)) as url:
        assert ask(url, authority.host("router")) == 200
        for stranger in (
            authority.client(),
            TlsConfig(ca=authority.ca, certificate=certificate, key=key),
        ):
            with pytest.raises(httpx.HTTPError):
                ask(url, stranger)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"), timeout=TIMEOUT_S, trust_env=False)


def test_heads_and_connections_have_bounds() -> None:
    config = HttpServer(application, Certificates(TlsConfig()), []).config
    assert (config.http.func, config.ssl_context_factory) == (BoundedHeads, None)  # type: ignore[union-attr]
    assert config.http.keywords["connection_limit"] is not None  # type: ignore[union-attr]


def test_a_running_worker_uses_renewed_certificates_and_authorities(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.security.tls.LOOK_S", 0.0)
    tls, new = authority.host(mutual=True), Authority(tmp_path / "new")
    files = [tmp_path / name for name in ("c.pem", "c.key", "ca.pem")]

    def lay(source: TlsConfig) -> None:
        for file, what in zip(files, (source.certificate, source.key, source.client_ca), strict=True):
            assert what is not None
            file.write_bytes(what.read_bytes())
        files[1].chmod(0o600)

    lay(tls)
    with worker(TlsConfig(certificate=files[0], key=files[1], client_ca=files[2])) as url:
        assert ask(url, authority.host("router")) == 200
        lay(new.host(mutual=True))
        assert ask(url, new.host("router")) == 200
        with pytest.raises(httpx.HTTPError):
            ask(url, authority.host("router"))
        with pytest.raises(httpx.HTTPError):  # the new server's certificate, an old client's
            ask(url, TlsConfig(ca=new.ca, certificate=tls.certificate, key=tls.key))
