"""NVIDIA Dynamo's frontend, KV router and real SGLang workers over a pool node.

They take some minutes, and an environment of their own: without it they are skipped
(docs/other-engines.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.cluster import eventually
from tests.support.e2e.dynamo import PYTHON, START_S, Dynamo, dynamo
from tests.support.e2e.prompts import PAGE, token_ids

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="Dynamo is not installed: see docs/other-engines.md"),
]
SOON_S = 60.0


@pytest.fixture(scope="module")
def agg(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dynamo]:
    with dynamo("agg", small_model, tmp_path_factory.mktemp("run") / "agg") as served:
        yield served


def stored(served: Dynamo, pages_before: int, tokens: int) -> None:
    """Wait until a conversation of so many tokens is in the pool, beside what was there."""
    wanted = pages_before + (tokens - 1) // PAGE
    eventually(lambda: served.pool_pages() >= wanted, f"the pool has {wanted} pages", SOON_S)


def test_a_prompt_goes_to_the_worker_that_has_it(agg: Dynamo) -> None:
    """The router hears of the blocks that workers have; the pool is alike for all of them."""
    workers = agg.workers()
    assert len(workers) == 2
    prompts = [token_ids(seed=100 + n, length=5 * PAGE + 1 + n) for n in range(4)]
    heard = agg.events_heard()
    for n, prompt in enumerate(prompts):
        assert agg.complete(prompt, worker=workers[n % 2]).worker == workers[n % 2]
    eventually(lambda: agg.events_heard() >= heard + len(prompts), "the router has heard of them", SOON_S)
    again = [agg.complete(prompt) for prompt in prompts]
    assert [one.worker for one in again] == [workers[n % 2] for n in range(4)]
    assert [one.cached_tokens for one in again] == [5 * PAGE] * 4


def test_the_next_turn_has_the_answers_pages_from_the_pool_on_another_worker(agg: Dynamo) -> None:
    one, other = agg.workers()
    prompt, before = token_ids(seed=200, length=4 * PAGE + 9), agg.pool_pages()
    first = agg.complete(prompt, tokens=2 * PAGE, worker=one)
    said = [*prompt, *first.tokens]
    stored(agg, before, len(said))
    second = agg.complete([*said, *token_ids(seed=201, length=20)], worker=other)
    assert (second.worker, second.cached_tokens) == (other, 6 * PAGE)


def test_a_worker_that_starts_anew_has_earlier_prompts_from_the_pool(agg: Dynamo) -> None:
    known = set(agg.workers())
    prompt, before = token_ids(seed=300, length=6 * PAGE + 1), agg.pool_pages()
    first = agg.complete(prompt, worker=min(known))
    stored(agg, before, len(prompt))
    process = agg.another_worker()
    try:
        process.wait_ready(lambda: len(agg.workers()) == 3 and agg.answers(agg.workers()), START_S)
        [new] = set(agg.workers()) - known
        again = agg.complete(prompt, worker=new)
    finally:
        process.stop()
    assert (again.worker, again.cached_tokens, again.tokens) == (new, 6 * PAGE, first.tokens)


def test_prefill_and_decode_workers_answer_alike_and_have_prompts_from_the_pool(
    small_model: Path, tmp_path: Path
) -> None:
    with dynamo("disagg", small_model, tmp_path / "disagg") as disagg:
        prompt, before = token_ids(seed=400, length=5 * PAGE + 5), disagg.pool_pages()
        first = disagg.complete(prompt, tokens=8)
        stored(disagg, before, len(prompt))
        again = disagg.complete(prompt, tokens=8)
    assert (first.cached_tokens, again.cached_tokens) == (0, 5 * PAGE)
    assert again.tokens == first.tokens
