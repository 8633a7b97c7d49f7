"""Certificates of an authority that `pdserve cert` makes, for tests of TLS."""

from __future__ import annotations

from pathlib import Path

from pdserve.tls.authority import make_authority, make_host_certificate
from pdserve.tls.contexts import TlsConfig


class Authority:
    """An authority of its own in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = make_authority(directory, 1)

    def files(self, *names: str, days: float = 1) -> tuple[Path, Path]:
        """Certificate and key of a host."""
        return make_host_certificate(self.directory, names, days)

    def host(self, *names: str, mutual: bool = False, days: float = 1) -> TlsConfig:
        """What a part on a host with these names has; loopback if none is given."""
        certificate, key = self.files(*(names or ("127.0.0.1", "localhost")), days=days)
        return TlsConfig(certificate=certificate, key=key, ca=self.ca, client_ca=self.ca if mutual else None)

    def client(self) -> TlsConfig:
        """What a part has that has no certificate of its own."""
        return TlsConfig(ca=self.ca)
