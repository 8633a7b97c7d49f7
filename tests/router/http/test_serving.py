"""Where a router listens, and with which certificate."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import Access
from pdserve.router.http.listening import bind
from pdserve.router.http.serving import make_server, public_tls
from tests.support.addresses import names_of
from tests.support.certificates import Authority
from tests.support.router.harness import served


def test_the_first_address_of_a_name_that_this_machine_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "127.0.0.1"))
    with bind("localhost", 0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_at_the_first_address_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        monkeypatch.setattr(socket, "getaddrinfo", names_of("127.0.0.2", "127.0.0.1"))
        with pytest.raises(StartupError, match="Address already in use"):
            bind("localhost", taken.getsockname()[1])


def test_a_name_of_no_address_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", names_of("2001:db8::1", "192.0.2.1"))
    with pytest.raises(
        StartupError, match=r"cannot listen on localhost:0: Cannot assign requested address"
    ) as no:
        bind("localhost", 0)
    assert "\n" not in str(no.value)


# --- The public port's certificate: renewed while the router serves


async def shown(port: int, ca: Path, newest: ssl.TLSVersion) -> bytes:
    """The certificate that a client is shown, DER."""
    context = ssl.create_default_context(cafile=str(ca))
    context.maximum_version = newest
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(found)


async def test_a_renewed_certificate_is_shown_to_the_next_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.security.tls.LOOK_S", 0.0)
    authority = Authority(tmp_path)
    certificate, key = authority.files("127.0.0.1")
    access = Access(tls_cert_file=certificate, tls_key_file=key)
    async with served(make_server(object(), RouterConfig(), public_tls(access))) as port:
        for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            authority.files("127.0.0.1")
            renewed = ssl.PEM_cert_to_DER_cert(certificate.read_text())
            assert await shown(port, authority.ca, newest) == renewed


def test_a_certificate_that_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="access: no certificate and key can be had from"):
        public_tls(Access(tls_cert_file=tmp_path / "a", tls_key_file=tmp_path / "b"))
