"""What a worker takes of a body, endpoint by endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.contract.conversations import Abilities
from pdserve.engine.contract.endpoints import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Contract,
)
from pdserve.errors import RequestError

USER = {"role": "user", "content": "Hello."}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETIONS: {"model": "m", "prompt": "Hello."},
    MESSAGES: {"model": "m", "messages": [USER], "max_tokens": 8},
    COUNT_TOKENS: {"model": "m", "messages": [USER]},
    RESPONSES: {"model": "m", "input": "Hello."},
    GENERATE: {"text": "Hello.", "sampling_params": {}},
    "/v1/embeddings": {"model": "m", "input": "Hello."},
    "/v1/rerank": {"model": "m", "query": "Hello.", "documents": ["a"]},
    "/v1/score": {"model": "m", "query": "Hello.", "items": ["a"], "label_token_ids": [1]},
    "/v1/classify": {"model": "m", "input": "Hello."},
    "/tokenize": {"model": "m", "prompt": "Hello."},
    "/v1/detokenize": {"model": "m", "tokens": [1, 2]},
}
PLAIN = Abilities(
    prints_role=lambda role: role in ("system", "user", "assistant", "tool"),
    takes_media=False,
    has_reasoning_parser=False,
)


def judged(path: str, contract: Contract | None = None, **fields: Any) -> dict[str, Any]:
    """What SGLang gets of the endpoint's usual body with these fields."""
    body = json.dumps({**BODIES[path], **fields}).encode()
    made: dict[str, Any] = json.loads((contract or Contract()).judge(path, body).body)
    return made


def refusal(path: str, contract: Contract | None = None, **fields: Any) -> str:
    """The field that is refused."""
    with pytest.raises(RequestError) as raised:
        judged(path, contract, **fields)
    assert raised.value.status == 400
    assert raised.value.param is not None
    assert str(raised.value).startswith(raised.value.param)
    return raised.value.param


@pytest.mark.parametrize("path", BODIES)
def test_an_ordinary_body_is_passed_on_byte_for_byte(path: str) -> None:
    body = json.dumps(BODIES[path], indent=1).encode()
    assert Contract().judge(path, body).body is body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "field",
    ["n", "stream", "temperature", "logit_bias", "stop", "seed", "stream_options", "metadata", "user"],
)
def test_null_is_the_default(path: str, field: str) -> None:
    assert judged(path, **{field: None}) == BODIES[path]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("logit_bias", {"5": one}) for one in (1e300, -1e300, 101, "x", True)),
        *(("logit_bias", one) for one in ([], {"abc": 1}, {"-1": 1}, {"1.5": 1}, {"": 1})),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        *(("temperature", one) for one in (-1, 1e300, "hot", [], True)),
        *(("top_p", one) for one in (-0.1, 2)),
        *(("n", one) for one in (0, -1, 1.5, "x", 10**30)),
        ("repetition_penalty", 1e-40),
        ("frequency_penalty", 2.1),
        ("min_p", 1.1),
        ("seed", 2**70),
        ("stop", {"a": 1}),
        ("stop", [1]),
        ("stop", ["a"] * 65),
        ("stop", "a" * 1025),
        ("regex", 5),
        ("regex", "(a{1,1000}){1,1000}"),
        ("regex", "(" * 100),
        ("ebnf", "root ::= " + "(" * 100),
    ],
)
def test_what_would_reach_the_sampler_out_of_bounds_is_refused_everywhere(field: str, value: Any) -> None:
    assert refusal(CHAT, **{field: value}).startswith(field)
    assert refusal(COMPLETIONS, **{field: value}).startswith(field)
    inner = {"seed": "sampling_seed"}.get(field, field)
    assert refusal(GENERATE, sampling_params={inner: value}).startswith(f"sampling_params.{inner}")
    assert refusal(GENERATE, sampling_params=[{}, {inner: value}]).startswith(f"sampling_params[1].{inner}")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("value", ["s", {"id": {"a": 1}}, {"offset": "1"}, {"replace": 1}, {"other": 1}])
