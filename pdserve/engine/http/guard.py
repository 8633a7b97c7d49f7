"""Which requests a worker takes in, and from whom: one pass over the headers of each, before anything else.

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

At a worker whose pages go to a storage nobody replaces weights or loads adapters. The pool's namespace and
the keys of its pages are made of the weights that the worker started with. Other weights would read and write
pages of the old ones. Workers of a trainer that replaces weights run with `storage = "none"`. An adapter that
is loaded later gets a random id, which is a part of its pages' keys, so no other worker would find its pages.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.middleware.cors import CORSMiddleware

from pdserve.engine.drain import Drain
from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, refuse, stopping
from pdserve.engine.http.request_context import ROOM_HEADER, SALT_HEADER, RequestContext
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


UPDATE_PATHS: Final = frozenset(
    {
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/begin_weight_update",
        "/end_weight_update",
    }
)
ADAPTER_PATHS: Final = frozenset({"/load_lora_adapter", "/load_lora_adapter_from_tensors"})
_WEIGHTS_REFUSAL: Final = RequestError(
    403,
    "pages in this storage are of the weights that the worker started with: start a worker with the new "
    'ones, or take storage = "none"',
    code="weights_fixed",
)
_ADAPTER_REFUSAL: Final = RequestError(
    403,
    "pages of an adapter that is loaded later would be found by no other worker: start all with --lora-paths",
    code="weights_fixed",
)
_FIXED: Final = dict.fromkeys(UPDATE_PATHS, _WEIGHTS_REFUSAL) | dict.fromkeys(ADAPTER_PATHS, _ADAPTER_REFUSAL)
_READ: Final = frozenset({b"authorization", SALT_HEADER, ROOM_HEADER})


class Guard:
    """ASGI middleware; the outermost one. It counts the requests that the drain waits for."""

    def __init__(
        self,
        app: AsgiApp,
        token: str,
        has_started: Callable[[], bool],
        drain: Drain,
        metrics_token: str = "",
        *,
        has_fixed_weights: bool = False,
    ) -> None:
        """`has_started`: the worker has been ready. `metrics_token`: opens the metrics, as the cluster's
        does; empty: they are open. `has_fixed_weights`: its pages go to a storage.
        """
        self._app = app
        self._digest = digest(token)
        self._metrics_digest = digest(metrics_token)
        self._has_started = has_started
        self._drain = drain
        self._has_fixed_weights = has_fixed_weights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        is_open = scope["path"] in OPEN_PATHS
        try:
            if is_open:
                self._check_open(scope["path"], headers)
            else:
                self._check(scope, headers)
                context = RequestContext(headers)
        except RequestError as error:
            await refuse(scope, receive, send, error)
            return
        if is_open:
            await self._app(scope, receive, send)
            return
        self._drain.running += 1
        try:
            with context:
                await self._app(scope, receive, send)
        finally:
            self._drain.running -= 1

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises RequestError for what is not taken in."""
        path = scope["path"]
        if self._digest and not same(_shown(headers), self._digest):
            raise RequestError(
                401,
                "a worker asks for the cluster's token: "
                "send `Authorization: Bearer TOKEN`, or ask the router",
                type_="authentication_error",
                code="invalid_cluster_token",
            )
        if not self._has_started():
            raise RequestError(503, "this worker starts", type_="server_error", code="worker_starting")
        is_serving = path in SERVING_PATHS or path.startswith(SERVING_PREFIXES)
        if not (self._digest or is_serving or _is_this_host(scope)):
            raise RequestError(
                403,
                f"{path} is for this host alone: a worker with cluster_token lets in who has the token",
                type_="permission_error",
                code="no_cluster_token",
            )
        if self._has_fixed_weights and (refusal := _FIXED.get(path.rstrip("/"))) is not None:
            raise refusal
        if self._drain.is_closed:
            raise stopping()

    def _check_open(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises RequestError for metrics that are not for this client."""
        if path not in METRICS_PATHS or not self._metrics_digest:
            return
        shown = _shown(headers)
        if not same(shown, self._metrics_digest) and not same(shown, self._digest):
            raise RequestError(
                401,
                "the metrics ask for a token: send `Authorization: Bearer TOKEN` (metrics_token_file)",
                type_="authentication_error",
                code="invalid_metrics_token",
            )


def _shown(headers: Mapping[bytes, bytes]) -> str:
    """The digest of the token that the client shows."""
    return digest(bearer(headers.get(b"authorization")))


def close_cors(app: Any) -> None:
    """Take away that SGLang's app lets the pages of all origins read its answers, before it serves."""
    app.user_middleware[:] = [each for each in app.user_middleware if each.cls is not CORSMiddleware]


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
