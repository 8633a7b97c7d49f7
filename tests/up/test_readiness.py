"""Probes of real servers: HTTP, HTTPS with a certificate of another name, and control addresses."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pdserve.up.spec import ConnectReady, HttpReady
from pdserve.up.supervisor import is_ready, served_model
from tests.support.certificates import certificate

MODELS = {"data": [{"id": "a-model"}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = {"/ready": 200, "/v1/models": 200, "/garbage/v1/models": 200}.get(self.path, 503)
        body = b"nonsense" if "garbage" in self.path else json.dumps(MODELS).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(tls_in: Path | None = None, *, mutual: bool = False) -> Iterator[str]:
    """A server's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        scheme = "http"
        if tls_in is not None:
            scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate(tls_in))
            if mutual:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(tls_in / "cert.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{scheme}://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("tls", [False, True])
def test_a_process_is_ready_when_it_answers_200(tmp_path: Path, tls: bool) -> None:
    with serving(tmp_path if tls else None) as url:
        assert asyncio.run(is_ready(HttpReady(f"{url}/ready")))
        assert not asyncio.run(is_ready(HttpReady(f"{url}/other")))
        assert asyncio.run(served_model(url)) == "a-model"
        assert asyncio.run(served_model(f"{url}/garbage")) is None
    assert not asyncio.run(is_ready(HttpReady(f"{url}/ready")))
    assert asyncio.run(served_model(url)) is None


def test_a_control_address_is_ready_when_it_accepts(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        addresses = [f"tcp:127.0.0.1:{tcp.getsockname()[1]}", f"unix:{path}"]
        assert all(asyncio.run(is_ready(ConnectReady(address))) for address in addresses)
    assert not any(asyncio.run(is_ready(ConnectReady(address))) for address in addresses)


def test_a_process_that_asks_for_a_certificate_is_shown_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, mutual=True) as url:
        own = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
        assert asyncio.run(is_ready(HttpReady(f"{url}/ready", own)))
        assert not asyncio.run(is_ready(HttpReady(f"{url}/ready")))
        assert not asyncio.run(is_ready(HttpReady(f"{url}/ready", ("/none", "/none"))))
