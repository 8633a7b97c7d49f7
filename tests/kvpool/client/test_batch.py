"""A batch of pages in chunks: by bytes, in order, each stored by itself, and none too late."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PoolTimeout
from pdserve.kvpool.client import batch as batches
from pdserve.kvpool.client import operations
from pdserve.kvpool.client.batch import CHUNK_BYTES, COPIED_BYTES, Batch
from pdserve.kvpool.client.deadline import LEAST_BYTES, Deadline, Speed
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import MAX_KEYS, MAX_PAGES
from tests.support.kvpool.faulty import PAGE_BYTES, Pool, get, keys, put
from tests.support.waiting import until


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four pages, wherever they go."""
    monkeypatch.setattr(batches, "CHUNK_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(batches, "COPIED_BYTES", 4 * PAGE_BYTES)


def batch_of(count: int, page_bytes: int, timeout_s: float = 5.0) -> Batch[bool]:
    names = keys(count)
    return Batch(
        names,
        [False] * count,
        Deadline(time.monotonic() + timeout_s),
        lambda *_: [],
        page_bytes=page_bytes,
    )


@given(
    st.integers(1, 6000),
    st.sampled_from([0, 1, 4096, 1 << 20, 9 << 20, 64 << 20, 1 << 30]),
    st.booleans(),
)
def test_chunks_hold_every_key_in_order_and_no_chunk_is_too_large(
    count: int, page_bytes: int, is_mapped: bool
) -> None:
    chunks = batch_of(1, page_bytes).divide(list(range(count)), is_mapped=is_mapped)
    assert [place for chunk in chunks for place in chunk] == list(range(count))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (MAX_PAGES if page_bytes else MAX_KEYS)
    if page_bytes:
        most_bytes = COPIED_BYTES if is_mapped else CHUNK_BYTES
        assert max(sizes) == 1 or max(sizes) * page_bytes <= most_bytes


def test_a_batch_larger_than_what_a_node_grants_at_a_time_is_stored_whole() -> None:
    """Else the end of the chain would be refused, at every turn anew."""
    with Pool(nodes=1, max_reserved_bytes=64 * 1024) as pool:
        client = pool.client()
        count = 100  # the node has room for 128, and grants 8 at a time
        assert put(client, keys(count)) == [True] * count
        assert get(client, keys(count)) == [True] * count
        assert client.counters.pages_refused == 0


@pytest.mark.parametrize("pinned_pages", [12, 1000])
def test_pages_that_are_copied_here_take_few_steps_whatever_a_message_may_hold(
    monkeypatch: pytest.MonkeyPatch, pinned_pages: int
) -> None:
    """Each step may cost a switch interval beside a busy scheduler."""
    monkeypatch.setattr(batches, "COPY_THREADS", 1)
    monkeypatch.setattr(operations, "UNPINNED_BYTES", 0)
    monkeypatch.setattr(m, "MAX_BATCH_BYTES", 4 * PAGE_BYTES)
    with Pool(nodes=1, max_pinned_bytes=pinned_pages * 8 * 1024) as pool:
        client = pool.client()
        steps: list[str] = []
        pool.connector.before = lambda node, step: steps.append(step)
        assert put(client, keys(20)) == [True] * 20
        assert [step for step in steps if step != "call"] == ["connect", "write_pages"]
        steps.clear()
        assert get(client, keys(20)) == [True] * 20
        assert steps.count("read_pages") == steps.count("post") == (1 if pinned_pages > 20 else 2)
        assert client.counters.pages_missed == 0


def test_a_few_pages_of_mapped_memory_are_read_by_one_message(pool: Pool) -> None:
    client = pool.client()
    steps: list[str] = []
    pool.connector.before = lambda node, step: steps.append(step)
    assert put(client, keys(4)) == [True] * 4
    steps.clear()
    assert get(client, keys(4)) == [True] * 4
    assert steps == ["call", "read_pages"]


def test_what_a_node_gave_beside_a_refusal_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_BATCH_BYTES", 4 * PAGE_BYTES)
    with Pool(nodes=1) as pool:  # which checks at its end that nothing is held
        client = pool.client()
        assert put(client, keys(4)) == [True] * 4

        def refuse(node: str, request: m.Request) -> m.Reply | None:
            if isinstance(request, m.Get | m.Reserve) and keys(9)[8] in request.keys:
                return m.Fault(request.id, "overloaded", "not now")
            return None

        pool.connector.answer = refuse
        assert get(client, keys(9)) == [False] * 9
        assert put(client, keys(9)) == [False] * 9
        until(lambda: pool.nodes[0].held == (0, 0, 0))


@pytest.mark.usefixtures("short_chunks")
def test_pages_are_visible_before_the_batch_is_done(pool: Pool) -> None:
    client, other = pool.client(connections=1), pool.client()
    seen: list[int] = []

    def look(node: str, step: str) -> None:
        if step == "write_pages":
            seen.append(sum(other.exists(keys(12))))

    pool.connector.before = look
    assert put(client, keys(12)) == [True] * 12
    assert seen == [0, 4, 8]


@pytest.mark.usefixtures("short_chunks")
def test_a_chunk_that_fails_costs_its_own_pages_only(pool: Pool) -> None:
    client = pool.client(connections=1, retry_after_s=60.0)
    writes: list[str] = []

    def fail(node: str, step: str) -> None:
        if step == "write_pages":
            writes.append(node)
            if len(writes) == 2:
                raise PoolTimeout("slow")

    pool.connector.before = fail
    stored = put(client, keys(12))
    assert sum(stored) == 4  # the chunks after it found the node down


@pytest.mark.usefixtures("short_chunks")
def test_chunks_are_copied_by_as_many_threads_as_may(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "COPY_THREADS", 1)
    client = pool.client(connections=2)
    threads = set[int]()
    pool.connector.before = lambda node, step: threads.add(threading.get_ident())
    assert put(client, keys(12)) == [True] * 12
    assert threads == {threading.get_ident()}
    client.clear()
    monkeypatch.setattr(batches, "COPY_THREADS", 2)
    together = threading.Barrier(2, timeout=30)

    def meet(node: str, step: str) -> None:
        if step == "write_pages":
            together.wait()  # broken, and so an error, if chunks came one after the other

    pool.connector.before = meet
    assert put(client, keys(8)) == [True] * 8


def test_a_chunk_that_comes_too_late_is_not_begun() -> None:
    link: Any = SimpleNamespace(speed=Speed())
    late = batch_of(1, 1 << 20, timeout_s=-0.001)
    assert late.is_worth_a_try(link, CHUNK_BYTES)  # nothing is known of the node
    link.speed.learn(CHUNK_BYTES, 0.01)
    assert not late.is_worth_a_try(link, CHUNK_BYTES)
    assert batch_of(1, 1 << 20, timeout_s=3600.0).is_worth_a_try(link, CHUNK_BYTES)
    link.speed.learn(CHUNK_BYTES, 1e6)  # ever so slow
    fresh = batch_of(1, 1 << 20, timeout_s=3600.0)
    assert fresh.is_worth_a_try(link, CHUNK_BYTES)  # it may be faster by now


def test_the_speed_follows_what_is_seen() -> None:
    speed = Speed()
    speed.learn(10, 100.0)  # too small to tell
    assert speed.allows(1 << 30, 0.001)
    for _ in range(50):
        speed.learn(LEAST_BYTES, LEAST_BYTES / 1e6)
    assert speed.allows(10_000_000, 16.0)
    assert not speed.allows(10_000_000, 14.0)
    for _ in range(50):
        speed.learn(LEAST_BYTES, LEAST_BYTES / 1e9)
    assert speed.allows(10_000_000, 1.0)
