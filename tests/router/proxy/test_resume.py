"""A decode worker is lost in mid-stream: another one goes on, or the client is told."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Limits
from pdserve.router.request.stream_marks import Continue, StreamMarks, may_resume
from tests.support.router.harness import Harness, Response, disagg
from tests.support.router.mock_worker import DONE, MockWorker, Received, Script, Wire
from tests.support.router.streams import FIRST, REST, WHOLE, marked, named

EVENT = b'data: {"text":"ok"}\n\n'

CHAT = "/v1/chat/completions"
CONTINUE = "/pd/continue"
GREEDY = {"temperature": 0, "stream": True}


def lose(decodes: list[MockWorker], *scripts: Script) -> None:
    """Whoever gets the stream loses it; whoever is asked to go on does as `scripts` say."""
    for worker in decodes:
        worker.script(CHAT, marked(*FIRST, cut=True))
        worker.script(CONTINUE, *scripts)


async def ask(harness: Harness, **more: Any) -> Response:
    return await harness.chat(**(GREEDY | more))


def asked(decodes: list[MockWorker]) -> list[Received]:
    return [request for worker in decodes for request in worker.got(CONTINUE)]


async def test_a_greedy_stream_goes_on_at_another_worker_and_the_client_cannot_tell() -> None:
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


@pytest.mark.parametrize(("min_prefill_tokens", "told"), [(10_000, "8/0/80"), (0, "8/0/16")])
async def test_the_rest_can_be_lost_too_and_each_worker_learns_what_was_cached_before_the_stream(
    min_prefill_tokens: int, told: str
) -> None:
    """It finds what the lost worker has computed. Where a prefill worker computed that, its word counts."""
    async with disagg(decode=3, limits=Limits(decode_attempts=3), min_prefill_tokens=min_prefill_tokens) as (
        harness,
        _,
        decodes,
    ):
        cached = "x-pdserve-cached: device=8, host=0, pool=80, computed=17\r\n"
        later = "x-pdserve-cached: device=0, host=0, pool=104, computed=1\r\n"
        rests = iter([marked(REST[0], cut=True, extra=later), marked(named("three", "", "stop") + DONE)])

        async def next_rest(wire: Wire, request: Received) -> None:
            await next(rests)(wire, request)

        for worker in decodes:
            worker.script(CHAT, marked(*FIRST, cut=True, extra=cached))
            worker.script(CONTINUE, next_rest)
        assert (await ask(harness)).body == WHOLE
        assert [one.headers["x-pdserve-prefilled"] for one in asked(decodes)] == [told, told]
        lines = [json.loads(request.body.partition(b"\n")[0]) for request in asked(decodes)]
        assert sorted(line["token_ids"] for line in lines) == [[7, 8, 9], [7, 8, 9, 10]]
        assert harness.stats.continued == {"cut": 2}


@pytest.mark.parametrize(
    ("path", "body", "which", "may"),
    [
        (CHAT, {"temperature": 0}, "deterministic", True),
        (CHAT, {"seed": 0}, "deterministic", "seeded"),
        (CHAT, {"seed": 0, "temperature": 0}, "deterministic", True),
        (CHAT, {"seed": 0}, "always", True),
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
        ("/generate", {"sampling_params": {"sampling_seed": 3}}, "deterministic", "seeded"),
        ("/generate", {"temperature": 0}, "deterministic", False),
        ("/generate", {"text": ["a", "b"], "sampling_params": {"temperature": 0}}, "always", False),
        ("/generate", {"sampling_params": {"temperature": 0, "json_schema": "{}"}}, "always", False),
        ("/tokenize", {"temperature": 0}, "always", False),
    ],
)
def test_what_may_be_resumed(path: str, body: dict[str, Any], which: Continue, may: bool | str) -> None:
    data = json.dumps(body).encode()
    assert may_resume(ENDPOINTS[path], data, which, seeds_count=True) is bool(may)
    assert may_resume(ENDPOINTS[path], data, which, seeds_count=False) is (may is True)


@pytest.mark.parametrize("deterministic", [(True, True), (True, False), (False, False)])
async def test_a_seeded_stream_goes_on_only_between_workers_that_sample_by_seeds(
    deterministic: tuple[bool, bool],
) -> None:
    said = iter((True, *deterministic))  # of the prefill worker first

    def make(role: str) -> MockWorker:
        return MockWorker(role, deterministic=next(said))

    async with disagg(decode=2, make=make) as (harness, _, decodes):
        lose(decodes, marked(*REST))
        body = (await ask(harness, temperature=1, seed=7)).body
        assert (body == WHOLE) is all(deterministic)
        assert (b'"code":"worker_lost"' in body) is not all(deterministic)


@pytest.mark.parametrize("body", [b'{"\xff":1}', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_a_body_that_cannot_be_read_may_not_be_continued(body: bytes) -> None:
    assert not may_resume(ENDPOINTS[CHAT], body, "always", seeds_count=True)


@given(st.lists(st.integers(0, 200)), st.booleans())
def test_what_a_stream_says_of_its_use_is_taken_out_wherever_it_is_cut(
    cuts: list[int], has_marks: bool
) -> None:
    text = b'data: {"text":": pd-usage 1 2 \\n: pd-usage 3 4"}\n\n'
    mark = b": pd 9 0 7\n\n" if has_marks else b": pd off\n\n"
    data = text + mark + text + b": pd-usage 18 7\n\n" + DONE
    marks, got = StreamMarks(), b""
    marks.begin(True)
    ends = sorted(min(cut, len(data)) for cut in cuts)
    for begin, end in itertools.pairwise([0, *ends]):
        got += marks.take(data[begin:end])
    got += marks.take_last(data[ends[-1] if ends else 0 :])
    assert got == text + text + DONE
    assert marks.used == (18, 7)


@pytest.mark.parametrize("mark", [b"", b": pd 9 0 7 8\n\n", b": pd off\n\n", b": pd 9 0 x\n\n"])
@pytest.mark.parametrize("usage", [b"", b": pd-usage 18 2\n\n", b": pd-usage 1234567890123456 2\n\n"])
@pytest.mark.parametrize("text", [b"", EVENT, b"event: delta\n" + EVENT, b": a comment\n\n" + EVENT])
def test_the_usual_end_of_a_stream_is_read_as_every_other_one(text: bytes, mark: bytes, usage: bytes) -> None:
    for data in (text + mark + usage + DONE, text + mark + usage, text + usage + mark + DONE):
        at_once, in_general = StreamMarks(True), StreamMarks(True)
        assert at_once.take_last(data) == in_general.take_any(data, at_end=True)
        assert at_once.used == in_general.used
        assert (at_once.token_count, at_once.tells_all) == (in_general.token_count, in_general.tells_all)
    usual = StreamMarks(True)
    if (mark, usage) == (b": pd 9 0 7 8\n\n", b": pd-usage 18 2\n\n"):
        assert usual.take_last(text + mark + usage + DONE) == text + DONE
        assert (usual.used, usual.token_count) == ((18, 2), 2)


def test_a_worker_that_sends_no_marks_says_no_use_either() -> None:
    marks = StreamMarks()
    marks.begin(False)
    data = b": pd-usage 18 7\n\n" + DONE
    assert marks.take_last(data) == data
    assert marks.used is None
