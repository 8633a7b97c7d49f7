"""Workers of two ranks (`--tp-size 2`), prefill → pool → decode: answers equal plain SGLang's, and one rank's
pages that are deleted, corrupt or late cost time and never the answer. Workers of one rank share their pages.

A rank holds half of the heads, and its pages have names of their own. All ranks of a worker must use the same
number of pages, so the rank that lacks one decides. A worker of one rank stores pages in two pieces
(`page_pieces`), each as a rank of two has it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.pages import page_hashes, pool_key
from pdserve.settings.config_file import to_toml
from tests.support.e2e.arena import drop_page, flip, page_offset, reserved_page
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, http, pdserve
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.routed import ask, found, generate, say, wanted_hits
from tests.support.e2e.site import Reference, Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SEGMENTS = [4 * 1 * 32 * PAGE * 4] * 2
"""Bytes of a rank's page, keys and values: 4 layers, 1 of 2 KV heads, 32 numbers of 4 bytes."""
OTHER_FAULTS = ((0, "deleted"), (0, "corrupt"), (1, "deleted"))
LACKING = 3
"""The first page that a rank lacks, in tests of pages that are not there."""


@dataclass
class Pair:
    """A prefill and a decode worker of two ranks, and their router. `one`: a prefill worker of one rank."""

    pool: PoolNode
    prefill: Worker
    decode: Worker
    router: Router
    one: Worker


@pytest.fixture(scope="module")
def ranks(site: Site, run_dir: Path) -> Iterator[Pair]:
    prefill, decode, one = (site.servers.workers[f"ranks-{name}"] for name in ("prefill", "decode", "one"))
    with Router(run_dir, prefill=[prefill], decode=[decode], name="router-ranks") as router:
        yield Pair(site.pools["pool0"], prefill, decode, router, one)


@pytest.mark.model_support("multi-head attention", "TP")
def test_answers_of_two_ranks_equal_plain_sglang_and_come_from_the_pool(
    ranks: Pair, reference: Reference
) -> None:
    prompts = reference.prompts[1::3]
    responses = [generate(ranks.router, prompt) for prompt in prompts]
    answers = [Answer.of(response.json()) for response in responses]
    assert differences(reference.first[1::3], answers, say(prompts)) == []
    assert [found(response).get("pool") for response in responses] == [*map(wanted_hits, prompts)]
    turns = reference.second_prompts[1::6]
    answers, cached = ask(ranks.router, turns)
    assert differences(reference.second[1::6], answers, say(turns)) == []
    assert cached == [*map(wanted_hits, turns)]


@pytest.mark.extended
def test_one_rank_reads_what_two_ranks_stored(ranks: Pair, reference: Reference) -> None:
    prompts, expected = reference.prompts[::6], reference.first[::6]
    for prompt in prompts:
        generate(ranks.router, prompt)
    bodies = [ranks.one.generate(prompt, NEW_TOKENS) for prompt in prompts]
    assert differences(expected, [*map(Answer.of, bodies)], say(prompts)) == []
    assert [body["meta_info"]["cached_tokens"] for body in bodies] == [*map(wanted_hits, prompts)]


@pytest.mark.model_support("multi-head attention", "unequal TP")
def test_two_ranks_decode_what_one_rank_prefilled(ranks: Pair, reference: Reference, run_dir: Path) -> None:
    prompts, expected = reference.prompts[2::3], reference.first[2::3]
    with Router(run_dir, prefill=[ranks.one], decode=[ranks.decode], name="router-unequal") as router:
        responses = [generate(router, prompt) for prompt in prompts]
    answers = [Answer.of(response.json()) for response in responses]
    assert differences(expected, answers, say(prompts)) == []
    assert [found(response).get("pool") for response in responses] == [*map(wanted_hits, prompts)]


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (1, "corrupt"),
        *(pytest.param(*case, marks=pytest.mark.extended) for case in OTHER_FAULTS),
    ],
)
def test_a_page_that_one_rank_lacks_is_computed_by_all(
    ranks: Pair, reference: Reference, rank: int, fault: str
) -> None:
    prompt, expected = reference.longest(under=3000)
    generate(ranks.router, prompt)
    key = pool_key(page_hashes(prompt, PAGE)[LACKING], b"tp%d/2" % rank)
    if fault == "deleted":
        drop_page(ranks.pool, *ranks.decode.namespace, key, SEGMENTS)
    else:
        flip(ranks.pool.arena, page_offset(ranks.pool, *ranks.decode.namespace, key, SEGMENTS) + 1000, 1)
    ranks.decode.flush()
    body = ranks.decode.generate(prompt, NEW_TOKENS)
    assert differences([expected], [Answer.of(body)], str) == []
    assert body["meta_info"]["cached_tokens"] == LACKING * PAGE
    ranks.prefill.flush()


def test_a_prompt_is_handed_over_once_its_last_rank_has_stored_it(ranks: Pair) -> None:
    """Of one page: SGLang looks none of it up. Rank 1 finds another writer at work, who is late."""
    prompt = token_ids(8300, PAGE)
    before, key = ranks.pool.status().pages, pool_key(page_hashes(prompt, PAGE)[0], b"tp1/2")
    url = f"{ranks.prefill.url}/pd/prefill?endpoint=/v1/completions"
    with (
        reserved_page(ranks.pool, *ranks.decode.namespace, key, SEGMENTS) as commit,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(http.post, url, json={"model": "demo-tiny", "prompt": prompt})
        eventually(lambda: ranks.pool.status().pages == before + 1, "rank 0 has stored its page", 20.0)
        assert not asked.done()
        commit()
        report = asked.result().json()
    assert (report["published_pages"], report["missing_pages"]) == (2, 0)  # one of each rank
    drop_page(ranks.pool, *ranks.decode.namespace, key, SEGMENTS)  # it has not the rank's bytes


@pytest.mark.extended
def test_a_rank_that_fails_at_its_start_ends_the_cluster_with_its_error(model: Path, tmp_path: Path) -> None:
    """Rank 1 alone fails: a user has named the cores of one rank. Rank 0 would wait for it for hours."""
    worker = {"engine": {"model_path": model, "extra_args": ["--tp-size", "2"]}, "storage": "none"}
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml({"cluster": {"run_dir": tmp_path / "run"}, "agg": [worker]}))
    done = subprocess.run(
        pdserve("up", str(file), "--port", "0"),
        env={**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "NUMA index 1" in done.stdout
    assert "agg0 exited with status 1 before it was ready" in done.stdout
    assert "was not ready within" not in done.stdout
