"""The endpoints that workers answer: one row each. A new endpoint is a new row here, and its tests.

The rest of the router asks the row and compares no paths. `api/sglang_schemas.json` holds the schemas that a
row names; tests/support/openapi.py makes that file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

Task = Literal["generate", "embed"]


class Usage(msgspec.Struct, frozen=True):
    """How the bytes of an answer say how many tokens it used."""

    mark: bytes
    """Bytes in each piece that says the output's tokens."""
    prompt: re.Pattern[bytes]
    output: re.Pattern[bytes]
    is_list: bool = False
    """The prompt's group may be numbers with commas between them. A part of such an answer can lack some."""


def usage_under(prompt: str, output: str) -> Usage:
    """The usage in JSON members of these names."""
    number = r'"%s":\s*(\d{1,15})\b'
    return Usage(
        b'"%b":' % output.encode(),
        re.compile((number % prompt).encode()),
        re.compile((number % output).encode()),
    )


OPENAI_USAGE: Final = usage_under("prompt_tokens", "completion_tokens")
"""OpenAI's `usage` and SGLang's `meta_info` use the same two names."""
_TOKENIZED: Final = Usage(b'"count":', re.compile(rb'"count":\s*\[?([\d,\s]+)'), re.compile(rb"(?!)"), True)
"""`/tokenize` says how many tokens a text has, or each text of a list. It has no output."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the router knows of one endpoint."""

    path: str
    summary: str
    request_schema: str
    response_schema: str
    task: Task | None = None
    """What a model must be able to do. None: every model can, and the request computes no prompt."""
    prompt_fields: tuple[str, ...] = ()
    """Body members, all of them fields of `RequestView`. SGLang (0.5.23) takes the prompt from the first one
    that is given, and ignores the members of other endpoints.
    """
    text_fields: tuple[str, ...] = ()
    """Those of `prompt_fields` whose text a worker tokenizes whole, and refuses if it is too long."""
    charged_fields: tuple[str, ...] = ()
    """Members that cost a tenant as much as a prompt, where there is none: a worker tokenizes them."""
    sampling_field: str = ""
    """Body member that holds the sampling parameters. Empty: they stand in the body itself."""
    usage: Usage = OPENAI_USAGE
    """How tokens are counted: as the answer says in this way, else by estimate and by events."""
    streams: bool = False
    """The answer can be a stream of server-sent events."""
    is_salted: bool = False
    """The worker takes a `cache_salt`, so tenants can be kept apart."""
    is_resumable: bool = False
    """Another worker can continue a lost stream (`/pd/continue`)."""
    is_prefillable: bool = False
    """A prefill worker can compute the prompt (`/pd/prefill`)."""


_TOKENIZE: Final = Endpoint(
    path="/tokenize",
    summary="Text to token ids",
    request_schema="TokenizeRequest",
    response_schema="TokenizeResponse",
    charged_fields=("prompt", "messages"),
    usage=_TOKENIZED,
)
_DETOKENIZE: Final = Endpoint(
    path="/detokenize",
    summary="Token ids to text",
    request_schema="DetokenizeRequest",
    response_schema="DetokenizeResponse",
)
_ROWS: Final = (
    Endpoint(
        path="/v1/chat/completions",
        summary="Chat",
        request_schema="ChatCompletionRequest",
        response_schema="ChatCompletionResponse",
        task="generate",
        prompt_fields=("input_ids", "messages"),
        streams=True,
        is_salted=True,
        is_resumable=True,
        is_prefillable=True,
    ),
    Endpoint(
        path="/v1/completions",
        summary="Completion",
        request_schema="CompletionRequest",
        response_schema="CompletionResponse",
        task="generate",
        prompt_fields=("prompt",),
        text_fields=("prompt",),
        streams=True,
        is_salted=True,
        is_resumable=True,
        is_prefillable=True,
    ),
    Endpoint(
        path="/v1/embeddings",
        summary="Embeddings, of models that make them",
        request_schema="EmbeddingRequest",
        response_schema="EmbeddingResponse",
        task="embed",
        prompt_fields=("input",),
        text_fields=("input",),
    ),
    Endpoint(
        path="/generate",
        summary="SGLang's own completion",
        request_schema="GenerateReqInput",
        response_schema="Generated",
        task="generate",
        prompt_fields=("text", "input_ids"),
        text_fields=("text",),
        sampling_field="sampling_params",
        streams=True,
        is_salted=True,
        is_resumable=True,
        is_prefillable=True,
    ),
    _TOKENIZE,
    replace(_TOKENIZE, path="/v1/tokenize"),
    _DETOKENIZE,
    replace(_DETOKENIZE, path="/v1/detokenize"),
)
ENDPOINTS: Final = {row.path: row for row in _ROWS}
PREFILLABLE: Final = tuple(row.path for row in _ROWS if row.is_prefillable)

if TYPE_CHECKING:
    PrefillPath = str
else:
    PrefillPath = Literal[PREFILLABLE]
"""Type of a path in `prefill_endpoints`: the configuration accepts only those of `PREFILLABLE`."""
