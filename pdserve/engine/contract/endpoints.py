"""The paths of a worker; the table of each, and `judge`, which holds a body against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from pdserve.engine.contract import conversations as talk
from pdserve.engine.contract.conversations import IGNORED, MAX_TEXT, Abilities
from pdserve.engine.contract.grammars import json_schema, response_format
from pdserve.engine.contract.sampling import LARGEST, OPENAI, SAMPLING_PARAMS, stop
from pdserve.engine.contract.values import (
    DROP,
    Rule,
    an_object,
    anything,
    boolean,
    choice,
    fields,
    integer,
    judged,
    kind,
    list_of,
    number,
    one_of,
    refused,
    text,
)
from pdserve.errors import RequestError

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
RESPONSES: Final = "/v1/responses"
GENERATE: Final = "/generate"
SCORE: Final = "/v1/score"
RERANK: Final = "/v1/rerank"
EMBEDDINGS: Final = "/v1/embeddings"
PREFILL: Final = "/pd/prefill"
CONTINUE: Final = "/pd/continue"

PROMPT_PATHS: Final = (CHAT, COMPLETIONS, GENERATE, MESSAGES)
"""SGLang's own paths that generate from a prompt."""
PREFILL_PATHS: Final = (*PROMPT_PATHS, RESPONSES)
"""Those whose prompts can be computed alone, by `/pd/prefill` and `/pd/pull`."""
GENERATING_PATHS: Final = frozenset({*PREFILL_PATHS, SCORE, RERANK, PREFILL, CONTINUE})
"""Paths whose requests are tracked."""

BOM: Final = b"\xef\xbb\xbf"
MAX_INPUTS: Final = 2048
MAX_IGNORED: Final = 20
RESERVED_KWARGS: Final = frozenset(
    {"messages", "tools", "conversation", "tokenize", "chat_template", "return_dict"}
)
"""Of `chat_template_kwargs`: SGLang passes them itself, so they are errors of Python's there."""
INCLUDES: Final = frozenset(
    {
        *(
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
        ),
        *("message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content"),
    }
)
SERVICE_TIERS: Final = frozenset({"auto", "default", "flex", "scale", "priority"})


def check_endpoint(endpoint: str, paths: Sequence[str] = PROMPT_PATHS) -> None:
    """Raises RequestError (404) unless `endpoint` is one of `paths`."""
    if endpoint not in paths:
        known = ", ".join(paths)
        raise RequestError(404, f"endpoint must be one of {known}, not {endpoint[:200]!r}")


@dataclass
class Judgement:
    """A body that may go on."""

    body: bytes
    ignored: list[str] = field(default_factory=list)
    """Members that have no effect here."""


class Contract:
    """What one worker takes."""

    def __init__(
        self,
        abilities: Abilities | None = None,
        known: Mapping[str, frozenset[str]] | None = None,
        sampling_params: frozenset[str] = frozenset(),
    ) -> None:
        """`known`: by path, the members that SGLang reads; others are ignored, and told of.
        `sampling_params`: the names that SGLang's object of this name has; empty: all are passed on.
        """
        self._known = known or {}
        self._tables = _tables(abilities or Abilities(), sampling_params)

    def knows(self, path: str) -> bool:
        """Whether there is a table for this path."""
        return path in self._tables

    def judge(self, path: str, body: bytes) -> Judgement:
        """The body as SGLang is to get it: the very bytes where nothing changes. Raises RequestError, whose
        `param` is the field.
        """
        table = self._tables[path]
        value = _decoded(body)
        made = judged("", value, table.rules, needed=table.needed)
        if table.check is not None:
            table.check(made)
        known = self._known.get(path, made.keys())
        ignored = [name for name, one in made.items() if one is IGNORED or name not in known][:MAX_IGNORED]
        if made is value and None not in value.values() and not body.startswith(BOM):
            return Judgement(body, ignored)
        kept = {name: one for name, one in made.items() if one is not IGNORED and one is not None}
        return Judgement(msgspec.json.encode(kept), ignored)


@dataclass(frozen=True)
class _Table:
    rules: Mapping[str, Rule]
    needed: Collection[str] = ()
    check: Callable[[dict[str, Any]], None] | None = None
    """What concerns several members."""


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body.removeprefix(BOM))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"The body must be a JSON object, not {kind(value)}.", code="invalid_json")
    return value


def _tables(abilities: Abilities, sampling_params: frozenset[str]) -> Mapping[str, _Table]:
    anthropic = {
        "model": text(MAX_MODEL),
        "messages": talk.anthropic_messages(abilities),
        "system": talk.blocks(abilities),
        "tools": talk.anthropic_tools,
        "thinking": talk.thinking(abilities),
        "metadata": an_object(65_536),
    }
    tables = {
        CHAT: _Table({**_OPENAI, **_chat(abilities)}, ("messages",), _check_limits),
        COMPLETIONS: _Table({**_OPENAI, **_COMPLETIONS}, ("prompt",), _check_limits),
        MESSAGES: _Table(
            {**_without(_OPENAI, "tools", "tool_choice"), **anthropic, **_MESSAGES},
            ("messages", "max_tokens"),
        ),
        COUNT_TOKENS: _Table(anthropic, ("messages",)),
        RESPONSES: _Table({**_OPENAI, **_responses(abilities)}, ("input",)),
        GENERATE: _Table(_generate(sampling_params)),
        **_OTHERS,
    }
    return {**tables, "/v1/tokenize": tables["/tokenize"], "/v1/detokenize": tables["/detokenize"]}


