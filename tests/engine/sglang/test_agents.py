"""Agents' prompts begin as the ones of the turn before, token for token: bodies of `tests.support.agents`
through the router's nonces, the contract, and SGLang's own conversion.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from pdserve.engine.contract.conversations import Abilities
from pdserve.engine.contract.endpoints import Contract
from pdserve.engine.sglang.engine import contract_of
from pdserve.router.api.nonces import without_nonce
from pdserve.router.api.request_body import parse_request
from tests.support.agents import CHAT, CLIENTS, MESSAGES, TURNS, Client, whole_pages
from tests.support.engine.turns import encode
from tests.support.random_model import CHAT_TEMPLATE

PAGE = 16
INLINE = "{{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}\n    {%- endif %}"
REFUSING = CHAT_TEMPLATE.replace(
    INLINE, "{{- raise_exception('the system speaks first') }}\n    {%- endif %}"
)
"""A template that takes a message of the system at the start only, as many do."""


@cache
def template(text: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def refuse(why: str) -> None:
        raise ValueError(why)

    made.globals["raise_exception"] = refuse
    return made.from_string(text)


def chats(path: str, body: bytes, *, shows_inline: bool) -> tuple[list[Any], Any]:
    """(messages, tools) that SGLang renders of a body."""
    if path == CHAT:
        said = json.loads(body)
        return said["messages"], said.get("tools")
    if path == MESSAGES:
        front = AnthropicServing(SimpleNamespace(supports_inline_system=shows_inline))
        front.openai_serving_chat.apply_reasoning_enabled = lambda *_: None
        made = front._convert_to_chat_completion_request(AnthropicMessagesRequest.model_validate_json(body))
        return made.model_dump()["messages"], [tool.model_dump() for tool in made.tools or ()]
    serving = OpenAIServingResponses.__new__(OpenAIServingResponses)
    serving.supports_inline_system, serving.tool_call_parser, serving.msg_store = shows_inline, None, {}
    asked = ResponsesRequest.model_validate_json(body)
    return serving._construct_input_messages(asked), [tool.model_dump() for tool in asked.tools]


def tokens(client: Client, turn: int, contract: Contract, text: str, *, shows_inline: bool) -> list[int]:
    answers = [f"Answer {number}, in some words." for number in range(turn)]
    body = json.dumps(client.body(turn, answers)).encode()
    body, _ = without_nonce(body, parse_request(body))
    judged = contract.judge(client.path, body).body
    messages, tools = chats(client.path, judged, shows_inline=shows_inline)
    prompt = template(text).render(messages=messages, tools=tools or None, add_generation_prompt=True)
    return encode(prompt)


@pytest.mark.parametrize("text", [CHAT_TEMPLATE, REFUSING], ids=["shows inline", "refuses inline"])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_each_turn_begins_with_the_whole_pages_of_the_turn_before(client: Client, text: str) -> None:
    shows_inline = text is CHAT_TEMPLATE
    contract = Contract(Abilities(prints_inline_system=shows_inline, has_reasoning_parser=False))
    turns = [tokens(client, turn, contract, text, shows_inline=shows_inline) for turn in range(TURNS)]
    for before, now in itertools.pairwise(turns):
        assert len(now) > len(before) > 40 * PAGE
        common = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
        # of the last part of a prompt, which opens the answer, another text may follow
        assert whole_pages(common, PAGE) >= 0.95 * whole_pages(len(before), PAGE)


@pytest.mark.parametrize(("text", "shown"), [(CHAT_TEMPLATE, True), (REFUSING, False)])
def test_a_contract_knows_whether_a_template_shows_the_system_between(text: str, *, shown: bool) -> None:
    manager = SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=text),
        server_args=SimpleNamespace(chat_template=None, reasoning_parser=None),
        model_config=SimpleNamespace(is_multimodal=False),
    )
    messages = [{"role": role, "content": "a"} for role in ("system", "user", "system")]
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 3}).encode()
    assert (contract_of(manager).judge(MESSAGES, body).body == body) is shown
