"""Contexts made from files: who is believed by whom, and files that change."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.security.tls import Certificates, TlsConfig
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.security.tls.LOOK_S", 0.0)


def meet(server: Certificates, client: Certificates, name: str = "localhost") -> str:
    """What the client sees of a handshake: the serial number of the server's certificate, or the error."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(10)
    assert server.server_context is not None
    assert client.client_context is not None
    accepting = server.server_context.wrap_socket(far, server_side=True, do_handshake_on_connect=False)

    def accept() -> None:
        try:
            accepting.do_handshake()
            accepting.sendall(b"hello")
        except OSError:
            return
        finally:
            accepting.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with client.client_context.wrap_socket(near, server_hostname=name) as connected:
            assert connected.recv(5) == b"hello"
            found = connected.getpeercert()
            assert found is not None
            return str(found["serialNumber"])
    except OSError as error:
        return str(error)
    finally:
        thread.join(10)


def test_a_server_of_the_authority_is_believed_under_its_names_until_it_ends(
    authority: Authority, tmp_path: Path
) -> None:
    server = Certificates(authority.host("localhost", "127.0.0.1"))
    client = Certificates(authority.client())
    for name in ("localhost", "127.0.0.1"):
        assert int(meet(server, client, name), 16)
    assert "Hostname mismatch" in meet(server, client, "other")
    assert "IP address mismatch" in meet(server, client, "192.0.2.1")
    assert "certificate verify failed" in meet(Certificates(Authority(tmp_path / "other").host()), client)
    assert "expired" in meet(Certificates(authority.host(ended=True)), client)
    assert server.server_context is not None
    assert server.server_context.num_tickets == 0, "a session that is resumed checks nothing again"
    none = Certificates(TlsConfig())
    assert none.server_context is none.client_context is None


def test_a_server_that_asks_for_certificates_lets_in_only_its_authoritys_clients(
    authority: Authority, tmp_path: Path
) -> None:
    server = Certificates(authority.host(mutual=True))
    assert int(meet(server, Certificates(authority.host("client"))), 16)
    certificate, key = Authority(tmp_path / "other").files("client")
    for client in (
        authority.client(),
        TlsConfig(certificate=certificate, key=key, ca=authority.ca),
    ):
        assert "alert" in meet(server, Certificates(client)).lower()


@pytest.mark.parametrize("spoil", [lambda file: file.write_text("half"), lambda file: file.unlink()])
def test_files_that_cannot_be_used_leave_the_certificates_of_before(
    authority: Authority, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    config = authority.host()
    assert config.key is not None
    server, client = Certificates(config), Certificates(authority.client())
    first = meet(server, client)
    spoil(config.key)
    assert meet(server, client) == meet(server, client) == first
    assert len([one for one in caplog.messages if "certificates of before" in one]) == 1
    authority.host()
    assert meet(server, client) != first


def test_older_versions_of_tls_are_not_spoken(authority: Authority) -> None:
    old = ssl.create_default_context(cafile=str(authority.ca))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    server, client = Certificates(authority.host()), Certificates(authority.client())
    client._client = old
    assert "alert" in meet(server, client).lower()


def test_a_file_that_cannot_be_used_at_the_start_is_said_in_one_line(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.files("localhost")
    (tmp_path / "garbage").write_text("garbage")
    encrypted = key.with_suffix(".encrypted")  # nobody is asked for its password
    words = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", encrypted]
    subprocess.run(words, check=True, capture_output=True)
    for config, says in (
        (TlsConfig(ca=tmp_path / "none"), "tls.ca .*none cannot be used: No such file"),
        (TlsConfig(ca=tmp_path / "garbage"), "tls.ca .*garbage cannot be used"),
        (TlsConfig(certificate=certificate, key=authority.ca), "tls.certificate .* and tls.key .*ca.pem"),
        (TlsConfig(certificate=certificate, key=key, client_ca=key), "tls.client_ca .* cannot be used"),
        (TlsConfig(certificate=certificate, key=encrypted), "is encrypted"),
    ):
        with pytest.raises(ConfigError, match=says) as error:
            Certificates(config)
        assert "\n" not in str(error.value)
    parts: list[tuple[dict[str, Path], str]] = [
        ({"certificate": Path("/c")}, "given together"),
        ({"key": Path("/k")}, "given together"),
        ({"client_ca": Path("/a")}, "is for servers"),
    ]
    for part, says in parts:
        with pytest.raises(ValueError, match=says):
            TlsConfig(**part)


def test_a_key_that_every_user_may_read_is_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    config = authority.host()
    assert config.key is not None
    Certificates(config)
    assert not caplog.messages
    config.key.chmod(0o644)
    Certificates(config)
    assert "open to every user of this host" in caplog.text