def _without(rules: Mapping[str, Rule], *names: str) -> dict[str, Rule]:
    return {name: rule for name, rule in rules.items() if name not in names}


def _prompt(name: str, value: Any) -> Any:
    """A text or token ids, or a list of either."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refused(name, f"must be a text, token ids, or a list of either, not {_empty_or_kind(value)}")
    if isinstance(value[0], int):
        return _token_ids(name, value)
    return list_of(one_of(text(MAX_TEXT), _token_ids, what="a text or token ids"), MAX_INPUTS)(name, value)


def _empty_or_kind(value: Any) -> str:
    return "an empty list" if value == [] else kind(value)


def _token_ids(name: str, value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise refused(name, f"must be a list of token ids, not {_empty_or_kind(value)}")
    if {*map(type, value)} != {int} or min(value) < 0 or max(value) >= 1 << 31:
        raise refused(name, "must be token ids of the model")
    return value


def _texts(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    return list_of(text(MAX_TEXT), MAX_INPUTS, least=1)(name, value)


def _suffix(name: str, value: Any) -> Any:
    if text(MAX_TEXT)(name, value):
        raise refused(name, "needs a template for filling in the middle, which this worker does not have")
    return DROP


def _template_arguments(name: str, value: Any) -> Any:
    found = an_object(65_536)(name, value)
    for member in found:
        if member in RESERVED_KWARGS:
            raise refused(f"{name}.{member}", "is set by the server")
    if not isinstance(found.get("add_generation_prompt", True), bool):
        raise refused(f"{name}.add_generation_prompt", "must be true or false")
    return found


def _include(name: str, value: Any) -> Any:
    """What of it is known here; clients ask for more than one server has."""
    found = list_of(text(MAX_MODEL), 64)(name, value)
    kept = [one for one in found if one in INCLUDES]
    return kept if kept or not found else IGNORED


def _service_tier(name: str, value: Any) -> Any:
    return value if text(MAX_MODEL)(name, value) in SERVICE_TIERS else IGNORED


def _check_limits(body: dict[str, Any]) -> None:
    least, most = body.get("min_tokens"), body.get("max_completion_tokens", body.get("max_tokens"))
    if least is not None and most is not None and least > most:
        raise refused("min_tokens", "is more than the answer may have")
    grammars = [name for name in ("regex", "ebnf", "json_schema") if body.get(name)]
    asked = body.get("response_format")
    if isinstance(asked, dict) and asked.get("type") != "text":
        grammars.append("response_format")
    if len(grammars) > 1:
        raise refused(grammars[1], f"cannot be combined with {grammars[0]}")
    if least and grammars:
        raise refused("min_tokens", f"cannot be combined with {grammars[0]}, which may be over sooner")
    if body.get("echo") and body.get("stream") and body.get("logprobs") is not None:
        raise refused("echo", "with logprobs cannot be streamed")


def _sampling(names: frozenset[str]) -> Rule:
    inner = fields(SAMPLING_PARAMS)

    def rule(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return list_of(rule, MAX_INPUTS)(name, value)
        found = inner(name, value)
        for member in found if names else ():
            if member not in names:
                raise refused(f"{name}.{member[:100]}", "is not a known field")
        return found

    return rule


MAX_MODEL: Final = 1024

_LOGPROBS: Final = integer(0, 1 << 20)
"""How many; what the engine can bear is in `scheduler_limits`."""
_STREAM_OPTIONS: Final = fields(
    {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": boolean}
)
_SESSION: Final = fields(
    {
        "id": text(4096),
        "rid": text(4096),
        "offset": integer(-LARGEST, LARGEST),
        "replace": boolean,
        "drop_previous_output": boolean,
    },
    is_closed=True,
)
"""SGLang looks at no type: an id that is an object ends the scheduler."""
_ENGINE: Final[Mapping[str, Rule]] = {
    "priority": integer(-(1 << 31), (1 << 31) - 1),
    "session_params": _SESSION,
    "custom_logit_processor": one_of(text(1 << 20), list_of(text(1 << 20), MAX_INPUTS), what="a string"),
    "return_hidden_states": one_of(boolean, choice("last"), what="true or false"),
    "return_routed_experts": boolean,
    "routed_experts_start_len": integer(0, LARGEST),
    "data_parallel_rank": integer(0, 1 << 16),
    "routed_dp_rank": integer(0, 1 << 16),
    "mm_processor_kwargs": an_object(65_536),
    "watermark": an_object(4096),
    "lora_path": one_of(text(4096), list_of(text(4096), MAX_INPUTS), what="a string"),
}
_SALTS: Final = one_of(text(4096), list_of(text(4096), MAX_INPUTS), what="a string")
_OPENAI: Final[Mapping[str, Rule]] = {
    **OPENAI,
    **_ENGINE,
    "model": text(MAX_MODEL),
    "stream": boolean,
    "stream_options": _STREAM_OPTIONS,
    "user": text(65_536),
    "metadata": an_object(65_536),
    "store": boolean,
    "parallel_tool_calls": boolean,
    "cache_salt": _SALTS,
    "extra_key": _SALTS,
    "rid": _SALTS,
    "response_format": response_format,
    "echo": boolean,
}
_EFFORT: Final = one_of(
    choice("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"),
    number(0, 0.99),
    what="an effort such as low, medium or high",
)
_COMPLETIONS: Final[Mapping[str, Rule]] = {
    "prompt": _prompt,
    "suffix": _suffix,
    "max_tokens": integer(1, LARGEST),
    "logprobs": _LOGPROBS,
    "json_schema": json_schema,
}
_MESSAGES: Final[Mapping[str, Rule]] = {
    "max_tokens": integer(1, LARGEST),
    "stop_sequences": stop,
    "temperature": number(0, 100),
    "tool_choice": fields(
        {"type": choice("auto", "any", "tool", "none"), "disable_parallel_tool_use": boolean}
    ),
}


def _chat(abilities: Abilities) -> Mapping[str, Rule]:
    return {
        "messages": talk.chat_messages(abilities),
        "tools": talk.chat_tools,
        "tool_choice": talk.tool_choice,
        "max_tokens": integer(1, LARGEST),
        "max_completion_tokens": integer(1, LARGEST),
        "logprobs": boolean,
        "top_logprobs": _LOGPROBS,
        "chat_template_kwargs": _template_arguments,
        "continue_final_message": boolean,
        "reasoning_effort": _EFFORT,
        "reasoning": an_object(4096),
        "separate_reasoning": boolean,
        "stream_reasoning": boolean,
        "task": choice("action", "query", "authority", "domain", "title", "read_url"),
        "sampling_logprobs_mode": choice("selected", "support"),
        "input_ids": _token_ids,
    }


def _responses(abilities: Abilities) -> Mapping[str, Rule]:
    return {
        "input": talk.response_input(abilities),
        "instructions": text(MAX_TEXT),
        "tools": talk.response_tools,
        "tool_choice": one_of(
            choice("auto", "required", "none"), an_object(65_536), what="a choice of tools"
        ),
        "max_output_tokens": integer(1, LARGEST),
        "max_tool_calls": integer(0, LARGEST),
        "top_logprobs": _LOGPROBS,
        "include": _include,
        "service_tier": _service_tier,
        "background": boolean,
        "reasoning": fields({"effort": _EFFORT}),
        "text": an_object(1 << 18),
        "truncation": choice("auto", "disabled"),
        "previous_response_id": text(MAX_MODEL),
        "chat_template_kwargs": _template_arguments,
    }


def _generate(sampling_params: frozenset[str]) -> Mapping[str, Rule]:
    return {
        **_ENGINE,
        "text": _texts,
        "input_ids": one_of(_token_ids, list_of(_token_ids, MAX_INPUTS, least=1), what="token ids"),
        "sampling_params": _sampling(sampling_params),
        "stream": boolean,
        "return_logprob": one_of(boolean, list_of(boolean, MAX_INPUTS), what="true or false"),
        "cache_salt": _SALTS,
        "extra_key": _SALTS,
        "rid": _SALTS,
    }


_OTHERS: Final[Mapping[str, _Table]] = {
    EMBEDDINGS: _Table(
        {
            "model": text(MAX_MODEL),
            "input": one_of(
                _prompt, list_of(an_object(1 << 26), MAX_INPUTS, least=1), what="texts or token ids"
            ),
            "dimensions": integer(1, 1 << 20),
            "encoding_format": choice("float", "base64"),
            "user": text(65_536),
        },
        ("input",),
    ),
    "/v1/classify": _Table({"model": text(MAX_MODEL), "input": _prompt}, ("input",)),
    RERANK: _Table(
        {
            "query": one_of(text(MAX_TEXT), list_of(anything(1 << 26), MAX_INPUTS), what="a text"),
            "documents": list_of(anything(1 << 26), MAX_INPUTS, least=1),
            "top_n": integer(1, 1 << 20),
            "return_documents": boolean,
        },
        ("query", "documents"),
    ),
    SCORE: _Table(
        {
            "query": one_of(text(MAX_TEXT), _token_ids, what="a text or token ids"),
            "items": one_of(_texts, list_of(_token_ids, MAX_INPUTS, least=1), what="texts or token ids"),
            "label_token_ids": _token_ids,
            "apply_softmax": boolean,
            "item_first": boolean,
        },
        ("query", "items"),
    ),
    "/tokenize": _Table(
        {"model": text(MAX_MODEL), "prompt": _texts, "add_special_tokens": boolean, "tools": talk.chat_tools}
    ),
    "/detokenize": _Table(
        {
            "model": text(MAX_MODEL),
            "tokens": one_of(_token_ids, list_of(_token_ids, MAX_INPUTS), what="token ids"),
            "skip_special_tokens": boolean,
        },
        ("tokens",),
    ),
}
