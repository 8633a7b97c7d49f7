"""The published OpenAPI document: FastAPI's own, and the endpoints that bypass FastAPI.

Bodies and answers of these are free-form: the router passes them on, and what is in them is described by
OpenAI, Anthropic and SGLang.
"""

from __future__ import annotations

from typing import Any

from pdserve.router.api.endpoints import ENDPOINTS, Endpoint


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
