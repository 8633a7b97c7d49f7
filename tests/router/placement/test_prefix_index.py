from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.api.request_body import parse_request
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.prefix_index import (
    BLOCK_ENDS,
    FIRST_BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_PLACES,
    Cached,
    Prefix,
    PrefixTable,
    prefix_of,
)

A, B = Worker("decode", "http://a:1"), Worker("decode", "http://b:1")
SETTINGS = PlacementSettings(
    device_half_life_s=100.0, host_half_life_s=1000.0, pool_half_life_s=10_000.0, capacity_blocks=100
)


def prefix(blocks: str) -> Prefix:
    """A prompt of one block per letter; prompts with the same first letters share those blocks."""
    return Prefix(tuple(hash(blocks[: i + 1]) for i in range(len(blocks))))


def tokens(blocks: int) -> int:
    return blocks * FIRST_BLOCK_BYTES // 4


def chat(*contents: str, **more: object) -> Prefix:
    messages = [{"role": "user", "content": content} for content in contents]
    view = parse_request(json.dumps({"messages": messages} | more).encode())
    return prefix_of(view, view.messages, "m")


def test_a_conversation_that_goes_on_keeps_its_blocks() -> None:
    first, second = chat("a" * 5000), chat("a" * 5000, "b" * 5000)
    assert len(first.digests) == 4  # the fifth block is not full
    assert second.digests[:4] == first.digests
    assert len(second.digests) == 9


@pytest.mark.parametrize("more", [{"tools": [{"type": "function"}]}, {"cache_salt": "x"}])
def test_what_decides_pages_beside_the_text_keeps_blocks_apart(more: dict[str, object]) -> None:
    assert set(chat("a" * 5000).digests).isdisjoint(chat("a" * 5000, **more).digests)


def test_models_keep_blocks_apart() -> None:
    view = parse_request(json.dumps({"prompt": "a" * 5000}).encode())
    of_m, of_n = prefix_of(view, view.prompt, "m"), prefix_of(view, view.prompt, "n")
    assert set(of_m.digests).isdisjoint(of_n.digests)
    table = PrefixTable(SETTINGS)
    table.record(of_m, A, 0.0, in_pool=True)
    assert table.places(of_m, 0.0).cached(A).total == tokens(4)
    assert table.places(of_n, 0.0).cached(A).total == 0


def test_blocks_grow_so_that_the_longest_prompt_has_some_hundreds() -> None:
    assert BLOCK_ENDS[63] == 64 * 1024
    assert BLOCK_ENDS[64] == 66 * 1024
    assert len(BLOCK_ENDS) == MAX_BLOCKS
    assert BLOCK_ENDS[-1] >= 32 * 1024 * 1024 - 64 * 1024


def test_token_ids_take_more_bytes_than_text() -> None:
    view = parse_request(json.dumps({"input_ids": [12345] * 1000}).encode())
    ids = prefix_of(view, view.input_ids, "m")
    assert ids.tokens(1) == 1024 // 6


def test_a_prefix_is_where_it_was_sent_and_fades_from_device_to_host_to_pool() -> None:
    table = PrefixTable(SETTINGS)
    table.record(prefix("abcd"), A, 0.0, in_pool=True)
    asked = prefix("abxy")
    assert table.places(asked, 0.0).cached(A) == Cached(device=tokens(2))
    later = table.places(asked, 100.0).cached(A)
    assert later.device == pytest.approx(tokens(1))
    assert later.device + later.host == pytest.approx(tokens(2) * 2**-0.1)
    assert later.total == pytest.approx(tokens(2), rel=0.01)  # what it has lost is in the pool
    assert table.places(asked, 0.0).cached(B) == Cached(pool=tokens(2))


def test_the_longest_of_what_a_worker_has_counts() -> None:
    table = PrefixTable(SETTINGS)
    table.record(prefix("abcd"), A, 0.0, in_pool=False)
    table.record(prefix("ab"), A, 50.0, in_pool=False)
    assert table.places(prefix("abcd"), 50.0).believed(A) == pytest.approx(tokens(4) * 2**-0.05)


def test_answers_teach_how_many_tokens_an_estimated_one_is() -> None:
    table = PrefixTable(SETTINGS)
    table.record(prefix("abcd"), A, 0.0, in_pool=False)
    for _ in range(50):
        table.places(prefix("abcd"), 0.0).learn(A, tokens(3), None)
    assert table.places(prefix("abcd"), 0.0).cached(A).total == pytest.approx(tokens(3), rel=0.02)
    for _ in range(50):
        table.places(prefix("abcd"), 0.0).learn(A, tokens(9), None)
    assert table.places(prefix("abcd"), 0.0).cached(A).total == pytest.approx(tokens(4), rel=0.02)


def test_answers_about_little_teach_nothing() -> None:
    table = PrefixTable(PlacementSettings(half_lives="fixed"))
    small = Prefix((1,), tokens_per_byte=0.2)
    table.record(small, A, 0.0, in_pool=True)
    table.places(small, 0.0).learn(A, 0, 0)
    assert table.places(small, 0.0).cached(A).device == small.tokens(1)


