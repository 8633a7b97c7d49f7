"""A decode worker is lost in mid-stream: another one goes on, or the client is told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Limits, Probe
from pdserve.router.dispatch.resume import Continue, may_resume
from tests.support.router.harness import FAST, Harness, Response, chat_body, disagg, run
from tests.support.router.mock_worker import (
    DONE,
    CloseConnection,
    Gate,
    MockWorker,
    Received,
    Script,
    Wire,
    answer,
    close,
    event,
    hang,
    raw_answer,
)

CHAT = "/v1/chat/completions"
CONTINUE = "/pd/continue"
GREEDY = {"temperature": 0, "stream": True}


def named(id_: str, content: str, finish: str | None = None) -> bytes:
    return event(content, finish).replace(b'"id": "0123"', f'"id":"{id_}"'.encode())


def marked(*pieces: bytes, cut: bool = False, gate: Gate | None = None, extra: str = "") -> Script:
    """A marked stream; cut off after its pieces, or held there, instead of ending."""

    async def script(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream", extra="x-pdserve-marks: 1\r\n" + extra)
        for piece in pieces:
            await wire.chunk(piece)
        if gate is not None:
            await gate.passed()
        if cut:
            raise CloseConnection
        await wire.end()

    return script


FIRST = (named("one", "Hé") + b": pd 2 0 7 8\n\n", named("one", "ll") + b": pd 4 2 9\n\n", named("one", "o"))
"""Three steps, the last not marked yet."""
REST = (named("two", "o") + b": pd 5 3 10\n\n", named("two", "", "stop") + DONE)
WHOLE = named("one", "Hé") + named("one", "ll") + named("one", "o") + named("one", "", "stop") + DONE


def lose(decodes: list[MockWorker], *scripts: Script) -> None:
    """Whoever gets the stream loses it; whoever is asked to go on does as `scripts` say."""
    for worker in decodes:
        worker.script(CHAT, marked(*FIRST, cut=True))
        worker.script(CONTINUE, *scripts)


async def ask(harness: Harness, **more: Any) -> Response:
    return await harness.chat(**(GREEDY | more))


def asked(decodes: list[MockWorker]) -> list[Received]:
    return [request for worker in decodes for request in worker.got(CONTINUE)]


def test_a_greedy_stream_goes_on_at_another_worker_and_the_client_cannot_tell() -> None:
    async def main() -> None:
        async with disagg(decode=2) as (harness, _, decodes):
            lose(decodes, marked(*REST))
            response = await ask(harness)
            assert response.body == WHOLE
            assert "x-pdserve-marks" not in response.headers
            [lost] = [worker for worker in decodes if worker.got(CHAT)]
            [request] = asked(decodes)
            assert not lost.got(CONTINUE)
            assert request.target == f"{CONTINUE}?endpoint={CHAT}"
            line, _, body = request.body.partition(b"\n")
            assert json.loads(line) == {"characters": 4, "token_ids": [7, 8, 9]}
            assert body == lost.got(CHAT)[0].body
            assert request.headers["x-request-id"] == response.headers["x-request-id"]
            assert harness.stats.continued == {"cut": 1}
            assert harness.stats.stream_errors == {}

    run(main())


@pytest.mark.parametrize(("min_prefill_tokens", "told"), [(10_000, "8/0/80"), (0, "8/0/16")])
def test_who_goes_on_is_told_what_was_cached_before_the_stream(min_prefill_tokens: int, told: str) -> None:
    """It finds what the lost worker has computed. Where a prefill worker computed that, its word counts."""

    async def main() -> None:
        async with disagg(
            decode=3, limits=Limits(decode_attempts=3), min_prefill_tokens=min_prefill_tokens
        ) as (
            harness,
            _,
            decodes,
        ):
            cached = "x-pdserve-cached: device=8, host=0, pool=16, ssd=64, computed=17\r\n"
            later = "x-pdserve-cached: device=0, host=0, pool=104, ssd=0, computed=1\r\n"
            rests = iter([marked(REST[0], cut=True, extra=later), marked(named("three", "", "stop") + DONE)])

            async def next_rest(wire: Wire, request: Received) -> None:
                await next(rests)(wire, request)

            for worker in decodes:
                worker.script(CHAT, marked(*FIRST, cut=True, extra=cached))
                worker.script(CONTINUE, next_rest)
            assert (await ask(harness)).body == WHOLE
            assert [one.headers["x-pdserve-prefilled"] for one in asked(decodes)] == [told, told]

    run(main())


def test_the_rest_can_be_lost_too() -> None:
    async def main() -> None:
        async with disagg(decode=3, limits=Limits(decode_attempts=3)) as (harness, _, decodes):
            rests = iter([marked(REST[0], cut=True), marked(named("three", "", "stop") + DONE)])

            async def next_rest(wire: Wire, request: Received) -> None:
                await next(rests)(wire, request)

            lose(decodes, next_rest)
            assert (await ask(harness)).body == WHOLE
            lines = [json.loads(request.body.partition(b"\n")[0]) for request in asked(decodes)]
            assert sorted(line["token_ids"] for line in lines) == [[7, 8, 9], [7, 8, 9, 10]]
            assert harness.stats.continued == {"cut": 2}

    run(main())


def test_a_worker_that_hangs_in_mid_stream_is_left() -> None:
    async def main() -> None:
        deadlines = msgspec.structs.replace(FAST, between_chunks_s=0.2)
        async with disagg(decode=2, deadlines=deadlines) as (harness, _, decodes):
            for worker in decodes:
                worker.script(CHAT, marked(*FIRST, gate=Gate()))
                worker.script(CONTINUE, marked(*REST))
            assert (await ask(harness)).body == WHOLE
            assert harness.stats.continued == {"timeout": 1}

    run(main())


def test_a_stream_lost_before_its_first_mark_is_asked_for_anew() -> None:
    async def main() -> None:
        async with disagg(decode=2) as (harness, _, decodes):
            for worker in decodes:
                worker.script(CHAT, marked(FIRST[2], cut=True), marked(FIRST[2] + DONE))
            decodes[1].scripts[CHAT].popleft()
            response = await ask(harness)
            assert response.body == FIRST[2] + DONE
            assert asked(decodes) == []

    run(main())


REFUSALS: dict[str, Script] = {
    "closed": close(),
    "status-400": answer(400, {"message": "no"}),
    "status-503": answer(503, {}),
    "protocol": raw_answer(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "timeout": hang(Gate()),
}


@pytest.mark.parametrize("reason", [*REFUSALS, "connect", "json"])
def test_when_nobody_goes_on_the_client_is_told(reason: str) -> None:
    async def main() -> None:
        deadlines = msgspec.structs.replace(FAST, between_chunks_s=0.2)
        async with disagg(decode=2, deadlines=deadlines) as (harness, _, decodes):
            lose(decodes, REFUSALS.get(reason, answer(200, {"choices": []})))
            if reason == "connect":
                gate = Gate()
                for worker in decodes:
                    worker.scripts.clear()
                    worker.script(CHAT, marked(*FIRST, gate=gate, cut=True))
                client = await harness.connect()
                await client.send(CHAT, json.dumps(chat_body(**GREEDY)).encode())
                await gate.reached.wait()
                [idle] = [worker for worker in decodes if not worker.got(CHAT)]
                await idle.stop()
                gate.open.set()
                body = (await client.response()).body
                client.leave()
            else:
                body = (await ask(harness)).body
            *events, last, empty = body.split(b"\n\n")
            assert empty == b""
            assert b"".join(e + b"\n\n" for e in events) == named("one", "Hé") + named("one", "ll")
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
            said = {"json": "protocol"}.get(reason, reason)
            assert harness.stats.stream_errors == {said: 1}

    run(main())


@pytest.mark.parametrize("more", [{"temperature": 1}, {"tools": [{"type": "function"}]}, {"n": 2}])
def test_a_stream_whose_rest_is_not_determined_ends_in_an_error_event(more: dict[str, Any]) -> None:
    async def main() -> None:
        async with disagg(decode=2) as (harness, _, decodes):
            lose(decodes, marked(*REST))
            body = (await ask(harness, **more)).body
            assert b'"code":"worker_lost"' in body
            assert b"[DONE]" not in body
            assert asked(decodes) == []

    run(main())


def test_a_worker_that_does_not_mark_is_relayed_as_it_comes() -> None:
    async def main() -> None:
        async with disagg(decode=2) as (harness, _, decodes):
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            chunk = event("a")
            for worker in decodes:
                worker.script(CHAT, close(head + b"%x\r\n%b\r\n" % (len(chunk), chunk)))
            body = (await ask(harness)).body
            assert body.startswith(chunk)
            assert b'"code":"worker_lost"' in body

    run(main())


def test_the_client_leaves_while_another_worker_goes_on() -> None:
    async def main() -> None:
        async with disagg(decode=2) as (harness, _, decodes):
            gate = Gate()
            lose(decodes, marked(REST[0], gate=gate))
            client = await harness.connect()
            await client.send(CHAT, json.dumps(chat_body(**GREEDY)).encode())
            await gate.reached.wait()
            client.leave()
            [second] = [worker for worker in decodes if worker.got(CONTINUE)]
            await second.wait_until(lambda: second.disconnected == 1)
            await harness.assert_nothing_leaked()
            assert harness.stats.client_aborts == {"stream": 1}

    run(main())


def test_no_budget_no_second_worker() -> None:
    async def main() -> None:
        limits = Limits(retry_ratio=0.0, retries_per_s=0.0)
        async with disagg(decode=2, limits=limits) as (harness, _, decodes):
            lose(decodes, marked(*REST))
            assert b'"code":"worker_lost"' in (await ask(harness)).body
            for worker in decodes:
                worker.scripts.clear()
                worker.script(CHAT, close(), close())
            assert (await ask(harness)).status == 502
            assert harness.stats.retries_refused == 2

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "which", "may"),
    [
        (CHAT, {"temperature": 0}, "deterministic", True),
        (CHAT, {"seed": 0}, "deterministic", True),
        (CHAT, {"top_k": 1, "stop": [], "tools": None, "n": 1}, "deterministic", True),
        (CHAT, {"temperature": 0, "response_format": {"type": "text"}}, "deterministic", True),
        (CHAT, {}, "deterministic", False),
        (CHAT, {"temperature": 0.5}, "deterministic", False),
        (CHAT, {}, "always", True),
        (CHAT, {"temperature": 0}, "never", False),
        (CHAT, {"temperature": 0, "response_format": {"type": "json_object"}}, "always", False),
        (CHAT, {"temperature": 0, "regex": "a+"}, "always", False),
        (CHAT, {"temperature": 0, "stop": "x"}, "always", False),
        (CHAT, {"temperature": 0, "logprobs": True}, "always", False),
        (CHAT, {"temperature": 0, "frequency_penalty": 0.5}, "always", False),
        (CHAT, {"temperature": 0, "repetition_penalty": 1.0}, "always", True),
        (CHAT, {"temperature": 0, "logprobs": False}, "deterministic", True),
        ("/v1/completions", {"temperature": 0, "logprobs": None}, "deterministic", True),
        ("/v1/completions", {"temperature": 0, "logprobs": 0}, "always", False),
        ("/v1/completions", {"temperature": 0, "echo": True}, "always", False),
        ("/v1/completions", {"temperature": 0, "best_of": 2}, "always", False),
        ("/generate", {"sampling_params": {"temperature": 0}}, "deterministic", True),
        ("/generate", {"sampling_params": {"sampling_seed": 3}}, "deterministic", True),
        ("/generate", {"temperature": 0}, "deterministic", False),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"temperature": 0}}, "always", False),
        ("/generate", {"sampling_params": {"temperature": 0, "json_schema": "{}"}}, "always", False),
        ("/tokenize", {"temperature": 0}, "always", False),
    ],
)
def test_what_may_be_continued(path: str, body: dict[str, Any], which: Continue, may: bool) -> None:
    assert may_resume(ENDPOINTS[path], json.dumps(body).encode(), which, seeds_count=True) is may


@pytest.mark.parametrize(
    ("path", "body", "which", "may"),
    [
        (CHAT, {"seed": 0}, "deterministic", False),
        (CHAT, {"seed": 0, "temperature": 0}, "deterministic", True),
        (CHAT, {"seed": 0}, "always", True),
        ("/generate", {"sampling_params": {"sampling_seed": 3}}, "deterministic", False),
    ],
)
def test_a_seed_determines_nothing_where_workers_do_not_sample_by_it(
    path: str, body: dict[str, Any], which: Continue, may: bool
) -> None:
    assert may_resume(ENDPOINTS[path], json.dumps(body).encode(), which, seeds_count=False) is may


@pytest.mark.parametrize("deterministic", [(True, True), (True, False), (False, False)])
def test_a_seeded_stream_goes_on_only_between_workers_that_sample_by_seeds(
    deterministic: tuple[bool, bool],
) -> None:
    async def main() -> None:
        said = iter((True, *deterministic))  # of the prefill worker first

        def make(role: str) -> MockWorker:
            return MockWorker(role, deterministic=next(said))

        async with disagg(decode=2, make=make) as (harness, _, decodes):
            lose(decodes, marked(*REST))
            body = (await ask(harness, temperature=1, seed=7)).body
            assert (body == WHOLE) is all(deterministic)
            assert (b'"code":"worker_lost"' in body) is not all(deterministic)

    run(main())


def test_a_seeded_stream_goes_on_at_a_busier_worker_if_only_that_one_samples_by_seeds() -> None:
    async def main() -> None:
        def make(role: str) -> MockWorker:
            return MockWorker(role, deterministic=True)

        never = Probe(interval_s=3600.0)  # would say anew what is set here
        async with disagg(decode=3, make=make, probe=never) as (harness, _, decodes):
            gate = Gate()
            for worker in decodes:
                worker.script(CONTINUE, marked(*REST))
                worker.script(CHAT, marked(*FIRST, gate=gate, cut=True))
            client = await harness.connect()
            await client.send(CHAT, json.dumps(chat_body(stream=True, seed=7)).encode())
            await gate.reached.wait()
            idle, busier = (worker for worker in decodes if not worker.got(CHAT))
            for worker in harness.router.fleet.workers:
                assert worker.info is not None
                if worker.id == idle.id:
                    worker.info = msgspec.structs.replace(worker.info, deterministic=False)
                elif worker.id == busier.id:
                    worker.elsewhere = 100
            gate.open.set()
            assert (await client.response()).body == WHOLE
            assert (len(idle.got(CONTINUE)), len(busier.got(CONTINUE))) == (0, 1)
            client.leave()

    run(main())


@pytest.mark.parametrize("body", [b'{"\xff":1}', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_a_body_that_cannot_be_read_may_not_be_continued(body: bytes) -> None:
    assert not may_resume(ENDPOINTS[CHAT], body, "always", seeds_count=True)
