"""The ordinary routes: models, health, metrics, the API's documentation."""

from __future__ import annotations

from typing import Any

import fastapi
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pdserve import __version__
from pdserve.errors import RequestError
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.openapi import complete
from pdserve.router.app.error_handlers import add_error_handlers
from pdserve.router.app.router import Router
from pdserve.router.app.worker_routes import add_worker_routes
from pdserve.router.metrics.exposition import exposition


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
