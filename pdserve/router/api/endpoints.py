"""The endpoints that are passed on to workers, paths as clients write them, ids of stored responses.

The endpoints that workers answer: one row each. A new endpoint is a new row here, and its tests.

The rest of the router asks the row and compares no paths. `api/sglang_schemas.json` holds the schemas that a
row names; tests/support/openapi.py makes that file.

Paths as clients make them of a base URL: what they mean, and what they should have been. Pure.

Slashes that stand twice or at the end change nothing: `/v1//chat/completions/` is served. A `/v1` that is
missing or doubled is a mistake in a client's base URL, and the answer (404) names the path that was meant.

Ids of responses that a worker stores in its own memory.

Only the worker that made one can go on with it. So the router chooses the id, and any router can
read the worker from it:

    resp_ WORKER TENANT RANDOM         12, 8 and 24 hexadecimal digits

WORKER and TENANT are digests of the worker's id and of the tenant's name. RANDOM cannot be guessed. An id is
not found by another tenant, nor when its worker has left.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

from pdserve.router.api.errors import ErrorForm

Task = Literal["generate", "embed", "any"]


class Usage(msgspec.Struct, frozen=True):
    """How the bytes of an answer say how many tokens it used."""

    mark: bytes
    """Bytes in each piece that says the output's tokens."""
    prompt: re.Pattern[bytes]
    output: re.Pattern[bytes]
    prompt_mark: bytes = b""
    """With which `prompt` begins, where an answer says it once for each prompt. Empty: it is a sum."""
    is_list: bool = False
    """The prompt's group may be numbers with commas between them. A part of such an answer can lack some."""


def usage_under(prompt: str, output: str) -> Usage:
    """The usage in JSON members of these names."""
    number = r'"%s":\s*(\d{1,15})\b'
    return Usage(
        b'"%b":' % output.encode(),
        re.compile((number % prompt).encode()),
        re.compile((number % output).encode()),
        b'"%b":' % prompt.encode(),
    )


OPENAI_USAGE: Final = usage_under("prompt_tokens", "completion_tokens")
"""OpenAI's `usage` and SGLang's `meta_info` use the same two names."""
_ANTHROPIC_USAGE: Final = Usage(
    b'"output_tokens":',
    re.compile(rb'"(?:cache_(?:read|creation)_)?input_tokens":\s*(\d{1,15})\b'),
    re.compile(rb'"output_tokens":\s*(\d{1,15})\b'),
)
"""Anthropic's `input_tokens` count neither what was read of caches nor what was stored there."""
_COUNTED: Final = Usage(
    b'"input_tokens":', re.compile(rb'"input_tokens":\s*(\d{1,15})\b'), re.compile(rb"(?!)")
)
_TOKENIZED: Final = Usage(
    b'"count":', re.compile(rb'"count":\s*\[?([\d,\s]+)'), re.compile(rb"(?!)"), is_list=True
)
"""`/tokenize` says how many tokens a text has, or each text of a list. It has no output."""

_LOOKED_UP: Final = Usage(
    b'"prompt_tokens":', re.compile(rb'"prompt_tokens":\s*(\d{1,15})\b'), re.compile(rb"(?!)")
)
"""A lookup makes tokens of a prompt, and computes none."""