def test_a_session_with_fields_of_other_types_is_refused(path: str, value: Any) -> None:
    whole = {"id": "s", "rid": None, "offset": 3, "replace": True, "drop_previous_output": False}
    judged(path, session_params=whole)
    assert refusal(path, session_params=value).startswith("session_params")


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b'{"prompt":"a","temperature":1e999}'),
        *(
            b'{"prompt": "a", "seed": %b}' % number
            for number in (b"9" * 5000, b"-" + b"9" * 5000, b"1e" + b"9" * 5000)
        ),
    ],
    ids=lambda body: body[:40],
)
def test_what_is_no_json_of_this_world_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        Contract().judge(COMPLETIONS, body)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("given", "kept"), [("", None), ([""], None), ([], None), (["", "a"], ["a"]), ("a", "a")]
)
def test_an_empty_stop_string_is_none(given: Any, kept: Any) -> None:
    assert judged(CHAT, stop=given).get("stop") == kept
    assert judged(MESSAGES, stop_sequences=given).get("stop_sequences") == kept


LENGTHS = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}


@pytest.mark.parametrize(
    ("path", "field"),
    [*LENGTHS.items(), *((path, "max_tokens") for path in (CHAT, COMPLETIONS, MESSAGES))],
)
@pytest.mark.parametrize("value", [0, -1, 0.0, False, "x"])
def test_an_answer_has_at_least_a_token(path: str, field: str, value: Any) -> None:
    assert refusal(path, **{field: value}) == field


def test_zero_and_nothing_mean_what_the_api_says() -> None:
    assert 0 < judged(CHAT, top_p=0)["top_p"] < 1e-6
    assert judged(CHAT, top_k=0)["top_k"] == -1
    assert judged(CHAT, temperature=0)["temperature"] == 0
    assert refusal(COMPLETIONS, suffix="x") == "suffix"  # nothing can be filled in here
    assert judged(COMPLETIONS, suffix="") == BODIES[COMPLETIONS]


SCHEMA = {"type": "json_schema"}


@pytest.mark.parametrize(
    "value",
    [
        *("json_object", [], 5, {}, {"type": "xml"}, {"type": "structural_tag"}, SCHEMA),
        *({**SCHEMA, "json_schema": one} for one in ("x", {"name": "a"}, {"name": "a", "schema": "x"})),
    ],
)
def test_a_malformed_response_format_is_named(value: Any) -> None:
    assert refusal(CHAT, response_format=value).startswith("response_format")


@pytest.mark.parametrize(
    "grammar", [{"regex": "a"}, {"ebnf": "a"}, {"response_format": {"type": "json_object"}}]
)
def test_a_grammar_may_be_over_before_the_least_tokens(grammar: dict[str, Any]) -> None:
    assert refusal(CHAT, min_tokens=2, **grammar) == "min_tokens"
    assert judged(CHAT, min_tokens=0, **grammar)["min_tokens"] == 0


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(80),
        {"type": "array", "items": {"type": "array", "maxItems": 1000}, "maxItems": 1000},
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"enum": ["a" * 200_000]},
    ],
)
def test_a_schema_that_costs_too_much_is_refused(schema: Any) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert refusal(CHAT, response_format=asked).startswith("response_format.json_schema.schema")
    if not {"maxItems", "maxLength"}.isdisjoint(schema):
        return  # of a tool such bounds are left out, see below
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert refusal(CHAT, tools=[tool]).startswith("tools[0].function.parameters")
    assert refusal(MESSAGES, tools=[{"name": "f", "input_schema": schema}]).startswith(
        "tools[0].input_schema"
    )


def test_an_ordinary_schema_passes() -> None:
    schema = {
        "type": "object",
        "properties": {
            "names": {"type": "array", "items": {"type": "string", "maxLength": 200}, "maxItems": 100},
            "mail": {"type": "string", "pattern": r"^[a-z]{1,64}@[a-z]{1,64}\.[a-z]{2,8}$"},
        },
        "required": ["names"],
    }
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert judged(CHAT, response_format=asked)["response_format"] == asked


