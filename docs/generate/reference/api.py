"""docs/reference/api.md, from the OpenAPI document that the router publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from docs.generate.markdown import table
from docs.generate.product import openapi_document

HEAD = """# HTTP API

This page shows the OpenAPI document of the router. A running router serves it at `/openapi.json`, and as a
page at `/docs`.

- The OpenAI endpoints and the SGLang endpoints take and give what SGLang takes and gives. The router passes
  their bodies on, and the schemas below are SGLang's own.
- With API keys every request needs `Authorization: Bearer KEY`. `/health`, `/ready` and this document do not.
- Errors have OpenAI's form: `{"error": {"message", "type", "param", "code"}}`.
- The admin API has a port and a key of its own: see [Tenants](../tenants.md#admin-api).
"""
REF = "#/components/schemas/"


def page() -> str:
    """The whole page."""
    document = openapi_document()
    paths: dict[str, Any] = document["paths"]
    by_tag: dict[str, list[tuple[str, str, Any]]] = {}
    for path, operations in paths.items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    parts = [HEAD]
    for tag, operations in by_tag.items():
        parts.append(f"## Endpoints: {tag}\n")
        for method, path, operation in operations:
            parts += _operation(method, path, operation)
    parts.append("## Schemas\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += _schema(name, schema)
    return "\n".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`\n"
    said = operation.get("description") or operation.get("summary", "")
    yield f"{said}\n"
    body = operation.get("requestBody")
    if body:
        [(_, content)] = body["content"].items()
        yield f"Body: {_type(content['schema'])}\n"
    yield table(("status", "meaning", "body"), map(_response, sorted(operation["responses"].items())))
    headers = operation["responses"].get("200", {}).get("headers", {})
    if headers:
        yield table(
            ("header", "meaning"), ((f"`{name}`", one["description"]) for name, one in headers.items())
        )


def _response(item: tuple[str, Mapping[str, Any]]) -> tuple[str, str, str]:
    status, response = item
    bodies = [
        f"`{kind}`: {_type(content['schema'])}" if content.get("schema") else f"`{kind}`"
        for kind, content in response.get("content", {}).items()
    ]
    return status, response["description"], ", ".join(bodies)


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {name} {{ #schema-{name.lower()} }}\n"
    if schema.get("description"):
        yield " ".join(schema["description"].split()) + "\n"
    properties: dict[str, Any] = schema.get("properties", {})
    if not properties:
        yield f"{_type(schema)}\n"
        return
    required = schema.get("required", ())
    rows = [
        (
            f"`{field}`",
            _type(one),
            "required" if field in required else _default(one),
            _escaped(str(one.get("description", ""))),
        )
        for field, one in properties.items()
    ]
    yield table(("field", "type", "default", "meaning"), rows)


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema or schema["default"] is None:
        return ""
    return f"`{json.dumps(schema['default'])}`"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("{", "&#123;")


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in words, with links to the named ones."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REF)
        return f"[{name}](#schema-{name.lower()})"
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            found = [_type(one) for one in schema[choice] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(found))
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(one for one in kind if one != "null")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    return str(kind)
