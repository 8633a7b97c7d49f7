"""Errors of FastAPI routes in OpenAI's form."""

from __future__ import annotations

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pdserve.errors import RequestError
from pdserve.router.api.errors import error_body, error_headers, error_of
from pdserve.router.request.answer import JSON


def refused(error: RequestError) -> Response:
    """The answer of an ordinary route that is refused."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_of(error), error.status, headers, JSON.decode())


def add_error_handlers(app: fastapi.FastAPI) -> None:
    """Errors of the ordinary routes in OpenAI's form."""

    async def on_http(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(error.status_code, f"{request.url.path}: {error.detail}")
        return Response(body, error.status_code, error.headers, media_type=JSON.decode())

    async def on_refused(request: fastapi.Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return refused(error)

    async def on_invalid(request: fastapi.Request, error: Exception) -> Response:
        return Response(error_body(400, str(error)), 400, media_type=JSON.decode())

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestError, on_refused)
    app.add_exception_handler(RequestValidationError, on_invalid)
