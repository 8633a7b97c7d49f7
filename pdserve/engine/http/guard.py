"""Which clients may reach which routes of a worker.

SGLang's server has some ninety routes. Besides generation there are routes that flush caches, detach the
storage backend, read or replace weights, and stop generation. All are open to every client that reaches the
port. SGLang's own `--admin-api-key` guards only some of them, and appears in its log. So:

| worker | health, metrics | generation, `/pd/*` | everything else |
|---|---|---|---|
| with the cluster's token | all | clients with the token | clients with the token |
| without one, `insecure` | all | all, once it is ready | this host, once it is ready |

With `metrics_token` metrics are for who shows it, or the cluster's token.

A worker without a token starts only with `insecure`: other users of its host could control it. The router
sends the token as `Authorization: Bearer TOKEN`. The lists name the open routes, so a route that a next
SGLang adds is closed. Until the worker is ready, nobody is let in. No route answers pages of other origins
(CORS): a browser holds no token.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from pdserve.engine.drain import Drain
from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, refuse, stopping
from pdserve.errors import RequestError
from pdserve.security.tokens import bearer, digest, same

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/metrics/", "/pd/ready"})
"""For probes and Prometheus, whatever the configuration."""
METRICS_PATHS = frozenset({"/metrics", "/metrics/"})
SERVING_PATHS = frozenset(
    {
        *("/generate", "/tokenize", "/detokenize", "/encode", "/classify", "/ping"),
        *("/model_info", "/get_model_info", "/health_generate"),
    }
)
SERVING_PREFIXES = ("/v1/", "/pd/")
"""Routes that a worker without a token serves to all: those that a router and an OpenAI client use."""


class Guard:
    """ASGI middleware; the outermost one."""

    def __init__(
        self, app: AsgiApp, token: str, has_started: Callable[[], bool], metrics_token: str = ""
    ) -> None:
        """`has_started`: the worker has been ready. `metrics_token`: opens the metrics, as the cluster's
        does; empty: they are open.
        """
        self._app = app
        self._digest = digest(token)
        self._metrics_digest = digest(metrics_token)
        self._has_started = has_started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (refusal := self._refusal(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await refuse(scope, receive, send, refusal)

    def _refusal(self, scope: Scope) -> RequestError | None:
        path = scope["path"]
        if path in OPEN_PATHS:
            return self._metrics_refusal(scope) if path in METRICS_PATHS else None
        if self._digest and not same(_shown(scope), self._digest):
            return RequestError(
                401,
                "a worker asks for the cluster's token: "
                "send `Authorization: Bearer TOKEN`, or ask the router",
                type_="authentication_error",
                code="invalid_cluster_token",
            )
        if not self._has_started():
            return RequestError(503, "this worker starts", type_="server_error", code="worker_starting")
        is_serving = path in SERVING_PATHS or path.startswith(SERVING_PREFIXES)
        if self._digest or is_serving or _is_this_host(scope):
            return None
        return RequestError(
            403,
            f"{path} is for this host alone: a worker with cluster_token lets in who has the token",
            type_="permission_error",
            code="no_cluster_token",
        )

    def _metrics_refusal(self, scope: Scope) -> RequestError | None:
        if not self._metrics_digest:
            return None
        shown = _shown(scope)
        if same(shown, self._metrics_digest) or same(shown, self._digest):
            return None
        return RequestError(
            401,
            "the metrics ask for a token: send `Authorization: Bearer TOKEN` (metrics_token_file)",
            type_="authentication_error",
            code="invalid_metrics_token",
        )


def _shown(scope: Scope) -> str:
    """The digest of the token that the client shows."""
    return digest(bearer(next((value for name, value in scope["headers"] if name == b"authorization"), None)))


def close_cors(app: Any) -> None:
    """Take away that SGLang's app lets the pages of all origins read its answers, before it serves."""
    app.user_middleware[:] = [each for each in app.user_middleware if each.cls is not CORSMiddleware]


class Draining:
    """ASGI middleware: counts running requests, and refuses new ones once the drain is over."""

    def __init__(self, app: AsgiApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif self._drain.is_closed:
            await refuse(scope, receive, send, stopping())
        else:
            self._drain.running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._drain.running -= 1


def _is_this_host(scope: Scope) -> bool:
    """The client's address is a loopback one, or the one it came to."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        address = ipaddress.ip_address(client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback or (server is not None and client[0] == server[0])