@pytest.mark.parametrize("place", ["worker", "pool"])
@given(life_s=st.floats(20, 20_000), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_half_lives_come_to_where_prompts_are_found_as_often_as_expected(
    place: str, life_s: float, seed: int
) -> None:
    """Of a cache that holds prompts for as long as its memory lasts, as one ordered by use does."""
    table, dice = PrefixTable(SETTINGS), random.Random(seed)
    asked, where = prefix("abcd"), A if place == "worker" else None
    expected, found = [], []
    for number in range(400):
        age_s = dice.uniform(0, 4 * life_s)
        table = _renewed(table)
        table.record(asked, where, 0.0, in_pool=place == "pool")
        places = table.places(asked, age_s)
        there = tokens(4) if age_s < life_s else 0
        if number >= 200:
            expected.append(places.cached(A).total)
            found.append(there)
        places.learn(A, there if place == "worker" else 0, there if place == "pool" else 0)
    assert sum(expected) == pytest.approx(sum(found), rel=0.35)


def _renewed(table: PrefixTable) -> PrefixTable:
    """A table without blocks that has learned the same."""
    new = PrefixTable(SETTINGS)
    new._beliefs = table._beliefs
    return new


def test_fixed_half_lives_stay() -> None:
    table = PrefixTable(msgspec.structs.replace(SETTINGS, half_lives="fixed"))
    table.record(prefix("abcd"), A, 0.0, in_pool=True)
    before = table.places(prefix("abcd"), 500.0).cached(B)
    for _ in range(20):
        table.places(prefix("abcd"), 500.0).learn(B, 0, 0)
    assert table.places(prefix("abcd"), 500.0).cached(B) == before


def test_what_one_worker_evicts_teaches_nothing_of_another() -> None:
    table = PrefixTable(SETTINGS)
    for worker in (A, B):
        table.record(prefix("abcd"), worker, 0.0, in_pool=False)
    for _ in range(20):
        table.places(prefix("abcd"), 500.0).learn(A, 0, None)
    places = table.places(prefix("abcd"), 500.0)
    assert places.cached(A).total < tokens(1) < places.cached(B).total


@given(
    told=st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 10**9), st.integers(0, 10**9)), max_size=80),
    asked_s=st.floats(0, 1e9),
)
def test_whatever_workers_say_estimates_stay_within_what_was_sent(
    told: list[tuple[float, int, int]], asked_s: float
) -> None:
    table = PrefixTable(SETTINGS)
    table.record(prefix("abcd"), A, 0.0, in_pool=True)
    for age_s, own, pool in told:
        table.places(prefix("abcd"), age_s).learn(A, own, pool)
    for worker in (A, B):
        cached = table.places(prefix("abcd"), asked_s).cached(worker)
        assert min(cached.device, cached.host, cached.pool) >= 0
        assert cached.total <= tokens(4) + 1e-6


def test_a_worker_that_comes_back_has_lost_its_memory() -> None:
    worker, table = Worker("decode", "http://c:1"), PrefixTable(SETTINGS)
    fleet = Fleet([worker])
    fleet.on_probe_ready(worker)
    table.record(prefix("ab"), worker, 0.0, in_pool=False)
    fleet.on_probe_not_ready(worker)
    fleet.on_probe_ready(worker)
    assert table.places(prefix("ab"), 0.0).cached(worker) == Cached()


def test_a_block_remembers_the_workers_it_was_last_at() -> None:
    table, passing = PrefixTable(SETTINGS), [Worker("decode", f"http://w{i}:1") for i in range(MAX_PLACES)]
    table.record(prefix("a"), B, 0.0, in_pool=False)
    for worker in (A, *passing[1:], A, passing[0]):
        table.record(prefix("a"), worker, 0.0, in_pool=False)
    places = table.places(prefix("a"), 0.0)
    assert places.believed(A) == places.believed(passing[0]) == tokens(1)
    assert places.believed(B) == 0


PROMPTS = st.text("ab", min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(PROMPTS, st.sampled_from([A, B, None]), st.booleans(), st.floats(0, 50)), max_size=40
)


@given(STEPS, PROMPTS, st.integers(1, 12))
def test_no_more_is_believed_than_was_sent_and_what_is_known_are_first_blocks(
    steps: list[tuple[str, Worker | None, bool, float]], asked: str, capacity: int
) -> None:
    table = PrefixTable(PlacementSettings(capacity_blocks=capacity))
    now_s, sent = 0.0, set[tuple[str, str]]()
    for prompt, worker, in_pool, passed_s in steps:
        now_s += passed_s
        table.record(prefix(prompt), worker, now_s, in_pool=in_pool)
        sent |= {(worker.id, prompt[:i]) for i in range(1, len(prompt) + 1) if worker is not None}
        assert len(table) <= capacity
        known = [digest in table._blocks for digest in prefix(prompt).digests]
        assert known == sorted(known, reverse=True)
    places = table.places(prefix(asked), now_s)
    for worker in (A, B):
        cached = places.cached(worker)
        assert min(cached.device, cached.host, cached.pool) >= 0
        assert cached.total <= tokens(len(asked)) + 1e-6
        most = max((len(p) for w, p in sent if w == worker.id and asked.startswith(p)), default=0)
        assert cached.device + cached.host <= tokens(most) + 1e-6


def test_a_full_table_forgets_what_was_unseen_longest_last_blocks_first() -> None:
    table = PrefixTable(PlacementSettings(capacity_blocks=4))
    table.record(prefix("abc"), A, 0.0, in_pool=False)
    table.record(prefix("xy"), A, 1.0, in_pool=False)
    assert table.places(prefix("abc"), 1.0).believed(A) == pytest.approx(tokens(2), rel=0.01)
    assert table.places(prefix("xy"), 1.0).believed(A) == tokens(2)
