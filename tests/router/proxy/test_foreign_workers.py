"""vLLM servers behind the router: what they can do goes on as ever, and what they lack is named."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from pdserve.router.config.limits import Probe
from pdserve.router.config.tenants import Access
from pdserve.router.fleet.worker import WITHOUT
from tests.support.router.harness import CHAT, before, chat_body, disagg
from tests.support.router.mock_worker import ANSWER, STREAM, MockWorker, answer
from tests.support.router.vllm_worker import VllmWorker

OFTEN = Probe(interval_s=0.01)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def test_a_vllm_server_joins_and_what_it_lacks_is_named() -> None:
    async with disagg(make=VllmWorker) as (harness, _, _):
        said = (await harness.get("/ready")).json()
        assert said["ready"]
        assert [(one["role"], one["engine"], one["model"]) for one in said["workers"]] == [
            ("prefill", "vllm", "m"),
            ("decode", "vllm", "m"),
        ]
        assert [one["absent"] for one in said["workers"]] == [WITHOUT, WITHOUT]
        [card] = (await harness.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("m", 4096)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_is_prefilled_by_a_request_for_one_token(is_stream: bool) -> None:
    async with disagg(make=VllmWorker) as (harness, [prefill], [decode]):
        more: dict[str, Any] = (
            {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        )
        answered = await harness.chat(tools=TOOLS, max_tokens=50, min_tokens=3, n=1, **more)
        assert answered.status == 200
        assert answered.body == (STREAM if is_stream else ANSWER)
        [first], [second] = prefill.asked(), decode.asked()
        assert first.path == second.path == CHAT
        asked = chat_body(tools=TOOLS, max_tokens=50, min_tokens=3, n=1, **more)
        assert second.json() == asked
        one_token = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0, "n": 1}
        assert first.json() == asked | one_token | {"stream": False, "stream_options": None}
        assert "stage=one-token" in answered.headers["x-pdserve-plan"]
        assert answered.headers["x-pdserve-prefill"] == prefill.id
        assert harness.stats.prefill["ok"] == 1


async def test_completions_and_messages_have_a_prefill_stage_too() -> None:
    async with disagg(make=VllmWorker) as (harness, [prefill], _):
        await harness.post("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 9})
        messages = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        await harness.post("/v1/messages", messages)
        assert [(one.path, one.json()["max_tokens"]) for one in prefill.asked()] == [
            ("/v1/completions", 1),
            ("/v1/messages", 1),
        ]


@pytest.mark.parametrize("status", [500, 400])
async def test_a_prefill_worker_that_fails_costs_the_stage_and_one_that_refuses_is_heard(status: int) -> None:
    async with disagg(make=VllmWorker) as (harness, [prefill], [decode]):
        prefill.script(CHAT, answer(status, {"error": {"message": "no such field", "type": "X"}}))
        answered = await harness.chat()
        if status == 500:
            assert (answered.status, answered.body) == (200, ANSWER)
            assert "stage=status-500" in answered.headers["x-pdserve-plan"]
        else:
            assert (answered.status, answered.error["message"]) == (400, "no such field")
        assert len(decode.asked()) == (status == 500)


async def test_nobody_waits_for_pages_or_pulls_them_where_that_cannot_be_asked() -> None:
    async with disagg(make=VllmWorker, pull_ahead_tokens=100) as (harness, workers_p, workers_d):
        session = {"x-session-id": "s"}
        await harness.chat(session)
        long = [{"role": "user", "content": "word " * 400}]
        answered = await harness.chat(session, messages=long)
        assert {"settle=absent", "pull=absent"} <= set(answered.headers["x-pdserve-plan"].split(", "))
        asked = {one.path for worker in (*workers_p, *workers_d) for one in worker.asked()}
        assert asked == {CHAT}


async def test_engines_share_no_pages_so_the_second_one_is_refused() -> None:
    sglang, vllm = MockWorker("decode"), VllmWorker("decode")
    async with before(sglang, probe=OFTEN) as harness:
        await vllm.start()
        harness.router.fleet.members.join(vllm.url, "decode")
        await harness.until(lambda: any(one.refused for one in harness.router.fleet.workers))
        [refused] = [one.refused for one in harness.router.fleet.workers if one.refused]
        assert "differ in engine ('vllm' and 'sglang')" in refused
        await vllm.stop()


class PlainSglang(VllmWorker):
    owned_by = "sglang"


async def test_a_server_of_neither_kind_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    async with disagg(make=PlainSglang) as (harness, _, _):
        assert (await harness.chat()).status == 503
        assert "has no /pd/ready and is no server of vLLM (its /v1/models says 'sglang')" in caplog.text


async def test_health_is_followed_and_a_worker_of_the_other_kind_can_take_the_port() -> None:
    worker = VllmWorker("decode")
    async with before(worker, probe=OFTEN) as harness:
        [seen] = harness.router.fleet.workers
        assert seen.ready
        worker.ready = False
        await harness.until(lambda: not seen.ready)
        worker.ready = True
        await harness.until(lambda: seen.ready)
        port = worker.port
        await worker.stop()
        await harness.until(lambda: not seen.ready)
        other = MockWorker("decode")
        await other.start(port)
        await harness.until(lambda: seen.ready)
        assert (seen.info.engine, seen.lacks("settled")) == ("sglang", False)  # type: ignore[union-attr]
        await other.stop()


def plain(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()[:32]


async def test_salts_have_no_slash_where_the_cache_takes_none(tmp_path: Path) -> None:
    """LMCache's keys refuse one."""
    key_file = tmp_path / "keys"
    key_file.write_text(f"acme sha256:{hashlib.sha256(b'k').hexdigest()}\n")
    access = Access(keys_file=key_file)
    key = {"authorization": "Bearer k"}
    async with disagg(make=VllmWorker, access=access) as (harness, _, [decode]):
        assert (await harness.chat(key)).status == 200
        assert (await harness.chat(key, cache_salt="a/b")).status == 200
        salts = [one.json()["cache_salt"] for one in decode.asked()]
        assert salts == [plain("tenant/acme"), plain("tenant/acme/a/b")]
    async with disagg(make=VllmWorker) as (harness, _, [decode]):
        assert (await harness.chat(cache_salt="a/b")).status == 200
        assert (await harness.chat()).status == 200
        assert [one.json().get("cache_salt") for one in decode.asked()] == [plain("shared/a/b"), None]
