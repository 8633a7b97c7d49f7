"""The three kinds of a prompt's tokens, as Anthropic's API counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic import serving

from pdserve.engine.http.request import HttpRequest, RequestTracking, current_request
from pdserve.engine.sglang import anthropic_usage

PAGE = 16


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    usage_of = serving._anthropic_usage_from_openai
    monkeypatch.setattr(serving, "_anthropic_usage_from_openai", usage_of)
    anthropic_usage.install(PAGE)
    anthropic_usage.install(PAGE)
    yield
    assert serving._anthropic_usage_from_openai.plain is getattr(usage_of, "plain", usage_of)


def told(prompt: int, cached: int, *, is_marked: bool, include_input: bool = True) -> dict[str, Any]:
    details = SimpleNamespace(cached_tokens=cached)
    usage = SimpleNamespace(prompt_tokens=prompt, completion_tokens=3, prompt_tokens_details=details)
    made: list[Any] = []

    async def app(*_: Any) -> None:
        request = current_request()
        assert isinstance(request, HttpRequest)
        request.marks_cache = is_marked
        kinds = {"include_input": include_input, "include_output": True}
        made.append(serving._anthropic_usage_from_openai(usage, **kinds))

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    scope = {"type": "http", "path": "/v1/messages", "headers": [], "method": "POST"}
    asyncio.run(RequestTracking(app)(scope, receive, send))
    said: dict[str, Any] = made[0].model_dump(exclude_none=True)
    return said


@pytest.mark.parametrize(
    ("prompt", "cached", "created"), [(100, 0, 96), (100, 64, 32), (100, 96, 0), (10, 0, 0), (96, 80, 16)]
)
def test_of_a_marked_prompt_the_whole_pages_that_were_computed_are_created(
    prompt: int, cached: int, created: int
) -> None:
    assert told(prompt, cached, is_marked=True) == {
        "input_tokens": prompt - cached - created,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created,
        "output_tokens": 3,
    }


def test_of_other_prompts_nothing_is() -> None:
    said = {"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 3}
    assert told(100, 64, is_marked=False) == said
    assert told(100, 0, is_marked=False) == {"input_tokens": 100, "output_tokens": 3}


@pytest.mark.parametrize("is_marked", [True, False])
def test_never_more_was_read_than_the_prompt_has(*, is_marked: bool) -> None:
    assert told(10, 64, is_marked=is_marked)["cache_read_input_tokens"] == 10


def test_what_does_not_speak_of_the_prompt_stays() -> None:
    assert told(100, 0, is_marked=True, include_input=False) == {"output_tokens": 3}
