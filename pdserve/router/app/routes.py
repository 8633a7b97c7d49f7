"""The ordinary routes: models, health, metrics, the API's documentation, and what one worker answers.

The published OpenAPI document is FastAPI's own, and the endpoints that bypass FastAPI. Bodies and answers of
these are free-form: the router passes them on, and OpenAI, Anthropic and SGLang describe them.

What SGLang says of itself and stored responses come from one worker. None of them is on the way of a token,
so their answers are read whole. They wait in no queue. So each counts as a request of its tenant, and a
tenant has a few of them at once: else one could take all connections to the workers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import fastapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve import __version__
from pdserve.errors import RequestError
from pdserve.router.api.endpoints import ENDPOINTS, Endpoint, find_holder
from pdserve.router.api.errors import (
    NoWorkerError,
    TooManyError,
    convert_error,
)
from pdserve.router.app.router import ADMIN_PATHS, Router, add_error_handlers
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.asgi import address_of
from pdserve.router.http.tls import UpstreamError
from pdserve.router.metrics.exposition import exposition
from pdserve.router.request.request import JSON
from pdserve.router.tenants.tenant import RATE_EXCEEDED, TenantState


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's `document`, with a path for each row of `ENDPOINTS`."""
    for path, row in ENDPOINTS.items():
        document["paths"][path] = {"post": _operation(path, row)}
    return document


def _operation(path: str, row: Endpoint) -> dict[str, Any]:
    form = "multipart/form-data" if row.is_form else "application/json"
    content: dict[str, Any] = {"application/json": {"schema": {}}}
    if row.streams:
        content["text/event-stream"] = {"schema": {}}
    return {
        "summary": f"{row.summary}.",
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {form: {"schema": {"type": "object"}}}},
        "responses": {
            "200": {"description": "The worker's answer.", "content": content},
            "default": {"description": "An error in the form of the endpoint's own API."},
        },
    }


LIMIT_S: Final = 20.0
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
MAX_AT_ONCE: Final = 8
"""Of one tenant, in one process of the router."""
_LINES: Final = b"content-type: application/json\r\n"


def add_worker_routes(app: fastapi.FastAPI, router: Router) -> None:
    """Add the routes to the application."""
    turns = _Turns()

    async def pass_on(
        tenant: TenantState, worker: Worker, method: str, target: str, body: bytes = b""
    ) -> Response:
        with turns.of(router, tenant):
            return await _pass_on(router, worker, method, target, body)

    async def from_any(request: fastapi.Request) -> Response:
        """As a worker of the model says (`?model=NAME` where there are several)."""
        worker = _least_loaded(router, request.query_params.get("model"), computes=False)
        if request.url.path in ADMIN_PATHS:
            return await _pass_on(router, worker, "GET", request.url.path)
        return await pass_on(_tenant(router, request), worker, "GET", request.url.path)

    for path in ("/health_generate", "/get_model_info", "/model_info", "/get_server_info", "/server_info"):
        app.get(path, tags=["SGLang"], operation_id=path[1:], response_class=Response)(from_any)

    @app.get("/v1/responses/{response_id}", tags=["OpenAI"], response_class=Response)
    async def get_response(response_id: str, request: fastapi.Request) -> Response:
        """A stored response, from the worker that has it."""
        tenant = _tenant(router, request)
        worker = _holder(router, tenant, response_id)
        return await pass_on(tenant, worker, "GET", f"/v1/responses/{response_id}")

    @app.post("/v1/responses/{response_id}/cancel", tags=["OpenAI"], response_class=Response)
    async def cancel_response(response_id: str, request: fastapi.Request) -> Response:
        """End a response that is computed in the background."""
        tenant = _tenant(router, request)
        worker = _holder(router, tenant, response_id)
        return await pass_on(tenant, worker, "POST", f"/v1/responses/{response_id}/cancel")


