"""A mock worker that answers any request in SGLang's forms, and knows what it used: the oracle of charges.

A word is a token. Members of the body, which the router passes on, say how much is answered: `test_lengths`
of the answers in tokens, and `test_held_after` so many events, when the stream stops until its client leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.router.mock_worker import DONE, MockWorker, Received, Wire

CHAT, COMPLETIONS, GENERATE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"


@dataclass
class Asked:
    """One request, as SGLang (0.5.23) takes it apart."""

    prompts: list[int]
    """Tokens of each."""
    choices: int
    lengths: list[int]
    """Output tokens of each answer: those to the first prompt, then those to the next."""
    is_batch: bool

    @property
    def usage(self) -> tuple[int, int]:
        """Prompt and output tokens; a prompt counts once, as in `UsageProcessor.calculate_response_usage`."""
        return sum(self.prompts), sum(self.lengths)


def asked(path: str, body: dict[str, Any]) -> Asked:
    given = body.get("input_ids") or body.get({CHAT: "messages", GENERATE: "text"}.get(path, "prompt"))
    is_list = isinstance(given, list) and path != CHAT and not isinstance(given[0], int)
    if path == CHAT and not body.get("input_ids"):
        prompts = [sum(3 + words(message["content"]) for message in given)]
    else:
        prompts = [
            words(one) if isinstance(one, str) else len(one) for one in (given if is_list else [given])
        ]
    choices = (body.get("sampling_params") or {} if path == GENERATE else body).get("n") or 1
    count = len(prompts) * choices
    lengths = list(itertools.islice(itertools.cycle(body.get("test_lengths", [1])), count))
    return Asked(prompts, choices, lengths, is_list or choices > 1)


def words(text: str) -> int:
    return len(text.split())


def usage_of(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


class CountingWorker(MockWorker):
    """See the module's docstring."""

    async def _default(self, wire: Wire, request: Received) -> None:
        endpoint = request.target.partition("endpoint=")[2]
        if request.path == "/pd/prefill":
            prompts = asked(endpoint, request.json()).prompts
            cached = {"device": 0, "host": 0, "pool": 0}
            report = {"prompt_tokens": sum(prompts), "cached": cached, "published_pages": 0}
            by_prompt = [[0, 0, 0] for _ in prompts]
            more = {"cached_by_prompt": by_prompt, "missing_pages": 0, "prefill_ms": 1.0, "publish_ms": 1.0}
            await wire.json(200, report | more)
        elif request.path == TOKENIZE:
            await wire.json(200, tokenized(request.json()))
        elif request.path in (CHAT, COMPLETIONS, GENERATE):
            body = request.json()
            one = asked(request.path, body)
            if body.get("stream"):
                await self._stream(wire, request, body, one)
            else:
                data = json.dumps(whole(request.path, one)).encode()
                await wire.head(200, "application/json", len(data), told(one.prompts))
                await wire.raw(data)
        else:
            await super()._default(wire, request)

    async def _stream(self, wire: Wire, request: Received, body: dict[str, Any], one: Asked) -> None:
        tells = request.headers.get("x-pdserve-marks") == "1"
        marks = tells and not one.is_batch
        extra = told(one.prompts[:1]) + ("x-pdserve-marks: 1\r\n" if tells else "")
        await wire.head(200, "text/event-stream; charset=utf-8", extra=extra)
        if tells and not marks:
            await wire.chunk(b": pd off\n\n")
        for number, data in enumerate(events(request.path, body, one)):
            if number == body.get("test_held_after"):
                await asyncio.Event().wait()
            await wire.chunk(data + (b": pd %d %d 7\n\n" % (number + 1, number) if marks else b""))
        if (body.get("stream_options") or {}).get("include_usage"):
            await wire.chunk(
                b"data: " + json.dumps({"choices": [], "usage": usage_of(*one.usage)}).encode() + b"\n\n"
            )
        usage = b": pd-usage %d %d\n\n" % one.usage if tells else b""
        await wire.chunk(usage + DONE)
        await wire.end()


def told(prompts: list[int]) -> str:
    """The head of a stream tells of the first prompt only: the others are not known yet."""
    return f"x-pdserve-cached: device=0, host=0, pool=0, computed={sum(prompts)}\r\n"


def tokenized(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body["prompt"]
    count = words(prompt) if isinstance(prompt, str) else [words(text) for text in prompt]
    return {"tokens": [], "count": count, "max_model_len": 4096}


def whole(path: str, one: Asked) -> Any:
    if path != GENERATE:
        choices = [{"index": i, "text": 'a "b"'} for i in range(len(one.lengths))]
        return {"id": "1", "choices": choices, "usage": usage_of(*one.usage)}
    answers = [
        {"text": "a", "meta_info": {"id": "1"} | usage_of(one.prompts[i // one.choices], length)}
        for i, length in enumerate(one.lengths)
    ]
    return answers if one.is_batch else answers[0]


def events(path: str, body: dict[str, Any], one: Asked) -> Iterator[bytes]:
    """One token each; those of several answers come mixed."""
    continuous = (body.get("stream_options") or {}).get("continuous_usage_stats")
    for step in range(max(one.lengths)):
        for i, length in enumerate(one.lengths):
            if step >= length:
                continue
            usage = usage_of(one.prompts[i // one.choices], step + 1)
            if path == GENERATE:
                said: dict[str, Any] = {"text": "a" * step, "meta_info": {"id": "1"} | usage}
                if one.is_batch:
                    said["index"] = i
            else:
                said = {"id": "1", "choices": [{"index": i}], "usage": usage if continuous else None}
            yield b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"
