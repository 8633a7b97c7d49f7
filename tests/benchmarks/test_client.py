"""The benchmarks' client against scripted servers: what is sent, when, and what is made of the answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from benchmarks.lib.figures import outcome_of
from benchmarks.lib.load import Run, Shape, make_load
from benchmarks.lib.run import Server, run_load
from tests.benchmarks.scripted import ScriptedServer, event, serving
from tests.support.processes import HarnessError
from tests.support.router import mock_worker as mock
from tests.support.router.mock_worker import Received, Script, Wire

SHAPE = Shape(users=3, rounds=2, system_tokens=6, turn_tokens=20, output_tokens=4)


def load_it(server: ScriptedServer, shape: Shape = SHAPE, rate_s: float | None = None, **more: Any) -> Run:
    silence_s = more.pop("silence_s", 60.0)
    target = Server(server.url, silence_s=silence_s)
    return run_load(target, make_load(shape, 1, rate_s), lambda line: None, **more)


def test_each_turn_repeats_the_conversation_by_its_exact_tokens() -> None:
    with serving(ScriptedServer()) as server:
        run = load_it(server)
        bodies = [body for body in server.bodies() if body["max_tokens"] == 4]
    assert not any(record.error for record in run.records)
    assert {body["model"] for body in bodies} == {"demo"}
    by_length = sorted(bodies, key=lambda body: len(body["prompt"]))
    firsts, seconds = by_length[:3], by_length[3:]
    for second in seconds:
        (first,) = [one for one in firsts if second["prompt"][:26] == one["prompt"]]
        assert second["prompt"][26:30] == [10, 11, 12, 13]  # the answer's ids as the server said them
        assert len(second["prompt"]) == 26 + 4 + 20
        assert first["prompt"][:6] == second["prompt"][:6]
    assert len({tuple(one["prompt"][:6]) for one in firsts}) == 1  # the system prompt
    assert len({tuple(one["prompt"]) for one in firsts}) == 3


def broken(*events: bytes) -> Script:
    """A stream that breaks off after these events."""

    async def run(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream")
        for data in events:
            await wire.chunk(data)
        wire.writer.write_eof()
        raise mock.CloseConnection

    return run


def silent(*events: bytes) -> Script:
    async def run(wire: Wire, request: Received) -> None:
        await wire.head(200, "text/event-stream")
        for data in events:
            await wire.chunk(data)
        await asyncio.sleep(3600)

    return run


TOKEN = event(choices=[{"text": "a", "token_ids": [5]}])
FAULTS: dict[str, Script] = {
    "status 429": mock.answer(429, {"error": {"message": "slow down"}}),
    "status 500": mock.raw_answer(b"HTTP/1.1 500 X\r\ncontent-length: 4\r\n\r\noops"),
    "error in the stream": mock.stream([TOKEN, event(error={"message": "lost"})]),
    "garbage in the stream": mock.stream([TOKEN, b"data: {{{\n\n"]),
    "cut off": broken(TOKEN),
    "no answer": mock.close(),
    "stalled": silent(TOKEN),
    "no first token in time": silent(),
    "an answer without text": mock.stream([event(choices=[]), mock.DONE]),
    "cut off ": mock.stream([TOKEN]),  # an answer that ends well, but not as OpenAI's do
    "aborted by the server": mock.stream(
        [TOKEN, event(choices=[{"text": "", "finish_reason": "abort"}]), mock.DONE]
    ),
}


def test_errors_are_counted_by_kind_and_the_load_goes_on() -> None:
    shape = Shape(users=len(FAULTS), rounds=2, turn_tokens=8, output_tokens=3)
    with serving(ScriptedServer()) as server:
        server.script("/v1/completions", *FAULTS.values())
        run = load_it(server, shape, silence_s=1.0, lockstep=True)
        lengths = sorted(len(body["prompt"]) for body in server.bodies())
    outcome = outcome_of(run)
    assert outcome.errors == Counter(kind.strip() for kind in FAULTS)
    assert "slow down" in outcome.first_details["status 429"]
    assert outcome.first_details["error in the stream"] == "lost"
    assert outcome.turns[1].failed == 0
    assert lengths == [8] * len(FAULTS) + [8 + 3 + 8] * len(FAULTS)  # as long as with an answer


def test_an_answer_of_one_token_that_is_half_a_character_is_an_answer() -> None:
    usage = event(choices=[], usage={"prompt_tokens": 20, "completion_tokens": 1})
    end = event(choices=[{"text": "", "finish_reason": "length"}])
    with serving(ScriptedServer()) as server:
        server.script("/v1/completions", mock.stream([end, usage, mock.DONE]))
        (record,) = load_it(server, Shape(users=1, rounds=1, turn_tokens=20, output_tokens=1)).records
    assert (record.error, record.output_tokens) == ("", 1)
    assert record.first_token_s is not None


def test_a_server_that_is_not_there_is_said_in_one_line() -> None:
    with serving(ScriptedServer()) as server:
        url = server.url
    with pytest.raises(HarnessError, match="does not list a model"):
        run_load(Server(url, silence_s=1.0), make_load(SHAPE, 1), lambda line: None)


def test_a_slow_server_does_not_slow_down_its_questioning() -> None:
    """In the open loop each request's latency begins at its planned time, though it waits for the last
    answer.
    """
    shape = Shape(users=2, rounds=3, turn_tokens=5, output_tokens=2)
    load = make_load(shape, 1, rate_s=1000.0)
    with serving(ScriptedServer(pause_s=0.2)) as server:
        run = run_load(Server(server.url, silence_s=60.0), load, lambda line: None)
    planned = {(request.session, request.turn): request.at_s for request in load.requests}
    for record in run.records:
        assert record.planned_s == pytest.approx(planned[record.session, record.turn], abs=1e-6)
        assert record.first_token_s is not None
        assert record.first_token_s >= 0.2 * record.turn - 0.02  # those before it were all due at once
    assert outcome_of(run).late_requests == 4


def test_what_is_done_between_two_rounds_takes_no_time_of_the_run() -> None:
    done: list[int] = []

    def between(rounds: int) -> None:
        done.append(rounds)
        time.sleep(0.5)

    with serving(ScriptedServer()) as server:
        begun_s = time.monotonic()
        run = load_it(server, lockstep=True, between=between)
        took_s = time.monotonic() - begun_s
    assert done == [1]
    assert took_s - run.wall_s >= 0.5
    assert max(record.done_s for record in run.records) <= run.wall_s
