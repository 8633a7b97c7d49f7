"""The published OpenAPI document: FastAPI's own, with the endpoints that bypass FastAPI and the real errors.

`sglang_schemas.json` holds the schemas of SGLang's routes; tests/support/openapi.py makes it from SGLang's
own models. The router passes bodies on and does not check them against the document.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from pdserve.router.api.endpoints import ENDPOINTS, Endpoint
from pdserve.router.api.errors import ErrorForm

_REF = "#/components/schemas/"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_GENERATED = {
    "type": "object",
    "required": ["meta_info"],
    "properties": {
        "text": {"type": "string"},
        "output_ids": {"type": "array", "items": {"type": "integer"}},
        "meta_info": {"type": "object"},
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OWN = frozenset({"KvLookup", "KvPrefetch"})
"""Bodies that SGLang does not know."""
_LOOKUP_FIELDS: dict[str, Any] = {
    "model": {"type": ["string", "null"]},
    "messages": {"type": "array", "items": {"type": "object"}, "description": "As of a chat."},
    "prompt": {"type": "string", "description": "As of a completion."},
    "text": {"type": "string"},
    "input_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "hashes": {
        "type": "array",
        "items": {"type": "string"},
        "description": "Names of pages from the first on, 64 hexadecimal digits each.",
    },
    "nodes": {"type": "boolean", "description": "Count by node too."},
    "cache_salt": {"type": ["string", "null"]},
}
_LOOKUP = {"type": "object", "properties": _LOOKUP_FIELDS}
_FOUND = {
    "type": "object",
    "required": ["page_tokens", "prompt_tokens", "prompt_pages", "tokens", "memory_tokens", "tiers"],
    "properties": {
        **{
            name: {"type": "integer"}
            for name in ("page_tokens", "prompt_tokens", "prompt_pages", "tokens", "memory_tokens")
        },
        "tiers": {"type": "object", "additionalProperties": {"type": "integer"}},
        "nodes": {"type": "object"},
    },
}
_PREFETCH = {
    "type": "object",
    "properties": {
        **_LOOKUP_FIELDS,
        "to": {
            "type": "string",
            "enum": ["worker", "pool"],
            "default": "worker",
            "description": "Up to host memory of the session's worker, or to memory of the pool's nodes.",
        },
    },
}
_PREFETCHED = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "tokens", "prefetched_tokens")},
}
_DEMOTED = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "parts")},
}
_TRANSCRIPTION_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        **{
            name: {"type": "string"}
            for name in ("model", "language", "response_format", "temperature", "stream")
        },
    },
}
"""SGLang's form has no model of its own."""
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "JSON, in the end `[DONE]`."}},
}
"""One server-sent event."""
_ERRORS = {
    400: "The request is not valid, or the model cannot do it.",
    401: "No API key that is known.",
    403: "The tenant may not do this.",
    404: "There is no such model, or nothing of this id.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is in a content coding that is not taken; see `Accept-Encoding`.",
    422: "The worker finds the request not valid.",
    429: "The tenant is over a limit, or the server is busy; see `Retry-After`.",
    500: "A fault inside the server.",
    502: "The worker broke off.",
    503: "No worker is ready; see `Retry-After`.",
    504: "A deadline has passed.",
}
_HEADERS = {
    "x-request-id": "The request's id: the client's own, or a new one.",
    "x-pdserve-plan": "Who was chosen, and why.",
    "x-pdserve-prefill": "The prefill worker.",
    "x-pdserve-prefill-cached": "Prompt tokens that it had not to compute, by place.",
    "x-pdserve-miss": "Prompt tokens of full pages that it computed, by what became of them in the pool.",
    "x-pdserve-decode": "The worker that answered.",
    "x-pdserve-cached": "Prompt tokens that it had not to compute, by place.",
}


def complete(document: dict[str, Any], choices: int) -> dict[str, Any]:
    """FastAPI's document of the ordinary routes, completed. `choices`: most answers to a prompt."""
    components = document.setdefault("components", {})
    schemas = json.loads(files("pdserve.router.api").joinpath("sglang_schemas.json").read_text("utf-8"))
    # the router also reads a model name there, to choose among several
    schemas["GenerateReqInput"]["properties"]["model"] = {"type": ["string", "null"], "default": None}
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        fields["n"]["maximum"] = choices
        if "best_of" in fields:
            fields["best_of"] = {"type": ["integer", "null"], "maximum": choices, "default": None}
    one = {"$ref": f"{_REF}GeneratedOne"}
    schemas |= {
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "Reranked": {"type": "array", "items": {"$ref": f"{_REF}RerankResponse"}},
        "GeneratedOne": _GENERATED,
        "KvLookup": _LOOKUP,
        "KvFound": _FOUND,
        "KvPrefetch": _PREFETCH,
        "KvPrefetched": _PREFETCHED,
        "KvDemoted": _DEMOTED,
        "TranscriptionForm": _TRANSCRIPTION_FORM,
        "Generated": {"anyOf": [one, {"type": "array", "items": one}]},
    }
    components["schemas"] = schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own: here it would be 400
            for status in (401, 500, 404) if "{" in path else (401, 500):
                operation["responses"].setdefault(str(status), error_answer(status))
    document["paths"] |= {row.path: {"post": _operation(row)} for row in ENDPOINTS.values()}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["security"] = [{}, {"key": []}]  # a key where the router was given keys
    return document


def _operation(row: Endpoint) -> dict[str, Any]:
    path = row.path
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + row.response_schema}}}
    if row.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    form = "multipart/form-data" if row.is_form else "application/json"
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.items()}
    who = "a worker" if row.request_schema in _OWN else "SGLang"
    answered = {"description": f"As {who} answers{', a stream too' if row.streams else ''}."}
    return {
        "tags": [_tag(row)],
        "summary": f"{row.summary}.",
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {"required": True, "content": {form: {"schema": {"$ref": _REF + row.request_schema}}}},
        "responses": {"200": answered | {"headers": headers, "content": content}}
        | {str(status): error_answer(status, row.errors) for status in _ERRORS if status != 403 or row.hint},
    }


def _tag(row: Endpoint) -> str:
    if row.errors == "anthropic":
        return "Anthropic"
    if row.request_schema in _OWN:
        return "operations"
    return "OpenAI" if row.path.startswith("/v1/") and "token" not in row.path else "SGLang"


def error_answer(status: int, form: ErrorForm = "openai") -> dict[str, Any]:
    """What the document says of an error's answer."""
    name = "AnthropicError" if form == "anthropic" else "Error"
    schema = {"application/json": {"schema": {"$ref": _REF + name}}}
    return {"description": _ERRORS[status], "content": schema}
