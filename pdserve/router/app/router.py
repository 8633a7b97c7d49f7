"""The router's ASGI application: the ordinary routes by FastAPI, behind API keys and CORS.

`ENDPOINTS` do not come here: the server hands them to the `Proxy`.

Errors of its routes have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import fastapi
import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from pdserve.errors import RequestError
from pdserve.logs import served_request
from pdserve.metric import Labels
from pdserve.router.admission.gate import Gate, gate_metrics
from pdserve.router.api.endpoints import ENDPOINTS, MAX_SHOWN_CHARS, fold, not_found, similar
from pdserve.router.api.errors import ErrorForm, error_body, error_headers, error_of
from pdserve.router.config.router import RouterConfig, base_of
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import WITHOUT
from pdserve.router.http.asgi import Asgi, Message, Receive, Scope, Send, address_of
from pdserve.router.http.cors import Cors
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Snapshot, Stats
from pdserve.router.placement.elastic import ElasticRoles
from pdserve.router.proxy.handle import Proxy
from pdserve.router.request.request import JSON, request_id
from pdserve.router.request.traces import TraceFile
from pdserve.tracing import Tracer

OPENAI: Final[ErrorForm] = "openai"


def refused(error: RequestError) -> Response:
    """The answer of an ordinary route that is refused."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_of(error), error.status, headers, JSON.decode())


