"""Streams and long answers: many at once, cut at events, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import resource
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.config.limits import Deadlines, Probe
from pdserve.router.proxy import decode as decode_module
from pdserve.router.request.stream_marks import MAX_HELD_BYTES, split_events
from tests.support.router.harness import CHAT, Connection, Harness, chat_body, disagg
from tests.support.router.mock_worker import (
    EVENTS,
    STREAM,
    CloseConnection,
    Gate,
    Received,
    Script,
    Wire,
    answer,
    close,
    hang,
    stream,
)
from tests.support.router.process import RouterProcess
from tests.support.router.raw_load import Load, mock_workers, run_load

COUNT = 200


@pytest.mark.timeout(60)
async def test_two_hundred_streams_at_once_without_error_or_leak() -> None:
    async with disagg(prefill=2, decode=2) as (harness, prefills, decodes):
        gate = Gate()
        for decode in decodes:
            decode.script(CHAT, *[stream(EVENTS, gate, gate_after=2)] * COUNT)
        asking = [asyncio.create_task(harness.chat(stream=True, i=i)) for i in range(COUNT)]
        for decode in decodes:
            await decode.wait_until(lambda decode=decode: len(decode.requests) == COUNT // 2)
        assert [worker.in_flight for worker in harness.router.fleet.workers[2:]] == [COUNT // 2] * 2
        gate.open.set()
        responses = await asyncio.gather(*asking)
        assert {response.body for response in responses} == {STREAM}
        assert [len(prefill.requests) for prefill in prefills] == [COUNT // 2] * 2
        assert harness.stats.requests == {(CHAT, "200"): COUNT}


async def test_requests_however_they_end_leave_nothing_to_the_garbage_collector() -> None:
    async with disagg(decode=2) as (harness, _, decodes):
        for decode in decodes:
            decode.script(CHAT, stream(EVENTS), close(), answer(503, {}), stream(EVENTS))
        await harness.chat(stream=True)
        gc.collect()
        gc.freeze()  # what was made before is not looked through
        gc.disable()
        try:
            for _ in range(4):
                await harness.chat(stream=True)
                await harness.chat()
            gate = Gate()
            decodes[0].script(CHAT, *[hang(gate)] * 2)
            decodes[1].script(CHAT, *[hang(gate)] * 2)
            leaving = await harness.asking()
            await gate.reached.wait()
            leaving.leave()
            await harness.settle()
            for worker in harness.router.fleet.workers:
                harness.router.upstream.cut_worker(worker)
            await asyncio.sleep(0.1)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(thing).__qualname__ for thing in gc.garbage if is_the_routers(thing)}
            assert left == set()
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()


def is_the_routers(thing: object) -> bool:
    return type(thing).__module__.startswith(("pdserve.", "uvicorn."))


BYTES = st.text("ab\n\r").map(str.encode)


@given(st.lists(BYTES))
def test_cutting_at_events_loses_and_changes_nothing(chunks: list[bytes]) -> None:
    sent, held = b"", b""
    for chunk in chunks:
        ready, held = split_events(held + chunk)
        assert ready == b"" or ready.endswith((b"\n\n", b"\r\n\r\n"))
        sent += ready
    assert sent + held == b"".join(chunks)
    assert b"\n\n" not in held
    assert b"\r\n\r\n" not in held


def test_an_endless_event_is_not_held_for_ever() -> None:
    data = b"x" * (MAX_HELD_BYTES + 1)
    assert split_events(data) == (data, b"")


# --- Answers that are no streams and too long to be held, and workers that fail fast


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


# --- The client leaves, in every phase: what was under way for it is cut at once and nothing is left over


SLOW = Deadlines(settle_s=100.0, prefill_s=100.0, total_s=200.0)
"""A worker that is hung up on within the test was hung up on for the client that left."""


async def ask_with_a_large_body(harness: Harness) -> Connection:
    client, body = await harness.connect(), json.dumps(chat_body(padding="x" * 200_000)).encode()
    await client.send(CHAT, b"", {"content-length": str(len(body))})
    await harness.until_in_flight()
    client.writer.write(body)
    return client


async def ask_and_ask_again(harness: Harness, target: str = CHAT) -> Connection:
    """Two more requests lie behind the one that is answered."""
    client = await harness.asking()
    for _ in range(2):
        await client.send(target, json.dumps(chat_body(padding="x" * 20_000)).encode())
    return client


async def ask_a_second_time(harness: Harness) -> Connection:
    client = await harness.connect()
    await client.send("/tokenize", json.dumps(chat_body()).encode())
    assert (await client.response()).status == 200
    await client.send(CHAT, json.dumps(chat_body()).encode())
    return client


@pytest.mark.parametrize(
    "ask",
    [
        Harness.asking,
        ask_with_a_large_body,
        ask_a_second_time,
        ask_and_ask_again,
        functools.partial(ask_and_ask_again, target=CHAT + "?by=asgi"),
        functools.partial(ask_and_ask_again, target="/health"),
    ],
    ids=["simply", "large body", "second request", "direct behind", "asgi behind", "ordinary behind"],
)
async def test_who_leaves_during_prefill_ends_it_and_asks_no_decode_worker(
    ask: Callable[[Harness], Awaitable[Connection]],
) -> None:
    async with disagg(deadlines=SLOW) as (harness, [prefill], [decode]):
        gate = Gate()
        prefill.script("/pd/prefill", hang(gate))
        client = await ask(harness)
        await gate.reached.wait()
        client.leave()
        await prefill.wait_until(lambda: prefill.disconnected == 1)
        await harness.assert_nothing_leaked()
        assert decode.got(CHAT) == []
        assert harness.stats.client_aborts == {"prefill": 1}


async def test_leaving_while_still_sending_the_body() -> None:
    async with disagg() as (harness, [prefill], _):
        client = await harness.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-length: 99\r\n\r\n{{"
        client.writer.write(head.encode())
        await client.writer.drain()
        await harness.until_in_flight()
        client.leave()
        await harness.assert_nothing_leaked()
        assert prefill.requests == []
        assert harness.stats.client_aborts == {"body": 1}


async def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    async with disagg() as (harness, _, [decode]):
        sent = 0

        async def flood(wire, request) -> None:  # type: ignore[no-untyped-def]
            nonlocal sent
            await wire.head(200, "text/event-stream")
            while True:
                await wire.chunk(b"data: " + b"x" * 65536 + b"\n\n")
                sent += 1

        decode.script(CHAT, flood)
        client = await harness.asking(stream=True)
        await client.head()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        before = -1
        while before != sent < 1000:  # until back-pressure has reached the worker
            before = sent
            for _ in range(100):
                await asyncio.sleep(0)
        assert sent < 1000  # what sockets and buffers hold: 10 MB
        assert (await harness.chat()).status == 200
        client.leave()
        await decode.wait_until(lambda: decode.disconnected == 1)
        await harness.assert_nothing_leaked()


async def test_a_client_that_reads_by_fits_gets_every_byte_in_order() -> None:
    async with disagg() as (harness, _, [decode]):
        events = [b"data: %d" % number + b"x" * 8192 + b"\n\n" for number in range(1500)]
        decode.script(CHAT, stream(events))
        client = await harness.connect()
        transport: Any = client.writer.transport
        await client.send(CHAT, json.dumps(chat_body(stream=True)).encode())
        answer = asyncio.ensure_future(client.response())
        for number in range(40):
            (transport.resume_reading if number % 2 else transport.pause_reading)()
            for _ in range(50):
                await asyncio.sleep(0)
        assert (await asyncio.wait_for(answer, 30)).body == b"".join(events)


MANY = 1000


OPEN_FILES = 8192


@pytest.fixture
def many_files() -> Iterator[None]:
    """Clients, router and workers are one process here: four ends of connections for each stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        pytest.skip(f"needs {OPEN_FILES} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, OPEN_FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.extended
@pytest.mark.usefixtures("many_files")
@pytest.mark.timeout(240)
async def test_a_thousand_streams_again_and_again_leave_memory_and_descriptors_as_they_were(
    tmp_path: Path,
) -> None:
    options = [f"--{name}-s=120" for name in ("deadlines.connect", "deadlines.prefill", "probe.timeout")]
    load = Load(streams=MANY, seconds=0.5, chunks=3, interval_us=500_000, ramp_s=1.5, warm_up_s=0.5)
    with mock_workers("prefill", tmp_path) as prefill, mock_workers("decode", tmp_path) as decode:
        urls = [f"http://127.0.0.1:{port}" for worker in (prefill, decode) for port in worker.ports]
        router = await RouterProcess.start("--prefill", urls[0], "--decode", urls[1], *options)
        await router.listening()
        process = psutil.Process(*router.children)
        at_rest, memory_bytes = process.num_fds(), []
        for _ in range(3):
            done, _, at_once = await run_load(load, router.port, process.num_fds)
            assert (done.errors, done.first_error) == (0, "")
            assert at_once > at_rest + MANY
            async with asyncio.timeout(60):  # connections close
                while process.num_fds() > at_rest:  # noqa: ASYNC110 - another process has no event for it
                    await asyncio.sleep(0.05)
            memory_bytes.append(process.memory_info().rss)
        assert memory_bytes[2] <= 1.1 * memory_bytes[1], memory_bytes
        router.process.terminate()
        assert (await router.ended())[0] == 0
