from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.request_body import parse_request
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.prefix_index import (
    BLOCK_BYTES,
    DEVICE_HALF_LIFE_S,
    FIRST_BLOCK_BYTES,
    HOST_HALF_LIFE_S,
    MAX_PLACES,
    PLACE_BYTES,
    Cached,
    Places,
    Prefix,
    PrefixTable,
    prefix_of,
)

ROOM = 1 << 20
A, B = Worker("decode", "http://a:1"), Worker("decode", "http://b:1")


def prefix(blocks: str) -> Prefix:
    """A prompt of one block per letter; prompts with the same first letters share those blocks."""
    return Prefix(tuple(hash(blocks[: i + 1]) for i in range(len(blocks))))


def tokens(blocks: int) -> int:
    return blocks * FIRST_BLOCK_BYTES // 4


def own(places: Places, worker: Worker) -> float:
    """Estimated tokens in the worker's own memory."""
    cached = places.cached(worker)
    return cached.device + cached.host


def chat(*contents: str, **more: object) -> Prefix:
    messages = [{"role": "user", "content": content} for content in contents]
    view = parse_request(json.dumps({"messages": messages} | more).encode())
    return prefix_of(view, view.messages, "m")


def test_a_conversation_that_goes_on_keeps_its_blocks_and_what_else_decides_pages_keeps_them_apart() -> None:
    first, second = chat("a" * 5000), chat("a" * 5000, "b" * 5000)
    assert len(first.digests) == 4  # the fifth block is not full
    assert second.digests[:4] == first.digests
    assert len(second.digests) == 9
    assert set(first.digests).isdisjoint(chat("b" * 5000).digests)
    for more in ({"tools": [{"type": "function"}]}, {"cache_salt": "x"}, {"system": "x"}):
        assert set(first.digests).isdisjoint(chat("a" * 5000, **more).digests)
    view = parse_request(json.dumps({"prompt": "a" * 5000}).encode())
    of_m, of_n = prefix_of(view, view.prompt, "m"), prefix_of(view, view.prompt, "n")  # of two models
    table = PrefixTable(ROOM)
    table.record(of_m, A, 0.0, in_pool=True)
    assert table.places(of_m, 0.0).cached(A).total == tokens(4)
    assert table.places(of_n, 0.0).cached(A).total == 0
    view = parse_request(json.dumps({"input_ids": [12345] * 1000}).encode())
    ids = prefix_of(view, view.input_ids, "m")
    assert ids.tokens(1) == 1024 // 6, "they take more bytes than text"


def test_a_prefix_is_where_it_was_sent_fades_from_device_to_host_to_pool_and_is_lost_by_a_restart() -> None:
    table = PrefixTable(ROOM)
    table.record(prefix("abcd"), A, 0.0, in_pool=True)
    asked = prefix("abxy")
    assert table.places(asked, 0.0).cached(A) == Cached(device=tokens(2))
    later = table.places(asked, DEVICE_HALF_LIFE_S).cached(A)
    assert later.device == pytest.approx(tokens(1))
    left = tokens(2) * 2 ** -(DEVICE_HALF_LIFE_S / HOST_HALF_LIFE_S)
    assert later.device + later.host == pytest.approx(left)
    assert later.total == pytest.approx(tokens(2), rel=0.02)  # what it has lost is in the pool
    assert table.places(asked, 0.0).cached(B) == Cached(pool=tokens(2))
    table.record(prefix("ab"), B, 0.0, in_pool=False)
    table.record(prefix("abcd"), B, HOST_HALF_LIFE_S / 20, in_pool=False)
    table.record(prefix("ab"), B, HOST_HALF_LIFE_S / 10, in_pool=False)
    longest = own(table.places(prefix("abcd"), HOST_HALF_LIFE_S / 10), B)
    assert longest == pytest.approx(tokens(4) * 2**-0.05)
    worker = Worker("decode", "http://c:1")
    fleet = Fleet([worker])
    fleet.on_probe_ready(worker)
    table.record(prefix("xy"), worker, 0.0, in_pool=False)
    fleet.on_probe_not_ready(worker)
    fleet.on_probe_ready(worker)
    assert table.places(prefix("xy"), 0.0).cached(worker) == Cached()


