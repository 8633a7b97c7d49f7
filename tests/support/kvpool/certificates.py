"""Certificates for tests of TLS, made by `openssl`."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def self_signed(directory: Path, name: str = "node") -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1 and localhost, which is its own CA."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    )
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), "-addext", names, *files], check=True, capture_output=True)
    return certificate, key


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(of a server, of a client that trusts it alone)"""
    certificate, key = self_signed(directory)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=str(certificate))
