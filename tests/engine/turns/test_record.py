"""Records as pages, and the bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.turns import record
from pdserve.engine.turns.record import ENTRY_BYTES, Memory

FULL = record.FIRST_TOKENS


@pytest.mark.parametrize("tokens", [1, FULL, FULL + 1, FULL + record.PAGE_BYTES // 4 + 1, record.MAX_TOKENS])
def test_a_record_comes_back_as_it_was(tokens: int) -> None:
    ids = [int(i) for i in np.random.default_rng(0).integers(0, 2**32, tokens)]
    pages = record.to_pages(ids)
    assert [page.nbytes for page in pages] == [record.PAGE_BYTES] * len(pages)
    assert record.page_count(pages[0]) == len(pages) <= record.MAX_PAGES
    assert record.from_pages(pages) == ids


@pytest.mark.parametrize("tokens", [0, record.MAX_TOKENS + 1])
def test_a_record_of_another_size_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        record.to_pages([1] * tokens)


@settings(deadline=None)
@given(st.binary(max_size=32))
def test_a_page_of_anything_is_no_record_or_a_bounded_one(start: bytes) -> None:
    page = np.zeros(record.PAGE_BYTES, np.uint8)
    page[: len(start)] = np.frombuffer(start, np.uint8)
    assert 0 <= record.page_count(page) <= record.MAX_PAGES


def test_the_pages_of_a_record_have_keys_of_their_own() -> None:
    keys = [key for start in (b"a" * 32, b"b" * 32) for key in record.page_keys(start, record.MAX_PAGES)]
    assert len(set(keys)) == len(keys) == 2 * record.MAX_PAGES
    assert {len(key) for key in keys} == {32}


def test_memory_is_bounded_and_forgets_the_longest_unused_first() -> None:
    memory = Memory(3 * (ENTRY_BYTES + 4))
    for key in (b"a", b"b", b"c"):
        memory.put(key, [1])
    assert memory.get(b"a") is not None
    memory.put(b"d", [2])
    kept = {key for key in (b"a", b"b", b"c", b"d") if memory.get(key) is not None}
    assert kept == {b"a", b"c", b"d"}
    memory.put(b"a", [1] * 1000)  # too large for all of it: the old one is gone too
    assert memory.get(b"a") is None
    assert memory.size_bytes == 2 * (ENTRY_BYTES + 4)
