"""The synchronous client over a node in this process, and what it does when that fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from msgspec.structs import replace

from pdserve.errors import PageMismatch, PoolError, PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.client import batch
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.security.tokens import Secret
from tests.support.kvpool.faulty import PAGE_BYTES, Pool, empty_page, get, key, keys, page_of, put
from tests.support.waiting import SOON_S, until

COUNT = 60


def in_thread(call: Callable[[], list[bool]]) -> tuple[threading.Thread, list[list[bool]]]:
    results: list[list[bool]] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_pages_come_back_and_are_counted(pool: Pool) -> None:
    client = pool.client()
    wanted = keys(COUNT)
    assert put(client, wanted) == [True] * COUNT
    assert get(client, wanted) == [True] * COUNT
    assert client.exists([*wanted, key(COUNT)]) == [True] * COUNT + [False]
    assert (client.counters.pages_written, client.counters.pages_read) == (COUNT, COUNT)
    assert client.counters.bytes_read == COUNT * PAGE_BYTES
    assert client.clear() == COUNT
    assert client.exists(wanted) == [False] * COUNT


@pytest.mark.parametrize("move", [PoolClient.get, PoolClient.put])
@pytest.mark.parametrize(
    "pages",
    [
        [
            page_of(key(0)),
            [*page_of(key(1)), page_of(key(1))[0]],
        ],  # longer: it would reach into the next slot
        [page_of(key(0)), page_of(key(1))[::-1]],
        [page_of(key(0))],
    ],
    ids=["longer", "cut in another way", "one missing"],
)
def test_pages_of_one_call_that_are_not_cut_alike_are_refused_before_anything_moves(
    pool: Pool, move: Callable[..., list[bool]], pages: list[PageBuffers]
) -> None:
    client = pool.client()
    with pytest.raises(PageMismatch) as caught:
        move(client, keys(2), pages)
    assert isinstance(caught.value, PoolError)
    assert isinstance(caught.value, ValueError)
    assert client.exists(keys(2)) == [False] * 2


def test_no_keys_and_no_nodes() -> None:
    with Pool(nodes=0) as pool:
        client = pool.client()
        assert client.exists([]) == []
        assert client.exists(keys(2)) == put(client, keys(2)) == get(client, keys(2)) == [False] * 2


def test_a_node_that_does_not_answer_costs_one_deadline_in_all(pool: Pool) -> None:
    client = pool.client(exists_timeout_s=0.5, retry_after_s=60.0)
    wanted = keys(COUNT)
    put(client, wanted)
    pool.nodes[0].paused = True
    assert client.exists(wanted) == [False] * COUNT
    client.config = replace(client.config, exists_timeout_s=SOON_S)
    asked: list[str] = []
    pool.connector.before = lambda node, step: asked.append(node)
    for _ in range(50):
        assert client.exists(wanted) == [False] * COUNT
    assert asked == []
    pool.nodes[0].paused = False


def test_another_node_is_asked_while_the_nearest_is_down_and_the_nearest_again_when_it_is_back() -> None:
    with Pool(nodes=3) as pool:
        client = pool.client(retry_after_s=0.01)
        asked: list[str] = []
        pool.connector.before = lambda node, step: asked.append(node)
        assert put(client, keys(9)) == [True] * 9
        assert set(asked) == {"n0"}
        pool.doors[0].kill()
        assert client.exists(keys(9)) == [False] * 9  # the next node has no page yet
        asked.clear()
        assert put(client, keys(9)) == get(client, keys(9)) == [True] * 9
        assert set(asked) - {"n0"} == {"n1"}
        assert list(client.check().values()) == [None]
        pool.doors[0].restart()
        until(lambda: client.check().keys() == {"n0"})
        assert client.is_up


def test_a_corrupt_page_is_a_miss_once_and_gone_afterwards(pool: Pool) -> None:
    client = pool.client()
    wanted = keys(5)
    put(client, wanted)
    [node] = pool.nodes
    slot = node.state.store.find(1, wanted[2])
    node.memory[node.state.store.slots.offset(slot) + 5] ^= 1
    assert get(client, wanted) == [True, True, False, True, True]
    assert client.counters.pages_corrupt == 1
    assert client.exists(wanted) == [True, True, False, True, True]
    assert put(client, wanted) == [True] * 5
    assert get(client, wanted) == [True] * 5


def test_pages_that_were_read_stay_read_when_the_node_goes_while_it_is_told_so(pool: Pool) -> None:
    client = pool.client(retry_after_s=60.0)
    wanted = keys(COUNT)
    put(client, wanted)

    def fail(node: str, step: str) -> None:
        if step == "post":
            raise PoolUnavailable("gone")

    pool.connector.before = fail
    assert get(client, wanted) == [True] * COUNT
    pool.connector.before = lambda node, step: None
    assert client.exists(wanted) == [True] * COUNT


def no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a client's batches: as in a process that has all the threads it may have."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("pdserve-pool"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)


@pytest.mark.parametrize("without_threads", [no_thread_starts, process_ends])
def test_a_batch_is_done_by_its_caller_where_no_thread_can_be_had(
    pool: Pool, without_threads: Callable[[pytest.MonkeyPatch], None]
) -> None:
    client = pool.client()
    wanted, pages = keys(COUNT), [empty_page() for _ in range(COUNT)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_threads(monkeypatch)
        batch, results = in_thread(lambda: put(client, wanted) + client.get(wanted, pages))
        batch.join(SOON_S)
        assert results == [[True] * 2 * COUNT]
    for page in pages:
        for segment in page:
            segment[:] = 0  # they are the caller's again
    assert client.exists(wanted) == get(client, wanted) == [True] * COUNT
    assert not any(segment.any() for page in pages for segment in page), "written to after the return"


def test_pages_for_which_there_is_no_room_are_refused_and_counted() -> None:
    with Pool(nodes=1, max_reserved_bytes=4 * 1024) as pool:  # less than a page
        client = pool.client()
        assert put(client, keys(20)) == [False] * 20
        assert client.counters.pages_refused == 20


def test_a_page_that_another_client_is_writing_needs_no_second_write(pool: Pool) -> None:
    wanted = keys(1)
    [node] = pool.nodes
    other = node.connect("other")
    opened = node.call(other, m.OpenNamespace(1, "ns", {}), math.inf)
    assert isinstance(opened, m.Opened)
    node.call(other, m.Reserve(2, opened.namespace, wanted, [PAGE_BYTES]), math.inf)
    client = pool.client()
    assert put(client, wanted) == [True]
    assert client.counters.pages_present == 1
    assert client.exists(wanted) == [False]
    node.disconnect(other)
    assert put(client, wanted) == [True]
    assert client.exists(wanted) == [True]


@pytest.mark.parametrize("step", ["write_pages", "call"])
def test_a_put_over_its_deadline_stores_nothing_and_holds_nothing(pool: Pool, step: str) -> None:
    client = pool.client(put_timeout_s=0.05)
    assert client.check() == {"n0": None}

    def late(node: str, what: str) -> None:
        if what == step:
            time.sleep(0.1)  # longer than the deadline

    pool.connector.before = late
    assert put(client, keys(9)) == [False] * 9
    pool.connector.before = lambda node, what: None
    until(lambda: client.is_up)
    pool.check()
    assert client.exists(keys(9)) == [False] * 9


@pytest.mark.parametrize("step", ["connect", "call", "post", "read_pages", "write_pages"])
def test_whatever_step_times_out_the_answer_has_full_length(pool: Pool, step: str) -> None:
    client = pool.client()
    wanted = keys(COUNT)
    put(client, wanted)
    client.close()
    client = pool.client()

    def fail(node: str, what: str) -> None:
        if what == step:
            raise PoolTimeout("as told")

    pool.connector.before = fail
    for found in (client.exists(wanted), get(client, wanted), put(client, [key(n) for n in range(99, 119)])):
        assert len(found) in (COUNT, 20)
    pool.connector.before = lambda node, what: None
    until(lambda: client.is_up)
    assert get(client, wanted) == [True] * COUNT


def test_close_ends_operations_under_way_with_misses(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose parts wait for a thread: they must end, not be forgotten."""
    monkeypatch.setattr(batch, "COPY_THREADS", 3)
    monkeypatch.setattr(batch, "CHUNK_BYTES", 20 * PAGE_BYTES)
    client = pool.client(connections=3)
    wanted = keys(COUNT)
    put(client, wanted)
    reading, go_on = threading.Barrier(4), threading.Event()

    def hold(node: str, what: str) -> None:
        if what == "read_pages":
            reading.wait(SOON_S)
            go_on.wait(SOON_S)

    pool.connector.before = hold
    first, first_found = in_thread(lambda: get(client, wanted))
    reading.wait(SOON_S)  # all connections are in use
    others = [in_thread(lambda: get(client, wanted)) for _ in range(3)]
    until(lambda: client._runner._threads._work_queue.qsize() > 0)
    client.close()
    go_on.set()
    for thread, found in [(first, first_found), *others]:
        thread.join(SOON_S)
        assert [len(one) for one in found] == [COUNT]
    assert first_found == [[True] * COUNT]
    assert all(found == [[False] * COUNT] for _, found in others)


def test_a_closed_client_answers_with_misses(pool: Pool) -> None:
    client = pool.client()
    put(client, keys(9))
    client.close()
    client.close()
    assert client.exists(keys(9)) == get(client, keys(9)) == put(client, keys(9)) == [False] * 9
    assert client.clear() == 0


@pytest.mark.parametrize(
    ("beyond_bytes", "page_key", "fits"), [(0, "", True), (1, "", False), (0, "k" * 32, False)]
)
def test_a_node_with_slabs_smaller_than_a_page_and_its_tag_is_refused(
    pool: Pool, beyond_bytes: int, page_key: str, fits: bool
) -> None:
    page_bytes = pool.nodes[0].layout.slab_bytes + beyond_bytes
    config = replace(pool.config(), page_key=Secret(page_key))
    with closing(PoolClient(config, "ns", {}, connector=pool.connector, page_bytes=page_bytes)) as client:
        errors = client.check().values()
    assert all(error is None if fits else isinstance(error, PoolRefused) for error in errors)
