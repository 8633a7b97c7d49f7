"""How a worker is reached: TLS or not, and whose fault it is when it cannot be.

With `tls.ca` every worker is reached by https, without it by http. Nothing falls back. Names of workers also
come from etcd and the admin API. A name with the other scheme is not connected to.

A worker whose port is closed is down. Without a free file descriptor, or while no name server answers, the
router learns nothing about any worker.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from typing import Final, Literal, Protocol

from pdserve.errors import PdserveError
from pdserve.security.tls import Certificates, TlsConfig

ErrorKind = Literal["connect", "timeout", "closed", "protocol", "busy", "cut", "down"]


class UpstreamError(PdserveError):
    """A worker did not give a complete HTTP answer. `kind` is one word for metrics and log lines."""

    def __init__(self, kind: ErrorKind, message: str, *, is_down: bool = False) -> None:
        """`is_down`: its port is closed, or its URL cannot be used: it is not busy or far away."""
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.is_down = is_down
        self.incarnation, self.is_young = "", True
        """Of the worker, when it was asked. It had sent nothing of an answer's body."""
        self.rest = b""
        """What came of the answer before, and nobody has taken."""


_OWN_ERRNOS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN)
)
_OWN_NAME_ERRORS = frozenset((socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM))


def is_own_fault(error: BaseException) -> bool:
    """This machine could not try: it lacks descriptors, ports or memory, or no name server answers."""
    return any(_is_own(cause) for cause in os_errors(error))


def is_refused(error: BaseException) -> bool:
    """The port is closed: at every address of the worker, the connection was refused."""
    causes = [cause for cause in os_errors(error) if cause.errno is not None]
    return bool(causes) and all(cause.errno == errno.ECONNREFUSED for cause in causes)


def os_errors(error: BaseException) -> Iterator[OSError]:
    """The errors of the operating system that led to `error`, through causes and groups."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError):
            yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += (one.__cause__, one.__context__)


def _is_own(error: OSError) -> bool:
    if isinstance(error, socket.gaierror):
        return error.errno in _OWN_NAME_ERRORS
    return error.errno in _OWN_ERRNOS


ASKS_FOR_CERTIFICATE: Final = "does it ask for a certificate (tls.client_ca)?"
"""Said where a connection with TLS ends before any answer. In TLS 1.3 a client learns of its refusal so."""


class Addressed(Protocol):
    """The attributes of a worker that decide how it is reached."""

    id: str
    is_tls: bool


class WorkerTls:
    """Chooses the TLS context of each new connection to a worker."""

    def __init__(self, config: TlsConfig | None = None) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._certificates = Certificates(config or TlsConfig())

    def context(self, worker: Addressed) -> ssl.SSLContext | None:
        """None: plain HTTP. Raises UpstreamError `connect` for a worker of the other scheme."""
        context = self._certificates.client_context
        if worker.is_tls and context is None:
            what = f"worker {worker.id}: https needs tls.ca at the router"
            raise UpstreamError("connect", what, is_down=True)
        if context is not None and not worker.is_tls:
            what = f"worker {worker.id}: its URL is http, and tls.ca asks for https"
            raise UpstreamError("connect", what, is_down=True)
        return context
