"""Two elastic workers and nothing else: each of them prefills for the other one in its turn, and the answers
are those of plain SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Router, Worker, eventually, http
from tests.support.e2e.prompts import NEW_TOKENS, Answer, differences, token_ids
from tests.support.e2e.routed import found, generate, say, wanted_hits
from tests.support.e2e.site import Reference, Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

QUICK = {
    "min_prefill_tokens": 0,
    "slo": {"window_s": 2.0, "dwell_s": 0.05},
    "placement": {"prefill_ms_per_token": 1.0},
}
"""Duties follow the load within seconds. A token takes a millisecond, as it does on slow cores."""
LEAST_TOKENS = 600
"""Of the prompts that are compared: while they come, prompts are most of the load."""
HELD_TOKENS = 3500


@dataclass
class Elastic:
    workers: list[Worker]
    router: Router

    def flush(self) -> None:
        for worker in self.workers:
            worker.flush()


@pytest.fixture(scope="module")
def elastic(site: Site, elastic_workers: list[Worker], run_dir: Path) -> Iterator[Elastic]:
    router = Router(run_dir, elastic=elastic_workers, name="router-elastic", extra=QUICK)
    try:
        router.start()
        yield Elastic(elastic_workers, router)
    finally:
        router.stop()


def roles_of(router: Router, prompt: list[int], session: str = "") -> tuple[str, str]:
    """(the worker that prefilled, or empty; the worker that answered)."""
    headers = {"x-session-id": session} if session else {}
    response = generate(router, prompt, 1, **headers)
    assert response.status_code == 200, response.text
    return response.headers.get("x-pdserve-prefill", ""), response.headers["x-pdserve-decode"]


@contextmanager
def answering(router: Router, session: str) -> Iterator[str]:
    """A long answer of the session is under way at this worker."""
    body = {
        "input_ids": token_ids(sum(session.encode()), 8),
        "sampling_params": {"temperature": 0, "max_new_tokens": HELD_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    asked = http.stream(
        "POST", f"{router.url}/generate", json=body, headers={"x-session-id": session}, timeout=60.0
    )
    with asked as response:
        next(response.iter_raw())
        yield response.headers["x-pdserve-decode"]


def a_session_at(router: Router, worker: str) -> str:
    """A session that this worker answers."""
    names = (f"at-{i}" for i in range(64))
    return next(name for name in names if roles_of(router, [5], name)[1] == worker)


def test_answers_equal_plain_sglang_and_both_workers_have_both_roles(
    elastic: Elastic, reference: Reference
) -> None:
    router = elastic.router
    prompts, wanted = _long(reference.prompts, reference.first)
    elastic.flush()
    first, cached = _ask(router, prompts)
    assert differences(wanted, first, say(prompts)) == []
    assert cached == [wanted_hits(prompt) for prompt in prompts], (
        "what one worker computed the other one found"
    )
    prefill, decode = roles_of(router, prompts[-1])
    assert {prefill, decode} == {f"127.0.0.1:{worker.port}" for worker in elastic.workers}

    with ExitStack() as held:
        with ExitStack() as busy:  # more and more answers, which soon end
            sessions = (f"busy-{i}" for i in range(200))

            def computes_its_own() -> bool:
                busy.enter_context(answering(router, next(sessions)))
                return not roles_of(router, [7])[0]

            eventually(computes_its_own, "each worker computes its own prompts", 60.0, 0.5)
            at_the_other = a_session_at(router, prefill)
            for _ in range(3):
                assert held.enter_context(answering(router, at_the_other)) == prefill
        fresh = iter(range(10_000, 11_000))  # long prompts again: the worker that answers nobody takes them

        def is_turned() -> bool:
            return roles_of(router, token_ids(next(fresh), 2000)) == (decode, prefill)

        eventually(is_turned, "the workers have changed their roles", 60.0)
        turns, wanted = _long(reference.second_prompts, reference.second)
        second, _ = _ask(router, turns)
        assert differences(wanted, second, say(turns)) == []
    assert roles_of(router, token_ids(11_001, 2000)) == (decode, prefill)


def _long(prompts: list[list[int]], answers: list[Answer]) -> tuple[list[list[int]], list[Answer]]:
    chosen = [pair for pair in zip(prompts, answers, strict=True) if len(pair[0]) >= LEAST_TOKENS]
    return [prompt for prompt, _ in chosen], [answer for _, answer in chosen]


def _ask(router: Router, prompts: list[list[int]]) -> tuple[list[Answer], list[int]]:
    """Answers, and the tokens of each prompt that the answering worker found."""
    answers, cached = [], []
    for prompt in prompts:
        response = generate(router, prompt, NEW_TOKENS)
        assert response.status_code == 200, response.text
        answers.append(Answer.of(response.json()))
        cached.append(sum(found(response).values()))
    return answers, cached
