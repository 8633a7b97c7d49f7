"""Which pages a request has, and how many questions it takes to count those in the pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.engine import page_names
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.page_names import ASKED_KEYS, SAMPLED_PAGES, PageNames, RequestPages, committed_pages
from pdserve.engine.sglang.tokenizer_manager import SglangRequest
from pdserve.pages import PagePart, all_rank_suffixes, page_hashes, part_suffix, pool_key
from tests.support.engine.manager import State

PAGE = 4  # tokens
RANKS = all_rank_suffixes(replicated=False, tp_size=8, pp_size=1)
ALL = {"kv": 0, "swa": 2, "indexer": 0}
WINDOWS = PagePart("swa", 2, [part_suffix(rank, "swa", ALL) for rank in RANKS[:2]])
INDEX = PagePart("indexer", 0, [part_suffix(rank, "indexer", ALL) for rank in RANKS[:2]])


class Pool:
    """Has all pages but `lost`, and notes what it is asked."""

    def __init__(self, lost: Sequence[bytes] = ()) -> None:
        self.lost = set(lost)
        self.asked: list[int] = []

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        self.asked.append(len(keys))
        return [key not in self.lost for key in keys]


def request(**prompts: Sequence[int]) -> HttpRequest:
    made: dict[str, Any] = {
        rid: SglangRequest(rid, State(True, True), list(tokens)) for rid, tokens in prompts.items()
    }
    return HttpRequest("id", "/generate", requests=made)


def pages_of(count: int, ranks: Sequence[bytes] = RANKS) -> RequestPages:
    return RequestPages(PageNames(PAGE, ranks), {"r": page_hashes(range(count * PAGE), PAGE)})


async def test_a_request_has_each_page_once_at_every_rank_and_one_end_a_sequence() -> None:
    pages = await PageNames(PAGE, RANKS).of_prompts(
        request(a=range(12), b=[*range(8), 99, 99, 99, 99, 1], c=[1])
    )
    a, b = page_hashes(range(12), PAGE), page_hashes([*range(8), 99, 99, 99, 99], PAGE)
    assert pages.all_keys() == [pool_key(digest, rank) for digest in (*a, b[2]) for rank in RANKS]
    assert pages.ends() == [pool_key(digest, rank) for digest in (a[2], b[2]) for rank in RANKS]
    assert len(pages) == len(pages.all_keys())


@pytest.mark.parametrize(("cached", "is_found"), [(0, False), (4, False), (8, False), (12, True)])
def test_an_end_counts_as_found_where_sglang_found_all_that_it_looks_for(cached: int, is_found: bool) -> None:
    pages = pages_of(4, [b""])
    assert pages.ends_found({"r": 16}, {"r": cached}) == (pages.ends() if is_found else [])


def test_an_end_counts_as_found_where_it_lies_in_what_was_found_of_a_longer_prompt() -> None:
    digests = page_hashes(range(16), PAGE)
    pages = RequestPages(PageNames(PAGE, [b""]), {"short": digests[:2], "long": digests})
    assert pages.ends_found({"short": 11, "long": 16}, {"long": 8}) == [digests[1]]


@pytest.mark.parametrize(
    ("tokens", "pages", "cached", "is_found"), [(16, 3, 8, False), (17, 4, 12, True), (18, 4, 12, False)]
)
async def test_a_page_that_is_named_by_the_token_after_it_too_is_found_a_token_later(
    tokens: int, pages: int, cached: int, is_found: bool
) -> None:
    names = PageNames(PAGE, [b""], pairs=True)
    found = await names.of_prompts(request(r=range(tokens)))
    assert found.all_keys() == page_hashes(range(tokens), PAGE, pairs=True)
    assert len(found) == pages
    assert found.ends_found({"r": tokens}, {"r": cached}) == (found.ends() if is_found else [])
    [prefix] = names.of_prefixes(range(tokens), [8], None, None)
    assert prefix.last_page == (page_hashes(range(9), PAGE, pairs=True)[-1],)


async def test_a_long_request_is_hashed_once_and_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def noted(*args: Any, **more: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return page_hashes(*args, **more)

    monkeypatch.setattr(page_names, "page_hashes", noted)
    names = PageNames(PAGE, RANKS)
    pages = await names.of_prompts(request(r=range(page_names.HASHED_AT_ONCE_TOKENS + 1)))
    pages.ends(), pages.sample(), pages.all_keys(), len(pages)
    await names.of_prompts(request(r=range(page_names.HASHED_AT_ONCE_TOKENS)))
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_all_pages_of_a_short_request_are_asked_for() -> None:
    pages = pages_of(ASKED_KEYS // len(RANKS))
    pool = Pool(lost=pages.all_keys()[5:7])
    assert await committed_pages(pool, pages) == ASKED_KEYS - 2
    assert pool.asked == [ASKED_KEYS]


async def test_the_ends_and_a_sample_are_asked_for_of_a_long_request() -> None:
    pages, pool = pages_of(2048), Pool()
    assert await committed_pages(pool, pages) == 2048 * len(RANKS)
    assert pool.asked == [len(RANKS) + SAMPLED_PAGES]


@pytest.mark.parametrize("rank", range(len(RANKS)))
async def test_a_long_request_is_counted_in_full_where_its_end_is_missing_at_one_rank(rank: int) -> None:
    pages = pages_of(2048)
    assert await committed_pages(Pool(lost=[pages.ends()[rank]]), pages) == len(pages) - 1


@pytest.mark.parametrize("node", range(8))
async def test_a_long_request_is_counted_in_full_where_one_of_eight_nodes_lost_its_pages(node: int) -> None:
    pages = pages_of(2048)
    lost = [key for key in pages.all_keys() if key[0] % 8 == node]
    assert await committed_pages(Pool(lost), pages) == len(pages) - len(lost)


async def test_nothing_is_asked_for_a_request_without_pages() -> None:
    pool = Pool()
    assert await committed_pages(pool, await PageNames(PAGE, RANKS).of_prompts(request(r=[1]))) == 0
    assert pool.asked == []


def with_parts(count: int) -> RequestPages:
    """Pages of two ranks with a window of two pages, and a part that all pages have."""
    digests = page_hashes(range(count * PAGE), PAGE)
    return RequestPages(PageNames(PAGE, RANKS[:2], [WINDOWS, INDEX]), {"r": digests})


def test_an_end_has_the_parts_that_its_sequence_needs() -> None:
    pages = with_parts(5)
    digests = pages.chains["r"]
    window = [pool_key(digest, suffix) for digest in digests[3:] for suffix in WINDOWS.suffixes]
    index = [pool_key(digests[4], suffix) for suffix in INDEX.suffixes]
    assert pages.ends() == [*(pool_key(digests[4], rank) for rank in RANKS[:2]), *index, *window]
    assert pages.ends_found({"r": 20}, {"r": 16}) == pages.ends()
    assert len(with_parts(1).ends()) == 6  # a sequence that is shorter than a window
    assert len(pages) == 10


@pytest.mark.parametrize(("pages", "expected"), [(pages_of(3, [b""]), True), (with_parts(3), False)])
def test_an_end_without_its_windows_has_not_arrived(pages: RequestPages, expected: bool) -> None:
    """Nobody waits long for the next ones where windows never come."""
    assert pages.arrived([True, False]) is expected
    assert pages.arrived([True, True])
    assert not pages.arrived([False, False])


@pytest.mark.parametrize(
    ("part", "page", "restorable"),
    [(WINDOWS, 4, 4), (WINDOWS, 3, 3), (WINDOWS, 0, 5), (INDEX, 2, 2), (None, 3, 3)],
)
@pytest.mark.parametrize("rank", [0, 1])
async def test_pages_count_up_to_where_a_sequence_can_be_restored(
    part: PagePart | None, page: int, restorable: int, rank: int
) -> None:
    pages = with_parts(5)
    suffixes = RANKS[:2] if part is None else part.suffixes
    pool = Pool(lost=[pool_key(pages.chains["r"][page], suffixes[rank])])
    assert await committed_pages(pool, pages) == 2 * restorable
    # all parts of all pages are only asked for where something that is needed is missing
    assert pool.asked[1:] == [30] * (restorable < 5)


async def test_the_parts_of_a_long_request_are_asked_for_at_its_end() -> None:
    pages, pool = with_parts(2048), Pool()
    assert await committed_pages(pool, pages) == 2048 * 2
    assert pool.asked == [len(pages.ends()) + len(pages.sample())]
