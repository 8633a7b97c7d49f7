"""A client's body as SGLang's own serving code understands it, reduced to its prefill.

Nothing of chat templates, tools or tokenisation is ours: the body goes through the same SGLang classes as on
the decode worker, so both see the same token ids. What is changed afterwards concerns generation only: one
token, greedy, no grammar, no logprobs, since the answer is thrown away.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pydantic
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from pdserve.engine.http.cache_report import Found
from pdserve.engine.http.endpoints import CHAT, GENERATE, check_endpoint
from pdserve.errors import RequestError

# Sampling parameters that could end or constrain the single token, or make more than one sequence of it.
_GENERATION_ONLY = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "min_new_tokens",
    "custom_params",
    "logit_bias",
)

_native_body: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(GenerateReqInput)
"""As SGLang's own route reads it: types are checked, what is unknown is ignored."""


@dataclass(frozen=True)
class Prefilled:
    """What the prefill of a body did."""

    prompt_tokens: int
    found: list[Found]  # what was cached of each prompt
    cached_tokens: dict[str, int]  # by SGLang's request id


async def prefill_request(app_state: Any, endpoint: str, body: bytes, http_request: Any) -> GenerateReqInput:
    """SGLang's internal request for the prefill of `body`.

    `app_state` is SGLang's `app.state`. Raises RequestError: 400 exactly where SGLang would refuse the body,
    404 for an endpoint that has no prefill.
    """
    check_endpoint(endpoint)
    if endpoint == GENERATE:
        request = _native(body)
    else:
        request = await _openai(app_state, endpoint, body, http_request)
    request.stream = False
    request.return_logprob = False
    request.rid = None
    request.sampling_params = _reduced(request.sampling_params)
    return request


async def run_prefill(tokenizer_manager: Any, request: GenerateReqInput) -> Prefilled:
    """Compute the prompt's KV. Raises RequestError with SGLang's own message and status."""
    try:
        answers: Any = None
        async for answer in tokenizer_manager.generate_request(request, None):
            answers = answer  # not streaming: one answer, a list of them for several prompts
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    metas = [answer["meta_info"] for answer in (answers if isinstance(answers, list) else [answers])]
    for meta in metas:
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            status = int(reason.get("status_code") or 503)
            raise RequestError(
                status,
                str(reason.get("message") or "the prefill was aborted"),
                type_="invalid_request_error" if status < 500 else "server_error",
            )
    return Prefilled(
        prompt_tokens=sum(meta["prompt_tokens"] for meta in metas),
        found=[Found.of(meta.get("cached_tokens", 0), meta.get("cached_tokens_details")) for meta in metas],
        cached_tokens={meta["id"]: meta.get("cached_tokens", 0) for meta in metas},
    )


async def _openai(app_state: Any, endpoint: str, body: bytes, http_request: Any) -> GenerateReqInput:
    chat = endpoint == CHAT
    model = ChatCompletionRequest if chat else CompletionRequest
    serving = app_state.openai_serving_chat if chat else app_state.openai_serving_completion
    try:
        parsed = model.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise RequestError(400, _first_line(error)) from error
    refusal = serving._validate_request(parsed)
    if refusal:
        raise RequestError(400, refusal)
    loop = asyncio.get_running_loop()
    try:
        converted, _ = await loop.run_in_executor(
            None, serving._convert_to_internal_request, parsed, http_request
        )
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    return converted


def _native(body: bytes) -> GenerateReqInput:
    try:
        fields = json.loads(body)
        asked = _native_body.validate_python(fields)
    except pydantic.ValidationError as error:
        raise RequestError(400, f"not a /generate request: {_first_line(error)}") from error
    except ValueError as error:
        raise RequestError(400, f"not a /generate request: {error}") from error
    refusal = generate_contract_error(fields)
    if refusal:
        raise RequestError(400, f"not a /generate request: {refusal}")
    return asked


def _reduced(sampling_params: Any) -> Any:
    if isinstance(sampling_params, list):
        return [_reduced(one) for one in sampling_params]
    kept = {k: v for k, v in (sampling_params or {}).items() if k not in _GENERATION_ONLY}
    return {**kept, "max_new_tokens": 1, "n": 1, "temperature": 0.0}


def _first_line(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])
