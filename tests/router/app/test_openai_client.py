"""OpenAI's official client against the router, and embeddings."""

from __future__ import annotations

import openai
import pytest

from tests.support.router.harness import before, disagg
from tests.support.router.mock_worker import EVENTS, MockWorker, answer, close

CHAT = "/v1/chat/completions"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_the_official_client_reads_answers_streams_errors_and_streams_that_break_off() -> None:
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
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        begun = EVENTS[0] + EVENTS[1][:9]
        decode.script(CHAT, close(after=head + b"%x\r\n%b\r\n" % (len(begun), begun)))
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass


TENANTS_KEY = "key-of-acme-in-these-tests"


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