def _least_loaded(router: Router, model: str | None, *, computes: bool = True) -> Worker:
    """A decode or aggregated worker; `computes`: one that computes prompts. Raises NoWorkerError;
    RequestError for an unknown model.
    """
    name = router.gate.served_model(model)
    snapshot = router.fleet.snapshot(name, asyncio.get_running_loop().time())
    workers = snapshot.decode or (() if computes else snapshot.direct_decode)
    if not workers:
        raise NoWorkerError("No worker is ready to serve this model; try again shortly.")
    return min(workers, key=lambda worker: worker.load)


class _Turns:
    """How many of these requests run, by tenant."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @contextmanager
    def of(self, router: Router, tenant: TenantState) -> Iterator[None]:
        """Count one of the tenant's. Raises TooManyError. Without API keys the operator is the only user."""
        if not router.gate.tenants.has_keys:
            yield
            return
        if self._running[tenant.name] >= MAX_AT_ONCE:
            raise TooManyError(f"You may send {MAX_AT_ONCE} such requests at a time.", 1.0, RATE_EXCEEDED)
        tenant.take(0, asyncio.get_running_loop().time())
        self._running[tenant.name] += 1
        try:
            yield
        finally:
            self._running[tenant.name] -= 1


def _holder(router: Router, tenant: TenantState, id_: str) -> Worker:
    """The worker that holds what the tenant asks for. Raises RequestError (404)."""
    worker_id = find_holder(id_, router.fleet.by_id, tenant.name)
    if worker_id is None:
        raise RequestError(404, f"Response with id {id_[:200]!r} not found.")
    return router.fleet.by_id[worker_id]


def _tenant(router: Router, request: fastapi.Request) -> TenantState:
    return router.gate.authenticate(dict(request.headers.raw), address_of(request.scope))


async def _pass_on(router: Router, worker: Worker, method: str, target: str, body: bytes = b"") -> Response:
    """The worker's answer, within `LIMIT_S`. Raises RequestError where there is none."""
    try:
        answer = await router.upstream.fetch(
            worker,
            target,
            _LINES,
            body,
            method=method.encode(),
            limit_s=LIMIT_S,
            limit_bytes=MAX_ANSWER_BYTES,
        )
    except UpstreamError as error:
        status = 504 if error.kind == "timeout" else 502
        raise RequestError(
            status, f"The worker did not answer ({error.kind}).", type_="server_error"
        ) from None
    said = answer.body if answer.status < 400 else convert_error(answer.status, answer.body)
    return Response(said, answer.status, media_type=JSON.decode())


def make_app(router: Router) -> fastapi.FastAPI:
    """The FastAPI application of everything but `api.endpoints.ENDPOINTS`."""
    app = fastapi.FastAPI(
        title="pdserve",
        version=__version__,
        summary="One OpenAI endpoint before many SGLang workers.",
        redirect_slashes=False,  # a redirect would lead to whatever host the client named
    )
    add_error_handlers(app, ENDPOINTS)
    _publish(app)

    @app.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> dict[str, Any]:
        """Models that the workers serve, their LoRA adapters as BASE:ADAPTER, and aliases."""
        return {"object": "list", "data": list(router.model_cards().values())}

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def get_model(model: str) -> dict[str, Any]:
        """One model."""
        card = router.model_cards().get(model)
        if card is None:
            raise RequestError(
                404, f"The model {model[:200]!r} does not exist.", code="model_not_found", param="model"
            )
        return card

    @app.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        """The router's process lives."""
        return {"status": "ok", "version": __version__}

    @app.get("/ready", tags=["operations"], responses={503: {"description": "No worker is ready."}})
    async def ready() -> JSONResponse:
        """200 when requests can be answered; `degraded` says what is missing."""
        state = router.readiness()
        if router.gate.tenants.has_keys:  # open to all, and what is where is not for all
            del state["workers"], state["models"]
        return JSONResponse(state, 200 if state["ready"] else 503)

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(exposition(await router.metrics()), media_type=CONTENT_TYPE_LATEST)

    add_worker_routes(app, router)
    return app


def _publish(app: fastapi.FastAPI) -> None:
    """The OpenAPI document: FastAPI's, completed; made when it is first asked for."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(of_fastapi())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
