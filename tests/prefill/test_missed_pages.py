"""Why a prompt's pages were computed: from the pool's word, and how it is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.engine.http.cache_report import Found, Reuse
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.page_names import PageNames, RequestPages
from pdserve.kvpool.protocol.messages import Fate
from pdserve.pages import page_hashes, pool_key
from pdserve.prefill.missed_pages import Miss, MissedPages, header_of, miss_of

PAGE = 4


class Pool:
    """Tells the same of every page."""

    def __init__(self, fate: Fate | None) -> None:
        self.fate = fate
        self.asked: list[bytes] = []

    async def fates(self, keys: Sequence[bytes], tenant: str = "") -> list[Fate | None]:
        self.asked += keys
        return [self.fate] * len(keys)


class Counts:
    def __init__(self) -> None:
        self.missed: dict[str, int] = {}

    def miss(self, reason: str, tokens: int) -> None:
        self.missed[reason] = self.missed.get(reason, 0) + tokens


def pages_of(count: int) -> RequestPages:
    return RequestPages(PageNames(PAGE, [b""]), {"r": page_hashes(range(count * PAGE), PAGE)})


@pytest.mark.parametrize(
    ("fate", "reason", "age_s"),
    [
        (Fate(), "never_stored", None),
        (Fate(1.0), "never_stored", None),  # stored by this very prompt
        (Fate(1.0, "capacity", 30.0), "evicted", 30.0),
        (Fate(None, "slab", 30.0), "evicted", 30.0),
        (Fate(None, "quota", 30.0), "over_quota", 30.0),
        (Fate(None, "ttl", 30.0), "expired", 30.0),
        (Fate(None, "dropped", 30.0), "dropped", 30.0),
        (Fate(None, "a newer node's", 30.0), "unknown", 30.0),
        (Fate(30.0), "not_fetched", 30.0),
        (Fate(30.0, "capacity", 60.0), "not_fetched", 30.0),
        (Fate(None, "capacity", 1.0), "unknown", None),  # was it there when the prompt came?
        (None, "unknown", None),
    ],
)
def test_a_miss_has_the_reason_of_the_time_when_its_prompt_came(
    fate: Fate | None, reason: str, age_s: float | None
) -> None:
    assert miss_of(fate, 64, asked_ago_s=2.0) == Miss(reason, 64, age_s)


def test_the_header_sums_tokens_by_reason_and_tells_the_youngest_age() -> None:
    misses = [Miss("never_stored", 4, None), Miss("evicted", 8, 9.0), Miss("evicted", 8, 3.25)]
    assert header_of(misses) == "evicted=16;age_s=3.2, never_stored=4"
    assert header_of([]) == ""


@pytest.mark.parametrize(
    ("tokens", "cached", "first", "missed"),
    [
        (16, 0, 0, 12),  # SGLang looks for all but the last token: three pages of four
        (17, 0, 0, 16),
        (17, 8, 2, 8),
        (17, 11, 2, 8),  # part of a page, from the device
    ],
)
def test_the_first_page_that_was_not_found_is_asked_about(
    tokens: int, cached: int, first: int, missed: int
) -> None:
    pages = pages_of(4)
    key = pool_key(pages.chains["r"][first], b"")
    assert pages.missed({"r": tokens}, {"r": cached}) == [(key, missed)]


@pytest.mark.parametrize(("tokens", "cached"), [(16, 12), (17, 16), (3, 0)])
def test_where_all_was_found_that_can_be_nothing_is_asked(tokens: int, cached: int) -> None:
    assert pages_of(4).missed({"r": tokens}, {"r": cached}) == []


async def test_misses_are_counted_of_requests_that_were_computed_here_first() -> None:
    pool, counts = Pool(Fate(None, "capacity", 1000.0)), Counts()
    missed = MissedPages(pool, counts)  # type: ignore[arg-type]
    await missed.count(answered(Reuse([])), pages_of(5))
    assert counts.missed == {"evicted": 8}
    assert len(pool.asked) == 1
    await missed.count(answered(Reuse([Found(pool=17)])), pages_of(5))  # a prefill worker computed it
    assert len(pool.asked) == 1


def answered(reuse: Reuse) -> HttpRequest:
    """A prompt of 17 tokens, of which 8 were found."""
    reuse.begin(1, 1)
    reuse.sent("r")
    reuse.note("r", Found(device=8), 17)
    made: Any = HttpRequest("id", "/generate", started_s=time.monotonic(), reuse=reuse)
    return made
