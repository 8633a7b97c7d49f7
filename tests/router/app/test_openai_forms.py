"""What OpenAI's API has beside plain text, through the router with the official client: scripted workers say
it in SGLang's words (0.5.23), and nothing of it is lost or mixed up on the way, nor of what was asked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.support.router.harness import before, disagg
from tests.support.router.mock_worker import DONE, MockWorker, answer, stream

CHAT = "/v1/chat/completions"
TENANTS_KEY = "key-of-acme-in-these-tests"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
USAGE = {
    "prompt_tokens": 9,
    "total_tokens": 13,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 8},
}
HEAD = {"id": "0123", "created": 1760000000, "model": "m"}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def whole(*choices: dict[str, Any]) -> dict[str, Any]:
    listed = [{"index": i, "finish_reason": "stop"} | choice for i, choice in enumerate(choices)]
    return HEAD | {"object": "chat.completion", "choices": listed, "usage": USAGE}


def message(**fields: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": None} | fields}


def chunk(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish} | more
    event = HEAD | {"object": "chat.completion.chunk", "choices": [choice], "usage": None}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


USED = (
    b"data: "
    + json.dumps(HEAD | {"object": "chat.completion.chunk", "choices": [], "usage": USAGE}).encode()
    + b"\n\n"
)


@asynccontextmanager
async def client_and_worker() -> AsyncIterator[tuple[openai.AsyncOpenAI, MockWorker]]:
    async with (
        disagg() as (harness, _, [decode]),
        openai.AsyncOpenAI(base_url=harness.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield client, decode


LOGPROBS = {
    "content": [
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    ]
}
CALL = {
    "id": "call_1",
    "index": 0,
    "type": "function",
    "function": {"name": "weather", "arguments": '{"a":1}'},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "choices": (
        {"n": 3},
        whole(*[message(content=c) for c in "abc"]),
        "[c.message.content for c in choices]",
    ),
    "logprobs": (
        {"logprobs": True, "top_logprobs": 1},
        whole(message(content="a") | {"logprobs": LOGPROBS}),
        "choices[0].logprobs.content[0].top_logprobs[0].logprob",
    ),
    "tools": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        whole(message(tool_calls=[CALL]) | {"finish_reason": "tool_calls"}),
        "choices[0].message.tool_calls[0].function.arguments",
    ),
    "structured output": (
        {"response_format": SCHEMA},
        whole(message(content='{"x":1}')),
        "choices[0].message.content",
    ),
    "reasoning": (
        {"extra_body": {"separate_reasoning": True}},
        whole(message(content="so", reasoning_content="hm")),
        "choices[0].message.reasoning_content",
    ),
}
SAID = {
    "choices": ["a", "b", "c"],
    "logprobs": -0.5,
    "tools": '{"a":1}',
    "structured output": '{"x":1}',
    "reasoning": "hm",
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_an_answer_comes_through(form: str) -> None:
    asked, said, expression = FORMS[form]
    async with client_and_worker() as (client, decode):
        decode.script(CHAT, answer(200, said))
        got = await client.chat.completions.create(model="m", messages=MESSAGES, **asked)
        assert eval(expression, {"choices": got.choices}) == SAID[form]
        assert got.usage is not None
        assert got.usage.completion_tokens == 4
        assert got.usage.prompt_tokens_details is not None
        assert got.usage.prompt_tokens_details.cached_tokens == 8
        sent = decode.got(CHAT)[0].json()
        for name, value in {**asked, **asked.get("extra_body", {})}.items():
            assert name == "extra_body" or sent[name] == value


async def test_streams_of_several_choices_tool_calls_and_reasoning_come_through_in_order() -> None:
    part = {"index": 0, "function": {"arguments": '{"a"'}}
    events = [
        chunk(0, {"role": "assistant", "reasoning_content": "hm"}),
        chunk(1, {"role": "assistant", "content": "b"}, logprobs=LOGPROBS),
        chunk(0, {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": ""}}]}),
        chunk(0, {"tool_calls": [part]}),
        chunk(0, {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        chunk(1, {}, "stop"),
        chunk(0, {}, "tool_calls"),
        USED,
        DONE,
    ]
    async with client_and_worker() as (client, decode):
        decode.script(CHAT, stream(events))
        chunks = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            n=2,
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        got = [event async for event in chunks]
        choices = [event.choices[0] for event in got if event.choices]
        assert [choice.index for choice in choices] == [0, 1, 0, 0, 0, 1, 0]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function] == ["weather", None, None]
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        assert arguments == '{"a":1}'
        assert choices[0].delta.reasoning_content == "hm"  # type: ignore[attr-defined]
        assert choices[1].logprobs is not None
        assert [c.finish_reason for c in choices if c.finish_reason] == ["stop", "tool_calls"]
        assert got[-1].usage is not None
        assert got[-1].usage.completion_tokens == 4
        assert decode.got(CHAT)[0].json()["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(("knows_salts", "status"), [(True, 200), (False, 503)])
async def test_embeddings_of_tenants_carry_their_salt(
    monkeypatch: pytest.MonkeyPatch, knows_salts: bool, status: int
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEYS", f"acme={TENANTS_KEY}")
    vectors = MockWorker("decode", "vectors", tasks=["embed"], takes_salt_header=knows_salts)
    async with before(vectors) as harness:
        for path in ("/v1/embeddings", "/v1/classify"):
            vectors.script(path, answer(200, {"data": [], "usage": {"prompt_tokens": 2, "total_tokens": 2}}))
            headers = {"authorization": f"Bearer {TENANTS_KEY}"}
            asked = await harness.post(path, {"model": "vectors", "input": "a"}, headers)
            assert asked.status == status
            salts = [one.headers["x-pdserve-cache-salt"] for one in vectors.got(path)]
            assert salts == ['"tenant/acme"'] * knows_salts


async def test_embeddings_go_to_workers_that_make_them_and_to_no_others() -> None:
    writer = MockWorker("decode", "writer", namespace="w")
    vectors = MockWorker("decode", "vectors", namespace="v", tasks=["embed"])
    row = {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}
    said = {
        "object": "list",
        "model": "vectors",
        "data": [row],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    vectors.script("/v1/embeddings", answer(200, said))
    async with (
        before(writer, vectors) as harness,
        openai.AsyncOpenAI(base_url=harness.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        made = await client.embeddings.create(model="vectors", input=["a b"], encoding_format="float")
        assert made.data[0].embedding == [0.5, -1.0]
        assert made.usage.prompt_tokens == 2
        assert not writer.got("/v1/embeddings")
        with pytest.raises(openai.BadRequestError, match="'writer' cannot do /v1/embeddings") as refused:
            await client.embeddings.create(model="writer", input="a")
        assert refused.value.code == "unsupported_endpoint"
        with pytest.raises(openai.BadRequestError, match="'vectors' cannot do"):
            await client.chat.completions.create(model="vectors", messages=MESSAGES)
        for path in ("/tokenize", "/v1/detokenize"):
            response = await harness.post(path, {"model": "vectors", "prompt": "a"})
            assert response.headers["x-pdserve-decode"] == vectors.id
