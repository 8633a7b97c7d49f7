"""Errors of FastAPI routes in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import ENDPOINTS, MAX_SHOWN_CHARS, not_found, similar
from pdserve.router.api.errors import ErrorForm, error_body, error_headers, error_of
from pdserve.router.request.request import JSON

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
