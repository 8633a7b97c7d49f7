"""Bodies of requests with values drawn with a taste for edges, endpoint by endpoint. A seed and a number
make one.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

USER: Final = {"role": "user", "content": "Say something."}
TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
FEW: Final = 3
"""Tokens of an answer: what matters is whether there is one."""
BASES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": FEW},
    "/v1/completions": {"prompt": "Say something.", "max_tokens": FEW},
    "/v1/messages": {"messages": [USER], "max_tokens": FEW},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "Say something.", "max_output_tokens": FEW},
    "/generate": {"text": "Say something.", "sampling_params": {"max_new_tokens": FEW}},
    "/tokenize": {"prompt": "Say something."},
    "/detokenize": {"tokens": [5, 6, 7]},
}
NAMES: Final = """
temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias stop
stop_token_ids stop_regex seed n best_of min_tokens ignore_eos stream stream_options logprobs top_logprobs
echo suffix user metadata store response_format regex ebnf json_schema tools tool_choice parallel_tool_calls
functions messages prompt input system text input_ids tokens sampling_params model chat_template_kwargs
reasoning_effort reasoning thinking include service_tier truncation previous_response_id instructions
background max_tool_calls output_config stop_sequences priority cache_salt extra_key rid lora_path
session_params custom_params return_logprob continue_final_message add_special_tokens
skip_special_tokens no_stop_trim top_logprobs_num logprob_start_len token_ids_logprob image_data
return_hidden_states data_parallel_rank
"""
MEMBERS: Final = NAMES.split()
NUMBERS: Final = (
    *(0, -1, 1, 2, 0.0, -0.0, 0.5, 1.5, 1e-40, 1e300, -1e300, 5e-324, 10**30, -(10**30)),
    *(2**31, 2**31 - 1, -(2**31), 2**53, 2**63, 2**64),
)
TEXTS: Final = (
    "",
    " ",
    "a",
    "\x00",
    "\ud800",
    "é🚀",
    "null",
    "(",
    "a{1,100000}",
    "(a*)*b",
    "[" * 50,
    "a" * 5000,
)
RAW: Final = (
    *("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "-" + "9" * 400),
    *("tru", '"\\ud83d"', "[" * 2000),
)
"""Values that Python's JSON would not write."""


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    body: bytes

    @property
    def told(self) -> str:
        """For a failure's message."""
        return f"{self.path} {self.body[:600].decode('utf-8', 'replace')}"


def random_body(seed: int, number: int, model: str) -> Asked:
    """The request of this number."""
    draw = random.Random(f"{seed} {number}")
    path = draw.choice([*BASES])
    body: dict[str, Any] = {"model": model, **json.loads(json.dumps(BASES[path]))}
    raw = ""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        member = draw.choice(MEMBERS)
        target = (
            body.setdefault("sampling_params", {}) if path == "/generate" and draw.random() < 0.5 else body
        )
        if not isinstance(target, dict):
            continue
        target[member] = _value(draw, member, 0)
        if draw.random() < 0.05:
            raw = f', "{member}": {draw.choice(RAW)}'
    if draw.random() < 0.03:
        body.pop(draw.choice([*body]))
    text = json.dumps(body)
    if draw.random() < 0.02:
        text = text[: draw.randrange(len(text))]
    elif raw:
        text = f"{text[:-1]}{raw}}}"
    return Asked(path, text.encode())


def _value(draw: random.Random, member: str, depth: int) -> Any:
    likely = _likely(draw, member)
    if likely is not None and draw.random() < 0.6:
        return likely
    kinds = [None, True, False, draw.choice(NUMBERS), draw.choice(TEXTS)]
    if depth < 3:
        size = draw.choice((0, 1, 2, 3))
        kinds.append([_value(draw, member, depth + 1) for _ in range(size)])
        keys = [*TEXTS[:3], "type", "role", "content", "name", "function", "schema", "5", "url"]
        kinds.append({draw.choice(keys): _value(draw, member, depth + 1) for _ in range(size)})
    return draw.choice(kinds)


def _likely(draw: random.Random, member: str) -> Any:
    """A value of about the right shape."""
    number, text = draw.choice(NUMBERS), draw.choice(TEXTS)
    schema = {
        "type": draw.choice(("object", "string", "array", "nothing")),
        "maxItems": number,
        "pattern": text,
    }
    likely: dict[str, Any] = {
        "logit_bias": {draw.choice(("5", "-1", "999999999", "x", "1.5")): number},
        "response_format": {"type": "json_schema", "json_schema": {"name": text, "schema": schema}},
        "json_schema": json.dumps(schema),
        "tools": [{"type": "function", "function": {"name": text, "parameters": schema}}, TOOL],
        "tool_choice": draw.choice(("auto", "required", {"type": "function", "function": {"name": text}})),
        "messages": [
            {"role": draw.choice(("user", "system", "developer", "tool", "assistant", "x")), "content": text}
        ],
        "input": [{"type": draw.choice(("message", "function_call", "x")), "role": "user", "content": text}],
        "stop": [text, text],
        "sampling_params": {"max_new_tokens": FEW, draw.choice(MEMBERS[:16]): number},
        "stream": draw.random() < 0.9,
        "stream_options": {"include_usage": draw.choice((True, None, text))},
        "chat_template_kwargs": {draw.choice(("enable_thinking", "tools", "messages", "x")): number},
        "thinking": {"type": draw.choice(("enabled", "adaptive", "x")), "budget_tokens": number},
        "input_ids": [draw.choice((5, 6, -1, 10**12))] * draw.choice((1, 40)),
        "stop_token_ids": [number],
        "metadata": {text: text},
    }
    return likely.get(member, number)
