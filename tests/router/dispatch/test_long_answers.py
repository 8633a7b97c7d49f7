"""Answers that are no streams and too long to be held, and workers that fail fast."""

from __future__ import annotations

import json

import pytest

from pdserve.router.config.limits import Deadlines, Probe
from pdserve.router.dispatch import decode as decode_module
from pdserve.router.upstream.connection import Response
from tests.support.router.harness import CHAT, disagg
from tests.support.router.mock_worker import CloseConnection, Gate, Received, Script, Wire, answer, hang

META = {"prompt_tokens": 7, "completion_tokens": 5}
PROMPTS = ["a"] * 2000
LONG = json.dumps([{"text": "x" * 900, "meta_info": META} for _ in PROMPTS]).encode()
NEVER = Probe(interval_s=3600.0)


def long_answer(is_chunked: bool, gate: Gate, cut: bool = False) -> Script:
    """Half of `LONG`, then the rest once the client has some of it."""

    async def script(wire: Wire, request: Received) -> None:
        half = len(LONG) // 2
        await wire.head(200, "application/json", None if is_chunked else len(LONG))
        send = wire.chunk if is_chunked else wire.raw
        await send(LONG[:half])
        await gate.passed()
        if cut:
            raise CloseConnection
        await send(LONG[half:])
        if is_chunked:
            await wire.end()

    return script


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_long_answer_is_passed_on_before_its_end_and_its_tokens_are_counted(
    is_chunked: bool, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "HELD_BYTES", 64 * 1024)
    async with disagg(prefill_endpoints=(), probe=NEVER) as (harness, _, [decode]):
        gate = Gate()
        decode.script("/generate", long_answer(is_chunked, gate, cut))
        client = await harness.asking(path="/generate", text=PROMPTS)
        head = await client.head()
        assert (head.status, "content-length" in head.headers) == (200, not is_chunked)
        body = await client.chunk() if is_chunked else await client.reader.readexactly(64 * 1024)
        assert len(body) >= 64 * 1024
        gate.open.set()
        rest = await client.reader.read() if cut else b""
        if not cut:
            while is_chunked and (piece := await client.chunk()):
                body += piece
            if not is_chunked:
                body += await client.reader.readexactly(len(LONG) - len(body))
            assert body == LONG
        else:
            assert b"error" not in rest
            assert not rest.endswith(b"0\r\n\r\n")
        await harness.settle()
        use = harness.router.gate.tenants.anonymous.use
        assert cut or (use.prompt_tokens, use.output_tokens) == (2000 * 7, 2000 * 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_only_a_stream_that_does_not_begin_is_held_against_its_worker(stream: bool) -> None:
    deadlines = Deadlines(first_byte_s=0.05 if stream else 0.01, whole_answer_s=0.05, settle_s=0.0)
    async with disagg(prefill_endpoints=(), probe=NEVER, deadlines=deadlines) as (harness, _, [decode]):
        decode.script(CHAT, *[hang()] * 3)
        for _ in range(3):
            assert (await harness.chat(stream=stream)).status == 504
        [worker] = [w for w in harness.router.fleet.workers if w.id == decode.id]
        assert worker.circuit.is_closed is not stream


async def test_an_answer_that_takes_longer_than_a_streams_first_byte_may_is_given() -> None:
    async with disagg(prefill_endpoints=(), probe=NEVER, deadlines=Deadlines(first_byte_s=0.001)) as (
        harness,
        _,
        [decode],
    ):
        gate = Gate()
        decode.script(CHAT, hang(gate))
        client = await harness.asking()
        await gate.reached.wait()
        deadlines = harness.router.upstream.deadlines
        [waiting] = [one for one in deadlines._watched if isinstance(one, Response)]
        assert waiting.deadline_s - deadlines.loop.time() > 1000
        client.leave()


async def test_a_worker_that_answers_500_fast_does_not_draw_all_requests() -> None:
    async with disagg(decode=2, prefill_endpoints=(), decode_policy="least_loaded", probe=NEVER) as (
        harness,
        _,
        [bad, good],
    ):
        bad.script(CHAT, *[answer(500, {"object": "error", "message": "no memory"})] * 100)
        for _ in range(30):
            assert (await harness.chat()).status == 200
        assert len(bad.requests) <= 4
        assert len(good.requests) == 30


async def test_a_request_that_fails_everywhere_opens_no_circuit() -> None:
    async with disagg(decode=2, prefill_endpoints=(), probe=NEVER) as (harness, _, decodes):
        for worker in decodes:
            worker.script(CHAT, *[answer(500, {"object": "error", "message": "bad grammar"})] * 100)
        for _ in range(10):
            assert (await harness.chat()).status == 500
        assert all(worker.circuit.is_closed for worker in harness.router.fleet.workers)
