"""`/v1/audio/transcriptions` through a router, by OpenAI's client. The workers are scripted: no model that
hears runs on a CPU here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from pdserve.router.config.limits import Limits
from pdserve.router.config.tenants import Access, Tenant
from pdserve.router.tenants.api_keys import key_line
from tests.support.router.harness import Harness, before
from tests.support.router.mock_worker import DONE, MockWorker, Received, Wire, answer, stream

PATH = "/v1/audio/transcriptions"
SOUND = b"RIFF" + bytes(range(256)) * 200
SAID = {"text": "hello", "usage": {"type": "duration", "seconds": 2}}
ALICE = "alice-" + "a" * 20


@asynccontextmanager
async def hearing(**config: Any) -> AsyncIterator[tuple[Harness, MockWorker, AsyncOpenAI]]:
    worker = MockWorker("decode", "whisper", is_multimodal=True, takes_salt_header=True)
    async with before(worker, **config) as harness:
        worker.script(PATH, *[answer(200, SAID)] * 9)
        async with AsyncOpenAI(base_url=f"{harness.url}/v1", api_key=ALICE, max_retries=0) as client:
            yield harness, worker, client


async def test_the_form_arrives_byte_for_byte_and_the_answer_comes_back_as_text_or_as_a_stream() -> None:
    async def plain(wire: Wire, _: Received) -> None:
        await wire.body(200, b"hello", "text/plain; charset=utf-8")

    chunk = b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hel"}}]}\n\n'
    async with hearing() as (harness, worker, client):
        asked: Any = {"file": ("a.wav", SOUND), "model": "whisper"}
        said = await client.audio.transcriptions.create(**asked, language="en", response_format="json")
        assert said.text == "hello"
        [request] = worker.got(PATH)
        assert request.headers["content-type"].startswith("multipart/form-data; boundary=")
        assert SOUND in request.body
        assert b'name="language"' in request.body
        worker.scripts[PATH].appendleft(plain)
        assert await client.audio.transcriptions.create(**asked, response_format="text") == "hello"
        worker.scripts[PATH].appendleft(stream([chunk, DONE]))
        body = b'--b\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n--b--\r\n'
        streamed = await harness.post(PATH, body, {"content-type": "multipart/form-data; boundary=b"})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.body == chunk + DONE


async def test_the_models_of_forms_are_checked_and_what_is_no_form_or_too_large_is_refused() -> None:
    limits = Limits(body_bytes=60_000)
    async with hearing(aliases={"ears": "whisper"}, limits=limits) as (harness, worker, client):
        assert (await client.audio.transcriptions.create(file=("a", SOUND), model="ears")).text == "hello"
        assert SOUND in worker.got(PATH)[0].body
        with pytest.raises(NotFoundError):
            await client.audio.transcriptions.create(file=("a", SOUND), model="nobody")
        refused = await harness.post(PATH, {"model": "whisper"})
        assert refused.status == 400
        assert "multipart/form-data" in refused.error["message"]
        with pytest.raises(Exception, match="larger than 60000 bytes"):
            await client.audio.transcriptions.create(file=("a.wav", SOUND * 2), model="whisper")
        assert len(worker.got(PATH)) == 1


async def test_a_tenant_has_a_cache_of_its_own_and_pays_for_the_sound(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(key_line("alice", ALICE))
    access = Access(keys_file=tmp_path / "keys")
    tenants = (Tenant(name="alice", tokens_min=1000),)
    async with hearing(access=access, tenants=tenants) as (harness, worker, client):
        await client.audio.transcriptions.create(file=("a.wav", SOUND), model="whisper")
        [request] = worker.got(PATH)
        assert request.headers["x-pdserve-cache-salt"] == '"tenant/alice"'
        assert harness.router.gate.tenants.all[0].use.prompt_tokens == len(request.body) // 640
