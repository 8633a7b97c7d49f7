"""A small certificate authority in a directory, for those who have none: files in PEM, keys of P-256.

    DIR/ca.pem, DIR/ca.key        the authority; the key stays where it was made
    DIR/NAME.pem, DIR/NAME.key    a host's certificate, good as a server and as a client

There is no revocation: certificates of hosts are short-lived, and a new authority ends them all.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.errors import ConfigError, StartupError

CLOCK_SKEW: Final = timedelta(minutes=10)  # between hosts: a new certificate is good on all of them
_HOST: Final = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def make_authority(directory: Path, lifetime_days: float) -> Path:
    """Make `ca.pem` and `ca.key`; the certificate's path. Raises StartupError: one is there, or a disk's."""
    certificate, key_file = directory / "ca.pem", directory / "ca.key"
    for file in (certificate, key_file):
        if file.exists():
            raise StartupError(
                f"{file} is there already: a new authority ends every certificate of the old one"
            )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdserve")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(name, name, key, lifetime_days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write(certificate, key_file, builder.sign(key, hashes.SHA256()), key)
    return certificate


def make_host_certificate(directory: Path, names: Sequence[str], lifetime_days: float) -> tuple[Path, Path]:
    """Make, or renew, the certificate of a host with these DNS names and IP addresses; the paths of the
    certificate and of its key, which are called after the first name. It ends no later than the authority's.

    Raises ConfigError: no authority in the directory, one that has ended, or a name that is none;
    StartupError: a disk's error.
    """
    try:
        authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        authority_key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} holds no authority ({error}): `pdserve cert ca {directory}` makes one"
        ) from None
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{directory / 'ca.key'} is no key of `pdserve cert ca`")
    if authority.not_valid_after_utc <= datetime.now(UTC):
        raise ConfigError(
            f"{directory / 'ca.pem'} has ended, so nobody believes what it vouches for: make another "
            "authority with `pdserve cert ca`, in a new directory"
        )
    alternatives = x509.SubjectAlternativeName([_name(name) for name in names])
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = (
        _builder(subject, authority.subject, key, lifetime_days, authority.not_valid_after_utc)
        .add_extension(alternatives, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(signer, critical=False)
    )
    stem = re.sub(r"[^A-Za-z0-9.-]", "_", names[0])
    certificate, key_file = directory / f"{stem}.pem", directory / f"{stem}.key"
    _write(certificate, key_file, builder.sign(authority_key, hashes.SHA256()), key)
    return certificate, key_file


def ends_at(certificate: Path) -> datetime:
    """When this certificate ends, in UTC."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    lifetime_days: float,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    """`latest`: end of the issuer's own certificate; what it vouches for ends no later."""
    now = datetime.now(UTC)
    end = now + timedelta(days=lifetime_days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _name(text: str) -> x509.GeneralName:
    """Raises ConfigError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not _HOST.fullmatch(text):
            raise ConfigError(f"{text!r} is neither the name of a host nor an IP address") from None
        return x509.DNSName(text)


def _write(
    certificate_file: Path, key_file: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    """The key first, and each file in one step: who reads them meanwhile finds a pair, or one that does not
    fit and is looked at again. Raises StartupError.
    """
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        key_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _replace(key_file, text, 0o600)
        _replace(certificate_file, certificate.public_bytes(Encoding.PEM), 0o644)
    except OSError as error:
        raise StartupError(f"{error.filename} cannot be written: {error.strerror}") from error


def _replace(file: Path, text: bytes, mode: int) -> None:
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(text)
    new.replace(file)