AUDIO_BYTES_PER_TOKEN: Final = 640
"""Of uncompressed speech: 32 kB and 50 tokens a second."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the router knows of one endpoint."""

    path: str
    summary: str
    target: bytes = b""
    """`path` as it stands in a request."""
    prefill_target: bytes = b""
    """That of a prefill worker for it."""
    task: Task | None = None
    """What a model must be able to do. `any`: the worker says whether it can. None: every model can, and the
    request computes no prompt.
    """
    prompt_fields: tuple[str, ...] = ()
    """Body members, all of them fields of `RequestView`. SGLang (0.5.23) takes the prompt from the first one
    that is given, and ignores the members of other endpoints.
    """
    preamble_fields: tuple[str, ...] = ()
    """Members whose text stands before the prompt."""
    charged_fields: tuple[str, ...] = ()
    """Members that cost a tenant as much as a prompt, where there is none: a worker tokenizes them."""
    sampling_field: str = ""
    """Body member that holds the sampling parameters. Empty: they stand in the body itself."""
    usage: Usage = OPENAI_USAGE
    """How tokens are counted: as the answer says in this way, else by estimate and by events."""
    streams: bool = False
    """The answer can be a stream of server-sent events."""
    takes_priority: bool = False
    """SGLang takes `priority` in the body."""
    salt: Literal["", "body", "header"] = ""
    """How tenants' caches are kept apart: `cache_salt` in the body, where SGLang takes it there, else in a
    header for pdserve's worker. Empty: the request leaves no pages behind.
    """
    stored_as: str = ""
    """Body member with the id under which the worker stores the answer; the router sets it."""
    continues: str = ""
    """Body member, a field of `RequestView`, with the id of an answer that the request continues."""
    errors: ErrorForm = "openai"
    """The form in which clients of this endpoint expect errors."""
    is_hint: bool = False
    """The request says what caches are to do with its prompt (`kv_hints`). Tenants need a right for it."""
    is_form: bool = False
    """The body is a form (`form_body`), and no JSON."""
    bytes_per_token: int = 0
    """Of a body whose prompt is no text: what a tenant is charged until its use is known."""
    is_resumable: bool = False
    """Another worker can continue a lost stream (`/pd/continue`)."""
    is_prefillable: bool = False
    """A prefill worker can compute the prompt (`/pd/prefill`)."""

    is_usual: bool = False
    """Its requests are understood by their prompt alone, where nothing else is said."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "target", self.path.encode("ascii"))
        prefill_target = b"/pd/prefill?endpoint=" + self.target
        msgspec.structs.force_setattr(self, "prefill_target", prefill_target)
        is_usual = self.is_resumable and self.task == "generate" and not self.preamble_fields
        msgspec.structs.force_setattr(self, "is_usual", is_usual)


_TOKENIZE: Final = Endpoint(
    path="/tokenize",
    summary="Text to token ids",
    charged_fields=("prompt", "messages"),
    usage=_TOKENIZED,
)
_DETOKENIZE: Final = Endpoint(
    path="/detokenize",
    summary="Token ids to text",
)
_MESSAGES: Final = Endpoint(
    path="/v1/messages",
    summary="Anthropic's chat",
    task="generate",
    prompt_fields=("messages",),
    preamble_fields=("system",),
    usage=_ANTHROPIC_USAGE,
    streams=True,
    salt="header",
    errors="anthropic",
    is_resumable=True,
    is_prefillable=True,
)
_LOOKUP: Final = Endpoint(
    path="/v1/kv/lookup",
    summary="How much of a prompt the KV pool has",
    charged_fields=("prompt", "text", "input_ids", "messages"),
    usage=_LOOKED_UP,
    salt="header",
)
_ROWS: Final = (
    Endpoint(
        path="/v1/chat/completions",
        summary="Chat",
        task="generate",
        prompt_fields=("input_ids", "messages"),
        streams=True,
        salt="body",
        is_resumable=True,
        is_prefillable=True,
        takes_priority=True,
    ),
    Endpoint(
        path="/v1/completions",
        summary="Completion",
        task="generate",
        prompt_fields=("prompt",),
        streams=True,
        salt="body",
        is_resumable=True,
        is_prefillable=True,
        takes_priority=True,
    ),
    Endpoint(
        path="/v1/embeddings",
        summary="Embeddings, of models that make them",
        task="embed",
        prompt_fields=("input",),
        salt="header",
        takes_priority=True,
    ),
    Endpoint(
        path="/generate",
        summary="SGLang's own completion",
        task="generate",
        prompt_fields=("text", "input_ids"),
        sampling_field="sampling_params",
        streams=True,
        salt="body",
        is_resumable=True,
        is_prefillable=True,
        takes_priority=True,
    ),
    _MESSAGES,
    Endpoint(
        path="/v1/messages/count_tokens",
        summary="Tokens of Anthropic's chat",
        charged_fields=("messages",),
        preamble_fields=("system",),
        usage=_COUNTED,
        errors="anthropic",
    ),
    Endpoint(
        path="/v1/responses",
        summary="OpenAI's responses",
        task="generate",
        prompt_fields=("input",),
        preamble_fields=("instructions",),
        usage=usage_under("input_tokens", "output_tokens"),
        errors="responses",
        streams=True,
        salt="body",
        is_prefillable=True,
        stored_as="request_id",
        continues="previous_response_id",
        takes_priority=True,
    ),
    Endpoint(
        path="/v1/classify",
        summary="Classification, of models that make it",
        task="embed",
        prompt_fields=("input",),
        salt="header",
        takes_priority=True,
    ),
    Endpoint(
        path="/v1/rerank",
        summary="Documents in order of their relevance",
        task="any",
        prompt_fields=("documents",),
        salt="header",
    ),
    Endpoint(
        path="/v1/score",
        summary="Probabilities of label tokens after each item",
        task="any",
        prompt_fields=("items",),
        salt="header",
    ),
    _LOOKUP,
    replace(
        _LOOKUP,
        path="/v1/kv/hints",
        summary="Bring a prompt's KV up, keep it, or let it go",
        is_hint=True,
    ),
    Endpoint(
        path="/v1/audio/transcriptions",
        summary="What is said in a sound, of models that hear",
        task="any",
        prompt_fields=("audio_data",),
        streams=True,
        salt="header",
        is_form=True,
        bytes_per_token=AUDIO_BYTES_PER_TOKEN,
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


_SLASHES = re.compile(r"/{2,}")
MAX_SHOWN_CHARS = 200


def fold(path: str) -> str:
    """`path` with single slashes, and none at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def similar(path: str, known: Iterable[str]) -> str | None:
    """The known path that `path` was probably meant to be: the same but for `/v1`, or with more before it."""
    asked = _without_version(path)
    found = [each for each in known if _without_version(each) == asked]
    if not found:
        found = [each for each in known if each.count("/") > 1 and asked.endswith(_without_version(each))]
    return max(found, key=len, default=None)


