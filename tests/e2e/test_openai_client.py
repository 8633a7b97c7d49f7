"""The official `openai` Python client against the router."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.e2e.cluster import http
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = "demo-tiny"
PAGE = 64
MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant. " * 20},
    {"role": "user", "content": "Write something about dictionaries."},
]
FORCED: Any = {"type": "function", "function": {"name": "weather"}}
WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "strict": True,  # else SGLang lets the model fill in what it likes
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.router.url}/v1", api_key="unused", max_retries=0, timeout=60)


def test_a_stream_carries_the_same_text_as_the_whole_answer_and_its_usage(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**settings)
    assert whole.usage is not None
    stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 0
    assert len(chunks) > 5
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens >= (usage.prompt_tokens - 1) // 64 * 64


def test_tools_are_offered_and_a_forced_call_is_well_formed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=WEATHER,
        tool_choice=FORCED,
        temperature=0,
        max_tokens=64,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Oslo", "Rome")


def test_an_agent_keeps_its_conversation_through_thirty_tool_calls(client: openai.OpenAI) -> None:
    """Each turn finds the whole pages of the prompt before it, and computes what is new."""
    messages: list[Any] = [{"role": "user", "content": "Ask for the weather until it is fine."}]
    prompts, cached = [], []
    for turn in range(30):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            tools=WEATHER,
            tool_choice=FORCED,
            temperature=0,
            max_tokens=8,
            extra_headers={"x-session-id": "agent"},
        )
        called = {"name": "weather", "arguments": json.dumps({"city": "Oslo"})}  # random weights call little
        call = {"id": f"call_{turn}", "type": "function", "function": called}
        result = {"role": "tool", "tool_call_id": f"call_{turn}", "content": f"rain, {turn} mm"}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        prompts.append(usage.prompt_tokens)
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    for before, found in zip(prompts, cached[1:], strict=False):
        assert found >= (before - 1) // PAGE * PAGE
    print(f"prompt tokens {prompts[0]} to {prompts[-1]}; cached {sum(cached)} of {sum(prompts)}")


def test_text_becomes_tokens_and_text_again(cluster: Cluster) -> None:
    url = cluster.router.url
    tokens = http.post(f"{url}/tokenize", json={"prompt": "import os", "add_special_tokens": False}).json()
    text = http.post(f"{url}/v1/detokenize", json={"tokens": tokens["tokens"]}).json()["text"]
    assert (text, tokens["count"]) == ("import os", len(tokens["tokens"]))


@pytest.mark.parametrize(
    ("path", "more", "status", "said"),
    [
        ("embeddings", {"input": "a"}, 400, ["unsupported_endpoint"]),
        ("completions", {"model": "nothing", "prompt": "a"}, 404, ["model_not_found", "demo-tiny"]),
        ("completions", {"prompt": [20] * 5000, "max_tokens": 5}, 400, ["5000", "4096"]),
    ],
    ids=["not what this model does", "a model that is not there", "a prompt longer than the context"],
)
def test_an_error_is_of_the_clients_own_kind_and_says_what_is_wrong(
    client: openai.OpenAI, path: str, more: dict[str, Any], status: int, said: list[str]
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        getattr(client, path).create(**{"model": MODEL, **more})
    assert caught.value.status_code == status
    assert [word for word in said if word not in f"{caught.value.code} {caught.value}"] == []


def test_a_response_says_what_its_stream_says_and_comes_from_one_worker(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Write something about lists.", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=24)
    assert whole.id.startswith("resp_")
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens <= 24
    events = list(client.responses.create(**asked, max_output_tokens=24, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text != ""
    with pytest.raises(
        openai.BadRequestError, match=r"[Rr]esponse store"
    ):  # the worker keeps none by default
        client.responses.retrieve(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + "0" * 44)
