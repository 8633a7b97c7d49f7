"""The chat template's text, without a tokenizer: what is printed for each kind of message."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from pdserve.engine.demo.chat import chat_template
from tests.support.random_model import CHAT_TEMPLATE

ADD = {"type": "function", "function": {"name": "add"}}
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
BYE = {"role": "user", "content": "Bye"}
ASKED = "<|im_start|>user\nHi<|im_end|>\n"
SMALL_TALK = f"{ASKED}<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
POLITE = chat_template('Be "polite", it\'s nice.', thinks=False)
POLITE_SYSTEM = '<|im_start|>system\nBe "polite", it\'s nice.<|im_end|>\n'


def render(messages: list[dict[str, Any]], template: str = CHAT_TEMPLATE, **values: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers sets it up
    environment.filters["tojson"] = json.dumps
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **values)


@pytest.mark.parametrize("role", ["system", "developer", "root"])
def test_what_comes_first_from_above_is_printed_as_system(role: str) -> None:
    messages = [{"role": role, "content": "Be brief."}, HI, HELLO, BYE]
    assert render(messages) == f"<|im_start|>system\nBe brief.<|im_end|>\n{SMALL_TALK}{ANSWER}"


def test_a_conversation_begins_with_its_own_system_message_or_the_default() -> None:
    assert render([HI, HELLO, BYE]) == SMALL_TALK + ANSWER
    assert render([HI, HELLO, BYE], POLITE) == POLITE_SYSTEM + SMALL_TALK + ANSWER
    messages = [{"role": "system", "content": ""}, HI]
    assert render(messages, POLITE) == f"<|im_start|>system\n<|im_end|>\n{ASKED}{ANSWER}"
    for template in (CHAT_TEMPLATE, POLITE):  # a longer one begins with the shorter one
        assert render([HI, HELLO, BYE], template).startswith(render([HI], template))


def test_a_later_message_from_above_is_printed_in_its_place() -> None:
    messages = [HI, HELLO, {"role": "developer", "content": "In French."}, BYE]
    assert render(messages) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        f"<|im_start|>system\nIn French.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n{ANSWER}"
    )


def test_a_role_that_nobody_knows_is_printed_too() -> None:
    assert "<|im_start|>function\n42<|im_end|>\n" in render([HI, {"role": "function", "content": "42"}])


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_the_text_parts_of_content_are_joined(role: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "one, "}, image, {"type": "text", "text": "two"}]
    assert render([{"role": role, "content": parts}]) == render([{"role": role, "content": "one, two"}])


def test_tools_calls_and_results_are_printed() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "two"},
    ]
    text = render(messages, tools=[ADD])
    assert '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n2\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>" in text


def test_arguments_of_a_call_may_be_json_already() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text = render([HI, {"role": "assistant", "content": "Wait.", "tool_calls": [call]}])
    assert '\nWait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text


@pytest.mark.parametrize(
    ("template", "first", "begins"),
    [
        (CHAT_TEMPLATE, [], "# Tools"),
        (POLITE, [], 'Be "polite", it\'s nice.\n\n# Tools'),
        (POLITE, [{"role": "developer", "content": "Be brief."}], "Be brief.\n\n# Tools"),
    ],
)
def test_tools_follow_the_system_message(template: str, first: list[dict[str, Any]], begins: str) -> None:
    text = render([*first, HI], template, tools=[ADD])
    assert text.startswith(f"<|im_start|>system\n{begins}")
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, POLITE])
def test_sglang_knows_the_form_of_tool_calls(template: str) -> None:
    from sglang.srt.parser.template_detection import detect_reasoning_pattern, detect_tool_call_parser

    _, toggle = detect_reasoning_pattern(template)
    assert detect_tool_call_parser(template, None, toggle) == "qwen"


def test_a_model_that_thinks_is_asked_not_to() -> None:
    assert render([HI], enable_thinking=False).endswith(f"{ANSWER}<think>\n\n</think>\n\n")
    assert render([HI], POLITE, enable_thinking=False) == render([HI], POLITE)