def not_found(method: str, path: str, known: Iterable[str]) -> str:
    """What a client is told of a path that there is not."""
    meant = similar(path, known)
    return f"{method} {path[:MAX_SHOWN_CHARS]}: Not Found" + (f"; did you mean {meant}?" if meant else "")


def _without_version(path: str) -> str:
    return "".join(f"/{part}" for part in path.split("/") if part not in ("", "v1"))


_PREFIX: Final = "resp_"
_WORKER_DIGITS: Final = 12
_TENANT_DIGITS: Final = 8
_RANDOM_DIGITS: Final = 24
_DIGITS: Final = re.compile(f"[0-9a-f]{{{_WORKER_DIGITS + _TENANT_DIGITS + _RANDOM_DIGITS}}}")


def new_id(worker_id: str, tenant: str) -> str:
    """An id of a response that the worker will store for the tenant."""
    random = secrets.token_hex(_RANDOM_DIGITS // 2)
    return _PREFIX + _digits(worker_id, _WORKER_DIGITS) + _digits(tenant, _TENANT_DIGITS) + random


def find_holder(id_: str, worker_ids: Iterable[str], tenant: str) -> str | None:
    """The id of the worker that holds it. None: it is no such id, another tenant's, or its worker left."""
    digits = id_.removeprefix(_PREFIX)
    if digits == id_ or not _DIGITS.fullmatch(digits):
        return None
    if digits[_WORKER_DIGITS:][:_TENANT_DIGITS] != _digits(tenant, _TENANT_DIGITS):
        return None
    worker = digits[:_WORKER_DIGITS]
    return next((one for one in worker_ids if _digits(one, _WORKER_DIGITS) == worker), None)


def _digits(name: str, count: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=count // 2).hexdigest()
