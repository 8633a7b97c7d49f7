"""A client's body as SGLang's own serving code understands it, reduced to its prefill.

Chat templates, tools and tokenisation are SGLang's: the body goes through the same classes as on the decode
worker, so both see the same token ids. Afterwards only the generation is changed: one token, no grammar, no
logprobs. The token is sampled as the client asks: it may be the first one of the answer (`first_tokens.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from dataclasses import dataclass
from typing import Any, Final

import pydantic
from fastapi import HTTPException
from jinja2 import TemplateError
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.api_contract import generate_contract_error
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from pdserve.engine.contract.endpoints import (
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PREFILL_PATHS,
    RESPONSES,
    check_endpoint,
)
from pdserve.engine.http.cache_report import Found
from pdserve.engine.http.request_context import Bootstrap, salt_of_request
from pdserve.engine.sglang.answers import found_of
from pdserve.engine.sglang.children.fetches import PULL_ID
from pdserve.engine.sglang.children.scheduler import POOL_ROOM
from pdserve.engine.sglang.exact_turns import SglangTurns
from pdserve.engine.sglang.first_tokens import sampled
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

FOR_THE_POOL: Final = Bootstrap(FAKE_BOOTSTRAP_HOST, None, POOL_ROOM)
"""Of prefills that SGLang's prefill mode sends to nobody. Its ordinary mode would keep no pages of them."""

_native_body: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(GenerateReqInput)
"""As SGLang's own route reads it: types are checked, unknown fields are ignored."""


@dataclass(frozen=True)
class Prefilled:
    """The outcome of a body's prefill."""

    prompt_tokens: int
    found: list[Found]  # what was cached of each prompt
    cached_tokens: dict[str, int]  # by SGLang's request id
    token: int | None = None  # that was sampled behind the prompt, where that is one


async def prefill_request(
    app_state: Any, endpoint: str, body: bytes, http_request: Any, *, is_direct: bool = False
) -> GenerateReqInput:
    """SGLang's internal request for the prefill of `body`.

    `app_state` is SGLang's `app.state`. `is_direct`: a decode worker goes on from the token that is sampled
    here, so it is sampled as the client asks. Raises RequestError: 400 exactly where SGLang would refuse the
    body, 404 for an endpoint that has no prefill.
    """
    check_endpoint(endpoint, PREFILL_PATHS)
    if endpoint == GENERATE:
        request = _native(body)
    elif endpoint == RESPONSES:
        request = await _of_responses(app_state, body)
    else:
        request = await _openai(app_state, endpoint, body, http_request)
    request.stream = False
    request.rid = None
    if not is_direct:
        request.return_logprob = False
        request.sampling_params = _reduced(request.sampling_params)
    request.cache_salt = salt_of_request() or request.cache_salt
    return request


async def run_prefill(tokenizer_manager: Any, request: GenerateReqInput) -> Prefilled:
    """Compute the prompt's KV. Raises RequestError with SGLang's own message and status."""
    try:
        answers: Any = None
        async for answer in tokenizer_manager.generate_request(request, None):
            answers = answer  # not streaming: one answer, a list of them for several prompts
    except ValueError as error:
        raise RequestError(400, str(error)) from error
    each = answers if isinstance(answers, list) else [answers]
    metas = [answer["meta_info"] for answer in each]
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
        found=[found_of(meta.get("cached_tokens", 0), meta.get("cached_tokens_details")) for meta in metas],
        cached_tokens={meta["id"]: meta.get("cached_tokens", 0) for meta in metas},
        token=sampled(each[0].get("output_ids"), metas[0].get("finish_reason")) if len(each) == 1 else None,
    )


async def prompt_tokens(
    tokenizer_manager: Any, request: GenerateReqInput, turns: SglangTurns | None = None
) -> list[int]:
    """The prompt's tokens as SGLang will make them; empty where its pages cannot be named from that alone, or
    where it is not known which of several host memories the request will look into. `turns`: gives prompts
    the tokens that they had before.
    """
    if tokenizer_manager.server_args.dp_size > 1:
        return []
    return await named_tokens(tokenizer_manager, request, turns)


async def named_tokens(
    tokenizer_manager: Any, request: GenerateReqInput, turns: SglangTurns | None = None
) -> list[int]:
    """As `prompt_tokens`, whichever host memory the request will look into."""
    if request.contains_mm_input() or request.lora_path or request.input_embeds is not None:
        return []
    if turns is not None:
        await turns.begin(request, None, is_counted=False)
    ids = request.input_ids
    if ids is None and isinstance(request.text, str):
        ids, _ = await tokenizer_manager._tokenize_texts(request.text)
    if not ids or not isinstance(ids[0], int):
        return []  # several prompts
    return list(ids)


async def fetch_pages(tokenizer_manager: Any, tokens: list[int], like: GenerateReqInput) -> None:
    """Have SGLang fetch the pages of `tokens` from the pool into its host memory (`pulls_ended`): all but the
    last token, which SGLang never looks up. `like`: the request whose pages they are.
    """
    pull = GenerateReqInput(
        input_ids=tokens,
        sampling_params={"max_new_tokens": 1},
        rid=PULL_ID + uuid.uuid4().hex,
        extra_key=like.extra_key,
        cache_salt=like.cache_salt,
    )
    with contextlib.suppress(ValueError, HTTPException):  # how SGLang reports an end like this one's
        async for _ in tokenizer_manager.generate_request(pull, None):
            pass


async def _openai(app_state: Any, endpoint: str, body: bytes, http_request: Any) -> GenerateReqInput:
    serving = (
        app_state.openai_serving_completion if endpoint == COMPLETIONS else app_state.openai_serving_chat
    )
    try:
        if endpoint == MESSAGES:
            messages = AnthropicMessagesRequest.model_validate_json(body)
            parsed: Any = app_state.anthropic_serving._convert_to_chat_completion_request(messages)
        elif endpoint == COMPLETIONS:
            parsed = CompletionRequest.model_validate_json(body)
        else:
            parsed = ChatCompletionRequest.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise RequestError(400, _first_line(error)) from error
    except ValueError as error:
        raise RequestError(400, str(error)) from error
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


async def _of_responses(app_state: Any, body: bytes) -> GenerateReqInput:
    """What a response continues is at one worker, which computes it itself."""
    serving = getattr(app_state, "openai_serving_responses", None)
    try:
        parsed = ResponsesRequest.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise RequestError(400, _first_line(error)) from error
    if serving is None or parsed.previous_response_id is not None:
        raise RequestError(400, "The prompt of this response cannot be computed alone.")
    made: Any = None
    try:
        if serving.use_harmony:
            _, _, [prompt] = serving._make_request_with_harmony(parsed, None)
        else:
            tokenizer = serving.tokenizer_manager.tokenizer
            _, _, [prompt], made = await serving._make_request(parsed, None, tokenizer)
    except (ValueError, TypeError, RuntimeError, TemplateError) as error:  # as SGLang's own route
        raise RequestError(400, str(error)) from error
    media = ("image_data", "video_data", "audio_data", "modalities")
    return GenerateReqInput(
        **{"text" if isinstance(prompt, str) else "input_ids": prompt},
        **({} if made is None else {name: getattr(made, name) for name in media}),
        sampling_params={},
        extra_key=parsed.extra_key,
        cache_salt=parsed.cache_salt,
    )


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
    return {**kept, "max_new_tokens": 1, "n": 1}


def _first_line(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])
