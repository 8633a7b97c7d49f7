"""TLS between the parts of pdserve: which files, and contexts made from them, also after they have changed.

| file | who has it |
|---|---|
| `certificate`, `key` | a server that speaks TLS; a client of servers that ask for certificates |
| `ca` | a client: it speaks TLS, and only to servers with a certificate of this authority |
| `client_ca` | a server that lets in only clients with a certificate of this authority |

Certificates are short-lived in many places. So the files are looked at again and again, and each new
connection uses what they hold then.

Versions below TLS 1.3 are not spoken: all peers are pdserve's own. Sessions are not resumed, because a
resumed one does not check certificates again.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # between two looks at the files
_OPEN_TO_OTHERS: Final = 0o007


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of certificates, in PEM (`launch/make_certs.sh` makes some). They are read again when changed."""

    certificate: Path | None = None
    """Certificate of this process, followed by those that vouch for it."""
    key: Path | None = None
    """Private key of the certificate."""
    ca: Path | None = None
    """Authorities of the servers that this process connects to. With it, by TLS only."""
    client_ca: Path | None = None
    """Authorities of clients, which must show a certificate then (mutual TLS)."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls.certificate and tls.key are given together, or none of them")
        if self.client_ca is not None and self.certificate is None:
            raise ValueError("tls.client_ca is for servers: give tls.certificate and tls.key too")

    @property
    def as_server(self) -> bool:
        """Whether a server with these files speaks TLS."""
        return self.certificate is not None

    @property
    def as_client(self) -> bool:
        """Whether a client with these files speaks TLS."""
        return self.ca is not None


class Certificates:
    """The contexts of one TlsConfig. Thread-safe."""

    def __init__(self, config: TlsConfig, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
        """`oldest`: for ports that others than pdserve's own parts connect to.

        Raises ConfigError: a file is not readable, or holds no certificate.
        """
        self._config = config
        self._oldest = oldest
        self._lock = threading.Lock()
        self._looked_s = 0.0
        self._problem = ""
        self._seen = self._state()
        self._server, self._client = self._load()

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """For accepting connections; None: without TLS."""
        return self._fresh()[0]

    @property
    def client_context(self) -> ssl.SSLContext | None:
        """For connecting; it checks the server's name. None: without TLS."""
        return self._fresh()[1]

    def lasting_server_context(self) -> ssl.SSLContext | None:
        """One for a server that takes a context once: each handshake uses the certificates of then. None:
        without TLS.
        """
        with self._lock:
            lasting = self._load()[0]
        if lasting is not None:
            lasting.sni_callback = self._follow
        return lasting

    def _follow(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called by OpenSSL at the begin of a handshake, with or without a server name."""
        if (context := self.server_context) is not None:
            connection.context = context

    def _fresh(self) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
        """The contexts, made again if the files have changed. Files that cannot be used leave them as they
        are: half of a renewal may be on the disk.
        """
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._looked_s + LOOK_S:
                return self._server, self._client
            self._looked_s = now_s
            seen = self._state()
            if seen == self._seen:
                return self._server, self._client
            try:
                self._server, self._client = self._load()
            except ConfigError as error:
                if str(error) != self._problem:
                    logger.warning("%s: going on with the certificates of before", error)
                self._problem = str(error)
            else:
                logger.info("tls: the certificates have changed, new connections use the new ones")
                self._seen, self._problem = seen, ""
            return self._server, self._client

    def _state(self) -> list[tuple[int, int, int]]:
        """Of the files as they are on the disk. A missing one has zeros."""
        found = []
        config = self._config
        for file in (config.certificate, config.key, config.ca, config.client_ca):
            try:
                status = None if file is None else file.stat()
            except OSError:
                status = None
            found.append((0, 0, 0) if status is None else (status.st_ino, status.st_size, status.st_mtime_ns))
        return found

    def _load(self) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
        """Raises ConfigError."""
        server = client = None
        if self._config.as_server:
            server = self._context(ssl.PROTOCOL_TLS_SERVER, "client_ca", self._config.client_ca)
            if self._config.client_ca is not None:
                server.verify_mode = ssl.CERT_REQUIRED
        if self._config.as_client:
            client = self._context(ssl.PROTOCOL_TLS_CLIENT, "ca", self._config.ca)
        return server, client

    def _context(self, side: int, name: str, authorities: Path | None) -> ssl.SSLContext:
        config = self._config
        context = ssl.SSLContext(side)
        context.minimum_version = self._oldest
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0

        def refuse_password() -> str:  # OpenSSL would ask for it at the terminal, and wait
            raise ConfigError(f"tls.key {config.key} is encrypted: give one without a password")

        try:
            if config.certificate is not None and config.key is not None:
                context.load_cert_chain(config.certificate, config.key, password=refuse_password)
                if config.key.stat().st_mode & _OPEN_TO_OTHERS:  # Kubernetes mounts secrets so: no refusal
                    logger.warning("tls.key %s is open to every user of this host: make it 0600", config.key)
        except OSError as error:  # ssl.SSLError too
            files = f"tls.certificate {config.certificate} and tls.key {config.key}"
            raise ConfigError(f"{files} cannot be used: {error.strerror or error}") from error
        try:
            if authorities is not None:
                context.load_verify_locations(authorities)
        except OSError as error:
            text = f"tls.{name} {authorities} cannot be used: {error.strerror or error}"
            raise ConfigError(text) from error
        return context
