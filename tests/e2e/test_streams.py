"""A stream says what the whole answer to the same request says: texts, reasons, log-probabilities, counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.support.e2e.cluster import http
from tests.support.e2e.site import Cluster

pytestmark = pytest.mark.e2e

MODEL: Final = "demo-tiny"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
PROMPT: Final = "Grüße, 世界 and 😀: the capital of France is"
COMMON: Final[dict[str, Any]] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
OURS: Final = (b"pdserve", b"x-pd")
"""What our marks between worker and router are known by."""

OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "two choices": {"n": 2},
    "one token": {"max_tokens": 1},
    "log-probabilities": {"logprobs": 2},
    "log-probabilities of two choices": {"logprobs": 1, "n": 2},
    "stop strings": {"stop": "from the answer"},
    "stop strings and log-probabilities": {"stop": "from the answer", "logprobs": 1},
    "stop strings that are kept": {"stop": "from the answer", "no_stop_trim": True},
}


def body_of(path: str, options: dict[str, Any]) -> dict[str, Any]:
    body = {**COMMON, **options}
    if path == COMPLETIONS:
        return {**body, "prompt": PROMPT}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return {**body, "messages": [{"role": "user", "content": PROMPT}]}


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice of an answer or of a chunk."""
    said = choice.get("message") or choice.get("delta")
    text: str = choice["text"] if said is None else said.get("content") or ""
    return text


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    """One entry a token, as either API says it, without the numbers that differ in their last digits."""
    said = choice.get("logprobs")
    if not said:
        return []
    if "content" in said:
        return [(one["token"], one["bytes"], len(one["top_logprobs"])) for one in said["content"] or []]
    return list(zip(said["tokens"], said["text_offset"], map(len, said["top_logprobs"] or []), strict=True))


def streamed(cluster: Cluster, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = http.post(f"{cluster.router.url}{path}", json=asked, timeout=120.0)
    assert answer.status_code == 200, answer.text
    assert not any(mark in answer.content for mark in OURS), answer.text
    return list(events(answer.text))


def events(text: str) -> Iterator[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    yield from map(json.loads, lines[:-1])


def whole(cluster: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(f"{cluster.router.url}{path}", json=body, timeout=120.0)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_equals_the_whole_answer(cluster: Cluster, path: str, options: dict[str, Any]) -> None:
    body = body_of(path, options)
    if "stop" in body:
        text = text_of(whole(cluster, path, body_of(path, {}))["choices"][0])
        body["stop"] = [text[9:13], text[6:12], "never"]
    said = whole(cluster, path, body)
    chunks = streamed(cluster, path, body)
    assert len({chunk["id"] for chunk in chunks}) == 1
    [usage] = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[count] == said["usage"][count]
    for choice in said["choices"]:
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert "".join(map(text_of, parts)) == text_of(choice)
        assert [one for part in parts for one in logprobs_of(part)] == logprobs_of(choice)
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
    if "logprobs" in body:
        told = sum(len(logprobs_of(choice)) for choice in said["choices"])
        assert told == said["usage"]["completion_tokens"], "one entry a token"


def test_an_answer_ends_before_the_stop_string_that_begins_first(cluster: Cluster) -> None:
    """One token completes two of them: the order in which the client names them decides nothing."""
    text = text_of(whole(cluster, COMPLETIONS, body_of(COMPLETIONS, {}))["choices"][0])
    for stop in ([text[9:13], text[6:13]], [text[6:13], text[9:13]]):
        body = body_of(COMPLETIONS, {"stop": stop})
        cut = min(text.find(one) for one in stop)
        assert text_of(whole(cluster, COMPLETIONS, body)["choices"][0]) == text[:cut]


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_are_places_in_the_text(cluster: Cluster, echo: bool) -> None:
    """`echo`: the prompt is a part of the text. A token that is a part of a character has its place."""
    choice = whole(cluster, COMPLETIONS, body_of(COMPLETIONS, {"logprobs": 1, "echo": echo}))["choices"][0]
    text, said = choice["text"], choice["logprobs"]
    places = list(zip(said["tokens"], said["text_offset"], strict=True))
    whole_tokens = [(token, offset) for token, offset in places if token in text]
    assert len(whole_tokens) > len(places) / 2
    for token, offset in whole_tokens:
        assert text[offset:].startswith(token), (token, offset)
    assert said["text_offset"] == sorted(said["text_offset"])
    assert (places[0][1], text.startswith(PROMPT)) == (0, echo)


@pytest.mark.parametrize("path", [CHAT])
def test_the_bytes_of_split_characters_make_the_text(cluster: Cluster, path: str) -> None:
    choice = whole(cluster, path, body_of(path, {"logprobs": 1, "max_tokens": 48}))["choices"][0]
    joined = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
    assert joined.decode(errors="replace").rstrip("\ufffd") == text_of(choice).rstrip("\ufffd")
