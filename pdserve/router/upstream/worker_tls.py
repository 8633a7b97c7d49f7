"""TLS to workers: with `tls.ca` every worker is reached by https, without it by http. Nothing falls back.

Names of workers also come from etcd and the admin API. A name with the other scheme is not connected to.
"""

from __future__ import annotations

import ssl
from typing import Final, Protocol

import httpx

from pdserve.router.upstream.response import UpstreamError
from pdserve.security.tls import Certificates, TlsConfig

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
            raise UpstreamError("connect", f"worker {worker.id}: https needs tls.ca at the router")
        if context is not None and not worker.is_tls:
            what = f"worker {worker.id}: its URL is http, and tls.ca asks for https"
            raise UpstreamError("connect", what)
        return context

    @property
    def current(self) -> ssl.SSLContext | None:
        """The context for connections that begin now."""
        return self._certificates.client_context


class RenewedTransport(httpx.AsyncBaseTransport):
    """httpx's transport with the certificates of now. Requests in progress end with those of before."""

    def __init__(self, tls: WorkerTls) -> None:
        self._tls = tls
        self._context = tls.current
        self._transport = _transport(self._context)
        self._former: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request."""
        if (context := self._tls.current) is not self._context:
            former, self._former = self._former, self._transport
            self._context, self._transport = context, _transport(context)
            if former is not None:
                await former.aclose()
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()
        if self._former is not None:
            await self._former.aclose()


def _transport(context: ssl.SSLContext | None) -> httpx.AsyncHTTPTransport:
    # without a context all workers have plain HTTP: the system's certificates need not be read
    return httpx.AsyncHTTPTransport(verify=context or False)