@pytest.mark.parametrize(
    "messages",
    [
        *("hello", {}, [], [None], ["x"], [{}], [{"role": "user"}], [{"role": None, "content": "x"}]),
        *([{"role": "user", "content": one}] for one in (5, [None], [{"type": "text"}])),
        *([{"role": "assistant", "tool_calls": one}] for one in ("x", [None])),
        [{"role": "wizard", "content": "x"}],
    ],
)
def test_malformed_messages_are_named(messages: Any) -> None:
    assert refusal(CHAT, messages=messages).startswith("messages")


def test_a_developer_message_is_a_system_message_where_the_template_prints_none() -> None:
    developer = [{"role": "developer", "content": "Be brief."}, USER]
    assert judged(CHAT, messages=developer)["messages"] == developer
    made = judged(CHAT, Contract(PLAIN), messages=developer)["messages"]
    assert made == [{"role": "system", "content": "Be brief."}, USER]


def test_a_role_that_the_template_does_not_print_is_refused() -> None:
    for role in ("function", "root", "latest_reminder"):
        messages = [{"role": role, "name": "f", "content": "x"}, USER]
        assert refusal(CHAT, Contract(PLAIN), messages=messages) == "messages[0].role"


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1', {"arguments": '{"a": 1'}),
        ('["a"]', {"arguments": '["a"]'}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ("[" * 5000, {"arguments": "[" * 5000}),
    ],
)
def test_a_call_that_a_model_got_wrong_does_not_end_its_conversation(arguments: Any, kept: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    made = judged(CHAT, messages=messages)["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(made) == kept


def test_what_has_no_effect_is_told_and_taken_out() -> None:
    contract = Contract(PLAIN, {MESSAGES: frozenset({"model", "messages", "max_tokens", "thinking"})})
    body = {**BODIES[MESSAGES], "thinking": {"type": "adaptive"}, "context_management": {"edits": []}}
    judgement = contract.judge(MESSAGES, json.dumps(body).encode())
    assert judgement.ignored == ["thinking", "context_management"]
    assert "thinking" not in json.loads(judgement.body)
    made = Contract().judge(
        RESPONSES, json.dumps({**BODIES[RESPONSES], "include": ["nobody.knows"]}).encode()
    )
    assert made.ignored == ["include"]
    assert json.loads(made.body) == BODIES[RESPONSES]


def test_media_is_named_where_the_model_takes_text_only() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    assert judged(CHAT, messages=asked)["messages"] == asked
    assert refusal(CHAT, Contract(PLAIN), messages=asked) == "messages[0].content[1].type"


def test_a_message_of_a_refusal_holds_nothing_of_the_prompt() -> None:
    secret = "my-secret-word-4711"
    for messages in (
        [{"role": secret, "content": secret}],
        [{"role": "user", "content": {"a": secret}}],
        secret,
    ):
        with pytest.raises(RequestError) as raised:
            judged(CHAT, messages=messages)
        assert secret not in str(raised.value)


EDGES = st.sampled_from([None, True, 0, -1, 1e308, -1e308, 2**63, "", "\ufffd"])
ANY = st.recursive(
    EDGES | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = """
messages tools tool_choice response_format stop logit_bias n temperature stream_options prompt input system
thinking sampling_params text input_ids max_tokens regex ebnf chat_template_kwargs include service_tier
reasoning metadata documents query items
"""
FIELDS = st.sampled_from(NAMES.split())


@given(path=st.sampled_from([*BODIES]), fields=st.dictionaries(FIELDS, ANY, max_size=4))
def test_any_body_is_refused_or_passes_for_good(path: str, fields: dict[str, Any]) -> None:
    for contract in (Contract(), Contract(PLAIN)):
        try:
            made = contract.judge(path, json.dumps({**BODIES[path], **fields}).encode())
        except RequestError:
            continue
        again = contract.judge(path, made.body)
        assert json.loads(again.body) == json.loads(made.body), "a judged body is passed on as it is"


def system(*texts: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": "system", "content": texts[0] if len(texts) == 1 else parts}


ASSISTANT = {"role": "assistant", "content": "Yes."}
SHOWN = {"type": "text", "text": "<system>\nhurry\n</system>"}
HELLO = {"type": "text", "text": "Hello."}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([system("a"), USER, ASSISTANT], None),
        ([USER, system("hurry")], [{"role": "user", "content": [HELLO, SHOWN]}]),
        ([USER, ASSISTANT, system("hurry")], [USER, ASSISTANT, {"role": "user", "content": [SHOWN]}]),
        ([USER, ASSISTANT, system(" ")], [USER, ASSISTANT]),
        ([USER, ASSISTANT, USER, system("hurry", "hurry")],
         [USER, ASSISTANT, {"role": "user", "content": [HELLO, SHOWN, SHOWN]}]),
        ([system("a"), system("b", "c"), USER], [system("a", "b", "c"), USER]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_system_stays_where_it_speaks_where_a_template_shows_it_at_the_start_only(
    path: str, messages: list[Any], expected: list[Any] | None
) -> None:
    contract = Contract(Abilities(prints_inline_system=False))
    assert judged(path, contract, messages=messages)["messages"] == (expected or messages)
    assert judged(path, messages=messages)["messages"] == messages


def test_items_of_responses_keep_what_the_developer_says_between_them() -> None:
    contract = Contract(Abilities(prints_inline_system=False))
    items = [USER, {"type": "function_call_output", "call_id": "c", "output": "1"}, system("hurry")]
    shown = {"role": "user", "content": [{**SHOWN, "type": "input_text"}]}
    assert judged(RESPONSES, contract, input=items)["input"] == [*items[:2], shown]
    assert judged(RESPONSES, contract, input="a")["input"] == "a"


SPEECH = st.sampled_from([USER, ASSISTANT, system("a"), system("b", "c")])


@given(st.lists(SPEECH, min_size=1, max_size=8), st.lists(SPEECH, max_size=4))
def test_what_follows_an_answer_changes_nothing_before_it(before: list[Any], after: list[Any]) -> None:
    contract = Contract(Abilities(prints_inline_system=False))
    one = judged(MESSAGES, contract, messages=[*before, USER])["messages"]
    two = judged(MESSAGES, contract, messages=[*before, USER, ASSISTANT, *after])["messages"]
    assert two[: len(one)] == one


WIDE = {"type": "object", "properties": {"script": {"type": "string", "maxLength": 524_288, "minLength": 1}}}
NESTED = {"type": "array", "maxItems": 9000, "items": {"type": "array", "maxItems": 9000}}
NARROW = {"type": "object", "properties": {"maxLength": {"type": "integer"}, "a": {"maxLength": 9}}}


@pytest.mark.parametrize(
    ("given_schema", "expected"),
    [
        (WIDE, {"type": "object", "properties": {"script": {"type": "string"}}}),
        (NESTED, {"type": "array", "items": {"type": "array"}}),
        (NARROW, NARROW),
    ],
)
def test_a_tool_may_bound_its_parameters_by_more_than_a_grammar_can(
    given_schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    tool = {"name": "f", "input_schema": given_schema}
    assert judged(MESSAGES, tools=[tool])["tools"] == [{"name": "f", "input_schema": expected}]
    function = {"name": "f", "parameters": given_schema}
    made = judged(CHAT, tools=[{"type": "function", "function": function}])["tools"]
    assert made == [{"type": "function", "function": {"name": "f", "parameters": expected}}]
    made = judged(RESPONSES, tools=[{"type": "function", **function}])["tools"]
    assert made == [{"type": "function", "name": "f", "parameters": expected}]
