"""Certificates for tests of TLS: of an authority that `launch/make_certs.sh` makes, and self-signed ones."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from pdserve.security.tls import TlsConfig

MAKE_CERTS = Path(__file__).parents[2] / "launch" / "make_certs.sh"


class Authority:
    """An authority of its own in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = directory / "ca.pem"
        subprocess.run([MAKE_CERTS, "ca", directory], check=True, stdout=subprocess.DEVNULL)

    def files(self, *names: str) -> tuple[Path, Path]:
        """Certificate and key of a host."""
        subprocess.run([MAKE_CERTS, "host", self.directory, *names], check=True, stdout=subprocess.DEVNULL)
        stem = names[0].replace(":", "_")
        return self.directory / f"{stem}.pem", self.directory / f"{stem}.key"

    def host(self, *names: str, mutual: bool = False, ended: bool = False) -> TlsConfig:
        """What a part on a host with these names has; loopback if none is given. `ended`: a minute ago."""
        certificate, key = self.files(*(names or ("127.0.0.1", "localhost")))
        if ended:
            end(certificate, self.directory / "ca.key")
        return TlsConfig(certificate=certificate, key=key, ca=self.ca, client_ca=self.ca if mutual else None)

    def client(self) -> TlsConfig:
        """What a part has that has no certificate of its own."""
        return TlsConfig(ca=self.ca)


def end(certificate: Path, signing_key: Path) -> None:
    """Sign a certificate again, with an end in the past."""
    made = x509.load_pem_x509_certificate(certificate.read_bytes())
    key = load_pem_private_key(signing_key.read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(made.subject)
        .issuer_name(made.issuer)
        .public_key(made.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now - timedelta(minutes=1))
    )
    for extension in made.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    command = ["openssl", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
