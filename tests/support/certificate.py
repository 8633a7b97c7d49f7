"""Certificates for tests that speak TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
