"""The router's application: FastAPI for the ordinary routes and the documentation, raw ASGI for the hot
ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from pdserve import __version__
from pdserve.errors import RequestError
from pdserve.logs import served_request
from pdserve.router.admission.gate import Entrance
from pdserve.router.admission.metrics import EntranceCollector
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.errors import error_body, error_of, error_type
from pdserve.router.api.openapi import complete
from pdserve.router.app.generation import HotRoutes
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.fleet.etcd import Discovery
from pdserve.router.fleet.health_check import STRICT, FirstRound, Prober
from pdserve.router.fleet.registry import Fleet
from pdserve.router.metrics.stats import RouterCollector, Stats, make_registry
from pdserve.router.request.call import JSON, request_id
from pdserve.router.server.client import Message, Receive, Scope, Send
from pdserve.router.sessions.redis_table import SharedSessions
from pdserve.router.tenants.api_keys import cluster_token
from pdserve.router.upstream.client import Upstream
from pdserve.tracing import Tracer, open_tracer

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"))
"""Ordinary routes that need no API key where others do."""


class Router:
    """The ASGI application, and the parts it is made of (for tests and for the process around it)."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        entrance: Entrance,
        upstream: Upstream,
        dispatcher: Dispatcher,
        stats: Stats,
        tracer: Tracer | None = None,
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.entrance = entrance
        self.upstream = upstream
        self.dispatcher = dispatcher
        self.stats = stats
        self.created_s = int(time.time())
        self.hot = HotRoutes(config, entrance, dispatcher, upstream.deadlines, stats, tracer)
        self._hot_paths = frozenset(ENDPOINTS)
        collector = RouterCollector(stats, fleet, upstream, lambda: len(dispatcher.placer.sessions))
        self.registry = make_registry(collector, EntranceCollector(entrance))
        self.exposition: Callable[[], Awaitable[bytes]] = self.own_exposition
        """The metrics of all of the router's processes, in Prometheus' text form."""
        self.told_reload: Callable[[], None] | None = None
        """Is told of `reload_all`, to tell the router's other processes."""
        self.app = make_app(self, self.hot)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hot paths go past FastAPI; everything else goes to it."""
        if scope["type"] == "http" and scope["path"] in self._hot_paths:
            await self.hot(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve_ordinary(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve_ordinary(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        name = request_id(headers.get(b"x-request-id", b""))
        served_request.set(name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        error = self._refusal(scope["path"], headers)
        if error is None:
            await self.app(scope, receive, send_named)
            return
        more = {"www-authenticate": "Bearer"} if error.status == 401 else None
        await Response(error_of(error), error.status, more, JSON.decode())(scope, receive, send_named)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> RequestError | None:
        """Why an ordinary route is not for this client: with API keys, what is not open to all needs one, and
        metrics, which tell tenants of each other, the administrators' key.
        """
        if not self.entrance.tenants.has_keys or path in OPEN_PATHS:
            return None
        try:
            if path == "/metrics":
                self.entrance.authenticate_admin(headers)
            else:
                self.entrance.authenticate(headers)
        except RequestError as error:
            return error
        return None

    async def own_exposition(self) -> bytes:
        """The metrics of this process."""
        return generate_latest(self.registry)

    def readiness(self) -> dict[str, Any]:
        """Whether this process can answer requests, and by whom; `in_flight` is what it has there itself."""
        workers = self.fleet.workers
        usable = [w for w in workers if w.ready and w.refused is None and not w.draining]
        roles = {worker.role for worker in usable}
        listed = {worker.role for worker in workers}
        degraded = [
            f"no {role} worker is ready"
            for role in ("prefill", "decode")
            if role in listed and role not in roles
        ]
        models = {
            model: any(w.info and w.info.model == model and w.role != "prefill" for w in usable)
            for model in self.fleet.models
        }
        if (without := list(models.values()).count(False)) and len(models) > 1:
            degraded.append(f"{without} of {len(models)} models have no worker that is ready")
        return {
            "ready": bool(roles & {"decode", "agg"}),
            "degraded": degraded,
            "mode": self.fleet.mode,
            "models": models,
            "workers": [
                {
                    "id": worker.id,
                    "role": worker.role,
                    "model": worker.info.model if worker.info else None,
                    "ready": worker.ready and worker.refused is None,
                    "refused": worker.refused,
                    "draining": worker.draining,
                    "in_flight": worker.in_flight,
                }
                for worker in workers
            ],
        }

    def reload(self) -> None:
        """Read the API keys anew. Raises ConfigError, and changes nothing then."""
        self.entrance.configure(self.config)

    def reload_all(self) -> None:
        """The same, in all of the router's processes. The others only log what is wrong."""
        self.reload()
        if self.told_reload is not None:
            self.told_reload()

    def model_card(self, model: str) -> dict[str, Any]:
        """OpenAI's model object, with SGLang's `max_model_len`."""
        return {
            "id": model,
            "object": "model",
            "created": self.created_s,
            "owned_by": "pdserve",
            "root": model,
            "parent": None,
            "max_model_len": self.fleet.context_length(model),
        }


@asynccontextmanager
async def open_router(
    config: RouterConfig, tracer: Tracer | None = None, first: FirstRound = STRICT
) -> AsyncIterator[Router]:
    """A running router: connections, probes, application. `tracer` replaces the configured one. Raises
    ConfigError, StartupError; `first` says whether for workers that do not fit together.
    """
    tracer = tracer or open_tracer(config.tracing, "pdserve-router")
    fleet, stats = Fleet.from_config(config), Stats()
    token = cluster_token(config.access)
    entrance = Entrance(config, fleet)
    upstream = Upstream(config.limits, token)
    prober = Prober(config.probe, fleet, upstream, stats, token=token)
    shared = SharedSessions(config.session) if config.session.redis.url else None
    discovery = Discovery(config.etcd, fleet) if config.etcd.endpoints else None
    tasks: list[asyncio.Task[None]] = []
    try:
        dispatcher = Dispatcher(config, fleet, upstream, stats, shared)
        router = Router(config, fleet, entrance, upstream, dispatcher, stats, tracer)
        if discovery is not None:
            await discovery.first()
            tasks.append(asyncio.create_task(discovery.run(), name="router-discovery"))
        await prober.first_round(first)
        tasks.append(asyncio.create_task(prober.run(), name="router-probes"))
        for task in tasks:
            task.add_done_callback(_report_end)
        yield router
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await prober.close()
        entrance.close()
        upstream.close()
        if shared is not None:
            await shared.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical(
            "%s has ended: what it would find is no longer known", task.get_name(), exc_info=error
        )


def make_app(router: Router, hot: HotRoutes) -> fastapi.FastAPI:
    """The FastAPI application."""
    app = fastapi.FastAPI(
        title="pdserve", version=__version__, summary="One OpenAI endpoint before many SGLang workers."
    )
    add_error_handlers(app)
    _add_hot_routes(app, hot)
    _publish(app)

    @app.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> dict[str, Any]:
        """Models that the workers serve."""
        return {"object": "list", "data": [router.model_card(model) for model in router.fleet.models]}

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def get_model(model: str) -> dict[str, Any]:
        """One model."""
        if model not in router.fleet.models:
            raise RequestError(
                404, f"The model {model[:200]!r} does not exist.", code="model_not_found", param="model"
            )
        return router.model_card(model)

    @app.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        """The router's process lives."""
        return {"status": "ok", "version": __version__}

    @app.get("/ready", tags=["operations"], responses={503: {"description": "No worker is ready."}})
    async def ready() -> JSONResponse:
        """200 when requests can be answered; `degraded` says what is missing."""
        state = router.readiness()
        if router.entrance.tenants.has_keys:  # open to all, and what is where is not for all
            del state["workers"], state["models"]
        return JSONResponse(state, 200 if state["ready"] else 503)

    text: dict[int | str, dict[str, Any]]
    text = {200: {"description": "In Prometheus' text form.", "content": {"text/plain": {}}}}

    @app.get("/metrics", tags=["operations"], response_class=Response, responses=text)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(await router.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


class _HotResponse(Response):
    """Hands the request to the hot routes, for whoever runs the FastAPI application by itself."""

    def __init__(self, hot: HotRoutes) -> None:
        super().__init__()
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._hot(scope, receive, send)


def _add_hot_routes(app: fastapi.FastAPI, hot: HotRoutes) -> None:
    """The hot routes, for whoever runs the application by itself; requests to the router do not come this
    way (see `Router`).
    """

    async def relay() -> Response:
        return _HotResponse(hot)

    for path in ENDPOINTS:
        app.add_api_route(
            path, relay, methods=["POST"], name=path, response_class=Response, include_in_schema=False
        )


def _publish(app: fastapi.FastAPI) -> None:
    """The OpenAPI document: FastAPI's, completed; made when it is first asked for."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(of_fastapi())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def add_error_handlers(app: fastapi.FastAPI) -> None:
    """Errors of the ordinary routes in OpenAI's form."""

    async def on_http(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(f"{request.url.path}: {error.detail}", error_type(error.status_code))
        return Response(body, error.status_code, error.headers, media_type=JSON.decode())

    async def on_refused(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return Response(error_of(error), error.status, media_type=JSON.decode())

    async def on_invalid(request: fastapi.Request, error: Exception) -> Response:
        return Response(error_body(str(error), error_type(400)), 400, media_type=JSON.decode())

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestError, on_refused)
    app.add_exception_handler(RequestValidationError, on_invalid)
