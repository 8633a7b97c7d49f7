"""A model with sliding windows: prefill → pool → decode gives the answers of a worker that computes all,
and no part of a page that is missing or corrupt is ever used.

SGLang keeps the layers with a window in a host pool of their own, and stores the last pages of a window only.
Here a window has 128 tokens, which are two pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.protocol.page_tag import TAG_BYTES
from pdserve.pages import page_hashes, part_suffix, pool_key
from tests.support.e2e.arena import drop_page, flip, has_page, page_offset
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, http
from tests.support.e2e.hybrid_model import LAYERS, SLIDING
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, second_turn, token_ids
from tests.support.e2e.routed import ask, found, generate, own_tokens, pull_ahead, say, wanted_hits
from tests.support.e2e.site import CHUNK_TOKENS, NEEDS, PULL_AHEAD, Site, ask_all, ask_cold

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

LENGTHS = (1, 63, 65, 127, 128, 129, 192, 193, 257, 448, 512, 513, 577, 1000, 2100)
PROMPTS = [token_ids(300 + i, length) for i, length in enumerate(LENGTHS)]
SEGMENTS = [LAYERS.count(SLIDING) * 2 * 32 * PAGE * 4] * 2
"""Of the part of a page that layers with a window have: keys and values in float32."""
TOKENS = 1000
IN_WINDOW = TOKENS // PAGE - 2
"""The place of a page of a prompt of TOKENS. Both longer prefixes need its part in their windows."""


@dataclass
class Hybrid:
    """One disaggregated pair and its pool node, and what a worker answers that computes all."""

    pool: PoolNode
    prefill: Worker
    decode: Worker
    router: Router
    first: list[Answer]
    second_prompts: list[list[int]]
    second: list[Answer]

    def ask(self, prompts: list[list[int]]) -> tuple[list[Answer], list[int]]:
        """Through the router; and the tokens of each prompt that the decode worker found."""
        return ask(self.router, prompts)

    def with_window_part(self, prompt: list[int], page: int, act: Callable[..., Any]) -> Any:
        """`act` on the window part of one page of a prompt, as in `arena`."""
        key = pool_key(page_hashes(prompt, PAGE)[page], part_suffix(b"", "swa", {"kv": 0, "swa": 2}))
        return act(self.pool, *self.decode.namespace, key, [*SEGMENTS, TAG_BYTES])


@pytest.fixture(scope="module")
def hybrid(site: Site, run_dir: Path) -> Iterator[Hybrid]:
    pool = site.pools["hybridpool"]
    prefill, decode = (site.servers.workers[name] for name in NEEDS["hybrid"])
    first = ask_cold(decode, PROMPTS)
    turns = [second_turn(p, a, i) for i, (p, a) in enumerate(zip(PROMPTS, first, strict=True))]
    with Router(run_dir, [prefill], [decode], name="hybrid-router", extra=PULL_AHEAD) as router:
        yield Hybrid(pool, prefill, decode, router, first, turns, ask_cold(decode, turns))


@pytest.mark.model_support("sliding windows", "disaggregated")
@pytest.mark.model_support("sliding windows", "pool")
def test_disaggregated_answers_equal_cold_ones_and_come_from_the_pool(hybrid: Hybrid) -> None:
    answers, cached = hybrid.ask(PROMPTS)
    assert differences(hybrid.first, answers, say(PROMPTS)) == []
    assert cached == [wanted_hits(prompt) for prompt in PROMPTS]


@pytest.mark.extended
def test_second_turns_equal_cold_ones(hybrid: Hybrid) -> None:
    answers, _ = hybrid.ask(hybrid.second_prompts)
    assert differences(hybrid.second, answers, say(hybrid.second_prompts)) == []


@pytest.mark.model_support("sliding windows", "restart")
def test_a_restarted_worker_answers_from_the_pool(hybrid: Hybrid) -> None:
    hybrid.decode.end()
    hybrid.decode.start().wait_ready()
    bodies = [hybrid.decode.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert differences(hybrid.first, list(map(Answer.of, bodies)), say(PROMPTS)) == []
    cached = [body["meta_info"]["cached_tokens"] for body in bodies]
    assert cached == [wanted_hits(prompt) for prompt in PROMPTS]
    hybrid.decode.flush()
    answers = ask_all(hybrid.decode, hybrid.second_prompts)
    assert differences(hybrid.second, answers, say(hybrid.second_prompts)) == []
    eventually(lambda: not hybrid.router.lacks, "the router has its workers", 60.0)


@pytest.mark.extended
def test_turn_two_on_another_worker_finds_turn_one(hybrid: Hybrid) -> None:
    prompt, request_id = token_ids(41, 500), "hybrid-turn"
    first = generate(hybrid.router, prompt, 150, **{"x-request-id": request_id})
    output = [pair[1] for pair in first.json()["meta_info"]["output_token_logprobs"]]
    assert hybrid.decode.has_settled(request_id)
    conversation = [*prompt, *output]
    second = [*conversation, *token_ids(42, 30)]
    hybrid.prefill.flush()
    body = hybrid.prefill.generate(second, NEW_TOKENS)
    assert body["meta_info"]["cached_tokens"] == (len(conversation) - 1) // PAGE * PAGE
    assert differences(ask_cold(hybrid.decode, [second]), [Answer.of(body)], str) == []


@pytest.mark.extended
def test_prefill_reports_pages_whose_parts_are_all_in_the_pool(hybrid: Hybrid) -> None:
    prompt = token_ids(43, TOKENS)
    url = f"{hybrid.prefill.url}/pd/prefill?endpoint=/v1/completions"
    body = {"model": "demo-tiny", "prompt": prompt}
    report = http.post(url, json=body, timeout=60).json()
    assert (report["published_pages"], report["missing_pages"]) == (TOKENS // PAGE, 0)
    hybrid.with_window_part(prompt, IN_WINDOW, drop_page)
    again = http.post(url, json=body, timeout=60).json()
    assert (again["published_pages"], again["missing_pages"]) == (IN_WINDOW, 2)


def test_without_a_part_of_its_window_the_prompt_is_restored_up_to_an_earlier_one(hybrid: Hybrid) -> None:
    prompt = token_ids(44, TOKENS)
    expected = ask_cold(hybrid.decode, [prompt])
    generate(hybrid.router, prompt)
    hybrid.with_window_part(prompt, IN_WINDOW, drop_page)
    for cached in (IN_WINDOW * PAGE, wanted_hits(prompt)):  # what was computed is stored again
        hybrid.decode.flush()
        body = hybrid.decode.generate(prompt, NEW_TOKENS)
        assert differences(expected, [Answer.of(body)], str) == []
        assert body["meta_info"]["cached_tokens"] == cached
        eventually(lambda: hybrid.with_window_part(prompt, IN_WINDOW, has_page), "it is stored again", 5.0)


@pytest.mark.extended
def test_a_corrupt_part_is_a_miss_and_the_answer_is_right(hybrid: Hybrid) -> None:
    prompt = token_ids(45, TOKENS)
    expected = ask_cold(hybrid.decode, [prompt])
    generate(hybrid.router, prompt)
    offset = hybrid.with_window_part(prompt, IN_WINDOW, page_offset)
    flip(hybrid.pool.arena, offset + 1000, 1)
    hybrid.decode.flush()
    body = hybrid.decode.generate(prompt, NEW_TOKENS)
    assert differences(expected, [Answer.of(body)], str) == []
    assert body["meta_info"]["cached_tokens"] == 0  # SGLang drops all that it fetched with the part


@pytest.mark.extended
def test_long_prompts_are_pulled_ahead_with_their_windows(hybrid: Hybrid) -> None:
    prompt = token_ids(460, 3000)
    body = pull_ahead(hybrid.prefill, hybrid.decode, prompt)
    assert own_tokens(body) >= CHUNK_TOKENS
    assert body["meta_info"]["cached_tokens"] == wanted_hits(prompt)
    assert differences(ask_cold(hybrid.decode, [prompt]), [Answer.of(body)], str) == []
    other = token_ids(461, 3000)
    response = generate(hybrid.router, other)
    assert sum(found(response).values()) == wanted_hits(other)
    assert differences(ask_cold(hybrid.decode, [other]), [Answer.of(response.json())], str) == []
