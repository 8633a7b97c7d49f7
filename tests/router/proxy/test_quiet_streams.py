"""Streams in which nothing comes for a while: the head goes out early, and comments follow, so that clients
and proxies on the way do not give up. All else that can happen to a request still can, and is told in the
stream.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdserve.router.request import request as answers
from tests.support.router.harness import CHAT, PATIENT, Connection, Harness, disagg
from tests.support.router.mock_worker import (
    ANSWER,
    DONE,
    EVENTS,
    STREAM,
    Gate,
    Received,
    Wire,
    hang,
    held,
    stream,
)
from tests.support.router.streams import FIRST, REST, WHOLE, marked, telling

IMPATIENT = msgspec.structs.replace(PATIENT, early_head_s=0.05)
COMMENT = b": keep-alive\n\n"
EARLY_S = 0.05
MESSAGES, RESPONSES, COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/completions"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait for nothing longer than a moment."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", EARLY_S)


async def comments(client: Connection, count: int) -> bytes:
    """The next comments, and the event before them if there is one."""
    seen = b""
    while seen.count(COMMENT) < count:
        seen += await client.chunk()
    return seen


async def rest(client: Connection) -> bytes:
    """What still comes, without comments."""
    seen = b""
    while chunk := await client.chunk():
        seen += chunk
    return seen.replace(COMMENT, b"")


async def asked(harness: Harness, path: str = CHAT, **more: Any) -> Connection:
    body = {"prompt": "hi", "input": "hi", "max_tokens": 4, "stream": True}
    return await harness.asking(path=path, **(body | more))


class Moment:
    """Tells that the router's sweep of deadlines has come to it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.is_over = False

    def expire(self) -> None:
        self.is_over = True


