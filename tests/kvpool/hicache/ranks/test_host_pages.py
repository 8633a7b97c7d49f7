"""Where the pages of a host pool lie, learnt from addresses, and the same bytes in another mapping."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import PageMismatch
from pdserve.kvpool.hicache.ranks.host_pages import HostPages, MappedHostPages, Segment, learn_segments

BASE = 1 << 40


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 64)), min_size=1, max_size=6),
    st.integers(64, 300),
    st.integers(2, 9),
)
def test_every_linear_layout_is_learnt(starts: list[tuple[int, int]], stride: int, pages: int) -> None:
    addresses = [[BASE + start + page * stride for start, _ in starts] for page in range(pages)]
    sizes = [[size for _, size in starts]] * pages
    learnt = learn_segments(addresses, sizes, [(0, 1 << 20), (BASE, 1 << 20)])
    assert learnt == [Segment(1, start, stride, size) for start, size in starts]


@pytest.mark.parametrize(
    ("addresses", "sizes"),
    [
        ([[100], [200], [301]], [[8]] * 3),  # distances differ
        ([[100], [200]], [[8], [9]]),  # sizes differ
        ([[5000], [5100]], [[8]] * 2),  # in no region
        ([[100]], [[8]]),  # one page shows no distance
    ],
)
def test_what_is_not_linear_is_not_guessed(addresses: list[list[int]], sizes: list[list[int]]) -> None:
    assert learn_segments(addresses, sizes, [(0, 1000)]) is None


def host(size: int, *segments: Segment, pages: int = 4) -> tuple[HostPages, mmap.mmap]:
    fd = os.memfd_create("host")
    os.ftruncate(fd, size)
    return HostPages([(fd, size)], list(segments), pages), mmap.mmap(fd, size)


def test_a_mapping_elsewhere_shows_the_same_bytes() -> None:
    pages, ours = host(8192, Segment(0, 0, 100, 60), Segment(0, 4096, 100, 40))
    bytes_ = np.frombuffer(ours, np.uint8)
    bytes_[:] = np.arange(8192) % 251
    mapped = MappedHostPages.map(pages)
    first, second = mapped.page(3)
    assert np.array_equal(first, bytes_[300:360])
    assert np.array_equal(second, bytes_[4396:4436])
    bytes_[300:360] = 0
    assert not first.any()
    assert mapped.number([first, second]) == 3


@pytest.mark.parametrize("number", [-1, 4, 1 << 40])
def test_a_page_that_is_not_in_the_pool_is_refused(number: int) -> None:
    mapped = MappedHostPages.map(host(4096, Segment(0, 0, 100, 60))[0])
    with pytest.raises(PageMismatch):
        mapped.page(number)


@pytest.mark.parametrize(
    "segment",
    [Segment(0, 0, 1400, 60), Segment(0, 200, -100, 60), Segment(0, 4095, 0, 2), Segment(1, 0, 1, 1)],
)
def test_pages_beyond_the_memory_are_refused(segment: Segment) -> None:
    with pytest.raises(PageMismatch):
        MappedHostPages.map(host(4096, segment)[0])
