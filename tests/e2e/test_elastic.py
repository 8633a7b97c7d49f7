"""Two elastic workers and nothing else: one prefills for the other, with the answers of plain SGLang.

How duties change is held by tests/router/placement/elastic and by its scenarios, without real workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Router, Worker, metric
from tests.support.e2e.prompts import Answer, differences
from tests.support.e2e.routed import ask, generate, say, wanted_hits
from tests.support.e2e.site import Reference, Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

QUICK = {
    "min_prefill_tokens": 0,
    "placement": {"prefill_ms_per_token": 1.0},
}
"""A token takes a millisecond, as it does on slow cores."""
LEAST_TOKENS = 600
"""Of the prompts that are compared: while they come, prompts are most of the load."""


@dataclass
class Elastic:
    workers: list[Worker]
    router: Router

    def flush(self) -> None:
        for worker in self.workers:
            worker.flush()


@pytest.fixture(scope="module")
def elastic(site: Site, elastic_workers: list[Worker], run_dir: Path) -> Iterator[Elastic]:
    with Router(run_dir, elastic=elastic_workers, name="router-elastic", extra=QUICK) as router:
        yield Elastic(elastic_workers, router)


def roles_of(router: Router, prompt: list[int], session: str = "") -> tuple[str, str]:
    """(the worker that prefilled, or empty; the worker that answered)."""
    headers = {"x-session-id": session} if session else {}
    response = generate(router, prompt, 1, **headers)
    assert response.status_code == 200, response.text
    return response.headers.get("x-pdserve-prefill", ""), response.headers["x-pdserve-decode"]


def test_answers_equal_plain_sglang_and_one_worker_prefills_for_the_other(
    elastic: Elastic, reference: Reference
) -> None:
    router = elastic.router
    prompts, wanted = _long(reference.prompts, reference.first)
    elastic.flush()
    first, cached = ask(router, prompts)
    assert differences(wanted, first, say(prompts)) == []
    assert cached == [wanted_hits(prompt) for prompt in prompts], (
        "what one worker computed the other one found"
    )
    prefill, decode = roles_of(router, prompts[-1])
    assert {prefill, decode} == {f"127.0.0.1:{worker.port}" for worker in elastic.workers}


def test_a_missed_prompt_is_counted_once_at_the_worker_that_prefilled_it(elastic: Elastic) -> None:
    """Each worker serves both roles: its prefill counts, and its following of requests does not again."""
    before, told = sum(map(_missed, elastic.workers)), 0
    for first in range(3):  # when the last is answered, the earlier ones are followed to their end
        response = generate(elastic.router, [first + 7, *range(100, 800)], 1)
        assert response.headers.get("x-pdserve-prefill"), "it was not prefilled"
        told += int(response.headers["x-pdserve-miss"].partition("never_stored=")[2].partition(";")[0])
    assert told == 3 * 640
    assert sum(map(_missed, elastic.workers)) - before == told


def _missed(worker: Worker) -> float:
    return metric(worker.url, "pdserve_worker_missed_tokens_total")


def _long(prompts: list[list[int]], answers: list[Answer]) -> tuple[list[list[int]], list[Answer]]:
    chosen = [pair for pair in zip(prompts, answers, strict=True) if len(pair[0]) >= LEAST_TOKENS]
    return [prompt for prompt, _ in chosen], [answer for _, answer in chosen]