def add_error_handlers(app: fastapi.FastAPI, more_paths: Iterable[str] = ()) -> None:
    """Errors of the ordinary routes in OpenAI's form, or in that of the endpoint that was probably meant.
    `more_paths`: served beside the application's own.
    """

    async def on_http(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        said, form = f"{path[:MAX_SHOWN_CHARS]}: {error.detail}", OPENAI
        if error.status_code == 404:
            known = [route.path for route in app.routes if isinstance(route, Route)]
            known += more_paths
            said = not_found(request.scope["method"], path, known)
            if meant := ENDPOINTS.get(similar(path, known) or ""):
                form = meant.errors
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # see `http.asgi`
        body = error_body(error.status_code, said, form=form)
        return Response(body, error.status_code, headers, media_type=JSON.decode())

    async def on_refused(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return refused(error)

    async def on_invalid(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        said = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
        return Response(error_body(400, said), 400, media_type=JSON.decode())

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestError, on_refused)
    app.add_exception_handler(RequestValidationError, on_invalid)


OPEN_PATHS = frozenset(("/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"))
"""Ordinary routes that need no API key where others do."""
MODELS_PATH = "/v1/models"


ADMIN_PATHS = frozenset(("/metrics", "/get_server_info", "/server_info"))
"""Ordinary routes that tell more than a tenant may know: with API keys they need the administrators'."""


class Router:
    """The ASGI application, and the parts it is made of (for tests and for the process around it)."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        gate: Gate,
        upstream: Upstream,
        stats: Stats,
        make_app: Callable[[Router], Asgi],
        tracer: Tracer | None = None,
        trace_file: TraceFile | None = None,
    ) -> None:
        """`make_app` makes the application of the ordinary routes."""
        self.config = config
        self.fleet = fleet
        self.gate = gate
        self.upstream = upstream
        self.stats = stats
        self.created_s = int(time.time())
        self._cors = Cors(config.access.cors_origins) if config.access.cors_origins else None
        self.proxy = Proxy(config, fleet, gate, upstream, stats, tracer, self._cors, trace_file)
        self.metrics: Callable[[], Awaitable[Snapshot]] = self._metrics
        """Those of all of the router's processes together. Raises RequestError when there is no sum."""
        self.told_reload: Callable[[], None] | None = None
        """Is told of `reload_all`, to tell the router's other processes."""
        self.is_stopping = False
        """`/ready` says so, while requests are still served."""
        self._app = make_app(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            path = fold(scope["path"])
            if path in OPEN_PATHS or path.startswith(MODELS_PATH):
                scope = {**scope, "path": path}
            await self._serve_ordinary(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve_ordinary(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        name = request_id(headers.get(b"x-request-id"))
        served_request.set(name)

        shared = self._cors.headers(headers) if self._cors is not None else []

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name), *shared]}
            await send(message)

        if self._cors is not None and (said := self._cors.preflight(scope["method"], headers)):
            shared = said
            await Response()(scope, receive, send_named)
            return
        error = self._refusal(scope, headers)
        if error is None:
            await self._app(scope, receive, send_named)
            return
        await refused(error)(scope, receive, send_named)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        """Why an ordinary route is not for this client: with API keys, what is not open to all needs one, and
        `ADMIN_PATHS` the administrators'.
        """
        path, address = scope["path"], address_of(scope)
        if not self.gate.tenants.has_keys or path in OPEN_PATHS:
            return None
        try:
            if path in ADMIN_PATHS:
                self.gate.authenticate_admin(headers, address)
            else:
                self.gate.authenticate(headers, address)
        except RequestError as error:
            return error
        return None

    def own_metrics(self) -> Snapshot:
        """The metrics of this process."""
        now_s = asyncio.get_running_loop().time()
        return collect(self.stats, self.fleet, self.gate, self.upstream, self.proxy, now_s)

    async def _metrics(self) -> Snapshot:
        return self.own_metrics()

    def readiness(self) -> dict[str, Any]:
        """Whether this process can answer requests, and by whom; `in_flight` is what it has there itself."""
        workers = self.fleet.workers
        usable = [w for w in workers if w.ready and w.refused is None and not w.draining]
        roles = {worker.role for worker in usable}
        listed = {worker.role for worker in workers}
        degraded = [
            f"no {role} worker is ready"
            for role in ("prefill", "decode", "elastic")
            if role in listed and role not in roles
        ]
        models = {
            model: any(w.info and w.info.model == model and w.role != "prefill" for w in usable)
            for model in self.fleet.models
        }
        if (without := list(models.values()).count(False)) and len(models) > 1:
            degraded.append(f"{without} of {len(models)} models have no worker that is ready")
        if self.is_stopping:
            degraded.append("the router is stopping")
        return {
            "ready": bool(roles & {"decode", "agg", "elastic"}) and not self.is_stopping,
            "degraded": degraded,
            "mode": self.fleet.mode,
            "models": models,
            "workers": [
                {
                    "id": worker.id,
                    "tls": worker.is_tls,
                    "role": worker.role,
                    "model": worker.info.model if worker.info else None,
                    "ready": worker.ready and worker.refused is None,
                    "refused": worker.refused,
                    "draining": worker.draining,
                    "engine": worker.info.engine if worker.info else None,
                    "absent": {name: WITHOUT[name] for name in WITHOUT if worker.lacks(name)},
                    "in_flight": worker.in_flight,
                }
                for worker in workers
            ],
        }

    def reload(self) -> None:
        """Read the API keys anew. Raises ConfigError, and changes nothing then."""
        self.gate.read_keys()

    def reload_all(self) -> None:
        """The same, in all of the router's processes. The others only log what is wrong."""
        self.reload()
        if self.told_reload is not None:
            self.told_reload()

    def model_cards(self) -> dict[str, dict[str, Any]]:
        """OpenAI's model objects by id, with SGLang's `max_model_len`: models, their adapters, aliases."""
        cards, served = {}, self.fleet.tasks
        for model in served:
            cards[model] = self._card(model, model, None)
            for adapter in self.fleet.adapters.get(model, ()):
                cards[f"{model}:{adapter}"] = self._card(model, f"{model}:{adapter}", model)
        for alias, model in self.gate.aliases.items():
            base = model if model in served else base_of(model)
            if base in served:
                cards[alias] = self._card(base, alias, None)
        return cards

    def _card(self, model: str, id_: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": id_,
            "object": "model",
            "created": self.created_s,
            "owned_by": "pdserve",
            "root": id_,
            "parent": parent,
            "max_model_len": self.fleet.context_length(model),
        }


def collect(
    stats: Stats, fleet: Fleet, gate: Gate, upstream: Upstream, proxy: Proxy, now_s: float
) -> Snapshot:
    """All metrics as they are now."""
    kinds = msgspec.structs.asdict(upstream.counts)
    stats.show(
        {
            "requests_in_flight": len(proxy.running),
            "sessions": len(proxy.placer.sessions),
            "upstream_connections": {(kind,): count for kind, count in kinds.items()},
            "upstream_connections_open": upstream.open_count,
            "upstream_connections_idle": upstream.idle_count,
            **_of_elastic(fleet, proxy.placer.elastic, now_s),
            **_of_workers(fleet),
            **gate_metrics(gate),
        }
    )
    stats.queue_wait = gate.queue_wait
    return stats.snapshot()


def _of_workers(fleet: Fleet) -> dict[str, dict[Labels, int]]:
    workers = {(worker.id, worker.role): worker for worker in fleet.workers}
    in_flight: dict[Labels, int] = dict.fromkeys(workers, 0)
    for worker in fleet.members.at_work:
        key = worker.id, worker.role
        in_flight[key] = in_flight.get(key, 0) + worker.in_flight
    return {
        "worker_requests_in_flight": in_flight,
        "worker_healthy": {key: int(w.ready and w.refused is None) for key, w in workers.items()},
        "worker_draining": {key: int(w.draining) for key, w in workers.items()},
        "worker_circuit_open": {key: int(w.circuit.retry_at_s > 0) for key, w in workers.items()},
        "worker_refused": {key: int(w.refused is not None) for key, w in workers.items()},
    }


def _of_elastic(fleet: Fleet, elastic: ElasticRoles, now_s: float) -> dict[str, dict[Labels, float]]:
    wanted: dict[Labels, float] = {}
    prefills: dict[Labels, float] = {}
    for model in fleet.models:
        snapshot = fleet.snapshot(model, now_s)
        if elastic.counts(snapshot):
            roles = {w.role for w in fleet.workers if w.info is not None and w.info.model == model}
            of_role = elastic.wanted_of_role(snapshot, roles, now_s)
            wanted |= {(model, role): round(workers, 3) for role, workers in of_role.items()}
        prefilling = elastic.prefilling(model)
        prefills |= {(w.id, w.role): float(w.id in prefilling) for w in snapshot.elastic}
    return {
        "workers_wanted": wanted,
        "worker_prefills": prefills,
        "duty_changes": {(model,): float(count) for model, count in elastic.changes().items()},
    }
