"""The official `anthropic` client against the router: prefill, pool and decode as for OpenAI's clients."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.support.e2e.cluster import http
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = "demo-tiny"
SYSTEM = "You answer clients of another kind. " * 20
MESSAGES: list[Any] = [{"role": "user", "content": "Write something about dictionaries."}]
GREEDY: Any = {"temperature": 0}
WEATHER: Any = {
    "name": "weather",
    "description": "Weather of a city",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(cluster: Cluster) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=cluster.router.url, api_key="unused", max_retries=0, timeout=60)


def asked(**more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 24,
        "system": SYSTEM,
        "messages": MESSAGES,
        "extra_body": GREEDY,
    } | more


def test_the_prompt_comes_from_a_prefill_worker_and_the_text_is_openais(
    client: anthropic.Anthropic, cluster: Cluster
) -> None:
    answer = client.messages.with_raw_response.create(**asked())
    assert "stage=ok" in answer.headers["x-pdserve-plan"]
    assert "pool=0" not in answer.headers["x-pdserve-cached"]
    message = answer.parse()
    system: Any = {"role": "system", "content": SYSTEM}
    body = {"model": MODEL, "messages": [system, *MESSAGES], "max_tokens": 24, **GREEDY}
    openais = http.post(f"{cluster.router.url}/v1/chat/completions", json=body, timeout=60.0).json()
    assert message.content[0].type == "text"
    assert message.content[0].text == openais["choices"][0]["message"]["content"]
    assert message.usage.output_tokens == openais["usage"]["completion_tokens"]


def test_a_stream_says_the_same_and_its_usage(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert text == whole.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.stop_reason == whole.stop_reason


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=MESSAGES)
    usage = client.messages.create(**asked()).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_forced_tool_is_called(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        **asked(max_tokens=64, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    )
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert call.input["city"] in ("Oslo", "Rome")


def test_errors_are_the_clients_own_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(model="nobody"))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**asked(max_tokens=0))


def test_scores_come_through_the_router(cluster: Cluster) -> None:
    body = {"model": MODEL, "query": "Is it so?", "items": [" yes", " no"], "label_token_ids": [5, 6, 7]}
    said = http.post(f"{cluster.router.url}/v1/score", json=body | {"apply_softmax": True}, timeout=60.0)
    assert said.status_code == 200, said.text
    scores = said.json()["scores"]
    assert [len(row) for row in scores] == [3, 3]
    assert all(abs(sum(row) - 1) < 1e-6 for row in scores)
