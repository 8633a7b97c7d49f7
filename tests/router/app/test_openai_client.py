"""The official client against the router."""

from __future__ import annotations

import openai
import pytest

from tests.support.router.harness import disagg
from tests.support.router.mock_worker import EVENTS, answer, close

CHAT = "/v1/chat/completions"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_the_official_client_reads_answers_streams_and_errors() -> None:
    async with (
        disagg() as (harness, _, [decode]),
        openai.AsyncOpenAI(base_url=harness.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["m"]
        whole = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Héllo"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="x", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        decode.script(CHAT, answer(400, {"object": "error", "message": "bad", "code": 400}))
        with pytest.raises(openai.BadRequestError, match="bad"):
            await client.chat.completions.create(model="m", messages=MESSAGES)


async def test_the_official_client_raises_when_a_stream_breaks_off() -> None:
    async with (
        disagg() as (harness, _, [decode]),
        openai.AsyncOpenAI(base_url=harness.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        begun = EVENTS[0] + EVENTS[1][:9]
        decode.script(CHAT, close(after=head + b"%x\r\n%b\r\n" % (len(begun), begun)))
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass
