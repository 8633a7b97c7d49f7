"""Requests and answers of SGLang's routes, as JSON schemas for the router's published document.

`python -m tests.support.openapi` writes them from the SGLang that is installed. tests/engine/test_openapi.py
checks them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "pdserve" / "router" / "api" / "sglang_schemas.json"
ASKED = (
    "ChatCompletionRequest",
    "CompletionRequest",
    "EmbeddingRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
    "ClassifyRequest",
    "V1RerankReqInput",
    "ScoringRequest",
    "ResponsesRequest",
)
ASKED_BY_ANTHROPIC = ("AnthropicMessagesRequest", "AnthropicCountTokensRequest")
SAID = (
    "ChatCompletionResponse",
    "CompletionResponse",
    "EmbeddingResponse",
    "TokenizeResponse",
    "DetokenizeResponse",
    "ClassifyResponse",
    "RerankResponse",
    "ScoringResponse",
    "ResponsesResponse",
    "TranscriptionResponse",
)
SAID_TO_ANTHROPIC = ("AnthropicMessagesResponse", "AnthropicCountTokensResponse")
TEMPLATE = "#/components/schemas/{model}"
GRAMMAR = {"StructuralTag": {"type": "object", "description": "As xgrammar defines it."}}
"""Written out they are half of the document, and no part of SGLang."""


def schemas() -> dict[str, Any]:
    """JSON schemas by name, references among them as in an OpenAPI document."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import models_json_schema
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import GenerateReqInput

    models: list[Any] = [(getattr(protocol, name), "validation") for name in ASKED]
    models += [(getattr(anthropic, name), "validation") for name in ASKED_BY_ANTHROPIC]
    models += [(getattr(protocol, name), "serialization") for name in SAID]
    models += [(getattr(anthropic, name), "serialization") for name in SAID_TO_ANTHROPIC]
    _, openai = models_json_schema(models, ref_template=TEMPLATE)
    generate = TypeAdapter(GenerateReqInput).json_schema(ref_template=TEMPLATE)
    found = {**openai["$defs"], **generate.pop("$defs", {}), "GenerateReqInput": generate, **GRAMMAR}
    wanted: set[str] = set()
    todo = ["GenerateReqInput", *ASKED, *ASKED_BY_ANTHROPIC, *SAID, *SAID_TO_ANTHROPIC]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += _references(found[name])
    return {name: _without_titles(found[name]) for name in sorted(wanted)}


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
        return own + [name for value in schema.values() for name in _references(value)]
    return [name for value in schema for name in _references(value)] if isinstance(schema, list) else []


def _without_titles(schema: Any) -> Any:
    """Titles repeat the names."""
    if isinstance(schema, dict):
        return {k: _without_titles(v) for k, v in schema.items() if k != "title" or not isinstance(v, str)}
    return [_without_titles(value) for value in schema] if isinstance(schema, list) else schema


def text() -> str:
    """One schema a line."""
    rows = [f"{json.dumps(name)}: {json.dumps(schema, sort_keys=True)}" for name, schema in schemas().items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    SCHEMAS.write_text(text())