def test_a_block_remembers_the_workers_it_was_last_at() -> None:
    table, passing = PrefixTable(ROOM), [Worker("decode", f"http://w{i}:1") for i in range(MAX_PLACES)]
    table.record(prefix("a"), B, 0.0, in_pool=False)
    for worker in (A, *passing[1:], A, passing[0]):
        table.record(prefix("a"), worker, 0.0, in_pool=False)
    places = table.places(prefix("a"), 0.0)
    assert own(places, A) == own(places, passing[0]) == tokens(1)
    assert own(places, B) == 0


PROMPTS = st.text("ab", min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(PROMPTS, st.sampled_from([A, B, None]), st.booleans(), st.floats(0, 50)), max_size=40
)


@given(STEPS, PROMPTS, st.integers(1, 12))
def test_no_more_is_believed_than_was_sent_and_what_is_known_are_first_blocks(
    steps: list[tuple[str, Worker | None, bool, float]], asked: str, capacity: int
) -> None:
    capacity_bytes = capacity * (BLOCK_BYTES + PLACE_BYTES)
    table = PrefixTable(capacity_bytes)
    now_s, sent = 0.0, set[tuple[str, str]]()
    for prompt, worker, in_pool, passed_s in steps:
        now_s += passed_s
        table.record(prefix(prompt), worker, now_s, in_pool=in_pool)
        sent |= {(worker.id, prompt[:i]) for i in range(1, len(prompt) + 1) if worker is not None}
        assert table.used_bytes <= capacity_bytes
        assert (table.used_bytes == 0) is (len(table) == 0)
        known = [digest in table for digest in prefix(prompt).digests]
        assert known == sorted(known, reverse=True)
    places = table.places(prefix(asked), now_s)
    for worker in (A, B):
        cached = places.cached(worker)
        assert min(cached.device, cached.host, cached.pool) >= 0
        assert cached.total <= tokens(len(asked)) + 1e-6
        most = max((len(p) for w, p in sent if w == worker.id and asked.startswith(p)), default=0)
        assert cached.device + cached.host <= tokens(most) + 1e-6


def test_a_full_table_forgets_what_was_unseen_longest_last_blocks_first() -> None:
    table = PrefixTable(4 * (BLOCK_BYTES + PLACE_BYTES))
    table.record(prefix("abc"), A, 0.0, in_pool=False)
    table.record(prefix("xy"), A, 1.0, in_pool=False)
    assert own(table.places(prefix("abc"), 1.0), A) == pytest.approx(tokens(2), rel=0.01)
    assert own(table.places(prefix("xy"), 1.0), A) == tokens(2)


def fill(table: PrefixTable, prefixes: int, workers: int) -> Iterator[int]:
    """Record so many prefixes of one block, each at some workers; yields after every thousand."""
    dice, at = random.Random(prefixes), [Worker("decode", f"http://w{i}:1") for i in range(workers)]
    for number in range(prefixes):
        prefix = Prefix((dice.getrandbits(64),))
        for worker in dice.sample(at, dice.randint(1, workers)):
            table.record(prefix, worker, dice.random(), in_pool=True)
        if number % 1000 == 0:
            yield number


@pytest.mark.parametrize(("capacity_bytes", "workers"), [(3_000_000, 1), (4 << 20, 1), (2 << 20, 9)])
def test_the_table_takes_no_more_memory_than_it_says(capacity_bytes: int, workers: int) -> None:
    table, begin = PrefixTable(capacity_bytes), 0
    tracemalloc.start()
    try:
        for number in fill(table, 30_000 // workers, workers):
            begin = begin or tracemalloc.get_traced_memory()[0]
            assert tracemalloc.get_traced_memory()[0] - begin <= table.used_bytes <= capacity_bytes, number
    finally:
        tracemalloc.stop()
    assert table.used_bytes > 0.99 * capacity_bytes