async def quiet(harness: Harness, quiet_s: float = 4 * EARLY_S) -> None:
    """Until the router has had several occasions to send a comment."""
    deadlines = harness.router.upstream.deadlines
    moment = Moment(deadlines.loop.time() + quiet_s)
    deadlines.watched.add(moment)
    await harness.until(lambda: moment.is_over)
    deadlines.watched.discard(moment)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_head_goes_out_before_the_first_event_and_comments_follow(at: str) -> None:
    async with disagg(deadlines=IMPATIENT) as (harness, [prefill], [decode]):
        gate = Gate()
        if at == "prefill":
            prefill.script("/pd/prefill", held(gate, {}, 500))
        else:
            decode.script(CHAT, stream(EVENTS, gate, -1))
        client = await asked(harness)
        head = await client.head()
        assert head.status == 200
        assert head.headers["content-type"].startswith("text/event-stream")
        assert (head.headers["cache-control"], head.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert "decode=" in head.headers["x-pdserve-plan"]
        assert {"server-timing", "x-pdserve-decode", "content-length"}.isdisjoint(head.headers)
        assert await comments(client, 3) == 3 * COMMENT
        assert harness.stats.requests == {}
        gate.open.set()
        assert await rest(client) == STREAM
        await harness.settle()
        assert harness.stats.requests == {(CHAT, "200"): 1}


async def test_a_stream_that_begins_soon_has_all_its_headers_and_no_comment() -> None:
    async with disagg() as (harness, _, _):
        for path in (CHAT, CHAT + "?a=b"):
            whole = await (await asked(harness, path)).response()
            assert whole.body == STREAM
            assert (whole.headers["cache-control"], whole.headers["x-accel-buffering"]) == ("no-cache", "no")
            assert {"server-timing", "x-pdserve-decode", "x-pdserve-prefill"} <= set(whole.headers)


async def test_a_worker_says_nothing_of_its_own_of_how_a_stream_is_stored() -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        decode.script(CHAT, telling("cache-control: max-age=9\r\nx-accel-buffering: yes\r\n"))
        client = await asked(harness)
        lines = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        assert lines.count(b"cache-control:") == lines.count(b"x-accel-buffering:") == 1
        assert b"x-accel-buffering: no\r\n" in lines


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate", MESSAGES, RESPONSES])
async def test_a_refusal_after_the_head_is_an_event_in_the_apis_own_form(path: str) -> None:
    said = {
        "error": {"message": "n is too large", "type": "invalid_request_error", "param": "n", "code": None}
    }
    async with disagg(deadlines=IMPATIENT, prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(path, held(gate, said, 400))
        client = await asked(harness, path)
        await client.head()
        await comments(client, 1)
        gate.open.set()
        event, *end = (await rest(client)).split(b"\n\n")
        assert end == ([b""] if path in (MESSAGES, RESPONSES) else [b"data: [DONE]", b""])
        name, _, data = event.rpartition(b"data: ")
        told = json.loads(data)
        if path == RESPONSES:
            assert name == b"event: error\n"
            assert (told["type"], told["message"], told["param"]) == ("error", "n is too large", "n")
        elif path == MESSAGES:
            assert name == b"event: error\n"
            assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
            assert told["error"]["message"] == "n is too large"
        else:
            assert name == b""
            assert told == said
        await harness.settle()
        assert harness.stats.requests == {(path, "400"): 1}
        assert harness.router.fleet.workers[0].circuit.failures == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("trouble", ["closed", "status-500"])
async def test_another_worker_answers_after_an_early_head_as_before_it(trouble: str) -> None:
    async with disagg(deadlines=IMPATIENT, prefill=0, decode=2) as (harness, _, decodes):
        gate = Gate()
        for worker in decodes:
            worker.script(CHAT, hang(gate) if trouble == "closed" else held(gate, {}, 500))
        client = await asked(harness)
        await client.head()
        await comments(client, 1)
        [first] = [worker for worker in decodes if worker.requests]
        [other] = [worker for worker in decodes if not worker.requests]
        other.scripts.clear()
        gate.open.set()
        assert await rest(client) == STREAM
        assert len(first.requests) == len(other.requests) == 1
        assert harness.stats.decode_retries == {trouble: 1}


@pytest.mark.usefixtures("impatient")
async def test_a_deadline_after_the_head_is_told_in_the_stream() -> None:
    soon = msgspec.structs.replace(IMPATIENT, first_byte_s=0.3)
    async with disagg(prefill=0, deadlines=soon) as (harness, _, [decode]):
        decode.script(CHAT, hang())
        whole = await (await asked(harness)).response()
        assert whole.status == 200
        assert b'"worker_unavailable"' in whole.body
        await harness.settle()
        assert harness.stats.requests == {(CHAT, "504"): 1}


@pytest.mark.usefixtures("impatient")
async def test_a_whole_answer_to_a_stream_that_has_its_head_is_a_fault_and_not_passed_on() -> None:
    async with disagg(deadlines=IMPATIENT, prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, held(gate, {"text": "whole"}, 200))
        client = await asked(harness)
        await client.head()
        gate.open.set()
        said = await rest(client)
        assert b"whole" not in said
        assert b"error" in said


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_answers_whole_in_time_is_passed_on_though_its_body_is_late() -> None:
    gate = Gate()

    async def script(wire: Wire, request: Received) -> None:
        await wire.head(200, "application/json", len(ANSWER))
        await gate.passed()
        await wire.raw(ANSWER)

    in_time = msgspec.structs.replace(PATIENT, early_head_s=1.0)  # also where this process pauses
    async with disagg(deadlines=in_time, prefill=0) as (harness, _, [decode]):
        decode.script(CHAT, script)
        client = await asked(harness)
        await gate.reached.wait()
        worker = harness.router.fleet.workers[0]
        await harness.until(lambda: worker.in_flight == 1)
        await quiet(harness, 1.2)
        gate.open.set()
        assert (await client.response()).body == ANSWER


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_pauses_has_comments_between_its_events_only() -> None:
    cut = b'data: {"text": "' + b"x" * (1024 * 1024)
    async with disagg(deadlines=IMPATIENT, prefill=0) as (harness, _, [decode]):
        gates = Gate(), Gate()

        async def script(wire: Wire, request: Received) -> None:
            await wire.head(200, "text/event-stream")
            await wire.chunk(EVENTS[0])
            await gates[0].passed()
            await wire.chunk(cut)  # so long that it is passed on before its end
            await gates[1].passed()
            await wire.chunk(b'"}\n\n' + DONE)
            await wire.end()

        decode.script(CHAT, script)
        client = await asked(harness)
        await client.head()
        assert await comments(client, 2) == EVENTS[0] + 2 * COMMENT
        gates[0].open.set()
        await gates[1].reached.wait()
        seen = b""
        while not seen.endswith(cut[-1000:]):
            seen += await client.chunk()
        await quiet(harness)
        gates[1].open.set()
        assert seen.replace(COMMENT, b"") + await rest(client) == cut + b'"}\n\n' + DONE
        assert seen.endswith(cut)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_with_comments_is_continued_by_another_worker_where_it_was_lost() -> None:
    async with disagg(deadlines=IMPATIENT, prefill=0, decode=2) as (harness, _, decodes):
        gate = Gate()
        for worker in decodes:
            worker.script(CHAT, marked(*FIRST, gate=gate, cut=True))
            worker.script("/pd/continue", marked(*REST))
        client = await asked(harness, temperature=0)
        await client.head()
        seen = await comments(client, 2)
        gate.open.set()
        assert seen.replace(COMMENT, b"") + await rest(client) == WHOLE.replace(b'"two"', b'"one"')


@pytest.mark.usefixtures("impatient")
async def test_who_wants_no_stream_gets_a_status_and_no_comment() -> None:
    async with disagg(deadlines=IMPATIENT, prefill=0) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, held(gate, {"error": {"message": "no"}}, 400))
        client = await harness.asking()
        await gate.reached.wait()
        await quiet(harness)
        gate.open.set()
        assert (await client.response()).status == 400


@pytest.mark.usefixtures("impatient")
async def test_who_leaves_a_stream_that_has_only_its_head_ends_it_at_the_worker() -> None:
    async with disagg(deadlines=IMPATIENT, prefill=0) as (harness, _, [decode]):
        decode.script(CHAT, hang())
        client = await asked(harness)
        await client.head()
        client.leave()
        await decode.wait_until(lambda: decode.disconnected == 1)
        await harness.settle()
        assert harness.stats.requests == {(CHAT, "aborted"): 1}
