"""What every codec of tiers promises, the example of docs/extending/codec.md included."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.examples.codec import DeltaCodec
from pdserve.kvpool.tiers.codecs.base import Compressor
from pdserve.kvpool.tiers.codecs.zstd import Zstd
from tests.support.kvpool.tier_tools import KIB

CODECS: dict[str, Callable[[], Compressor]] = {"zstd": Zstd, "the documents' example": DeltaCodec}
each = pytest.mark.parametrize("codec", sorted(CODECS))


def back(codec: Compressor, stored: bytes, length: int) -> bytes:
    into = bytearray(length + 8)
    codec.decompress(memoryview(stored), memoryview(into)[:length])
    assert into[length:] == bytes(8), "it wrote beyond the page"
    return bytes(into[:length])


@each
@given(data=st.data(), item_bytes=st.integers(1, 16))
def test_a_page_comes_back_as_it_was(codec: str, data: st.DataObject, item_bytes: int) -> None:
    count = data.draw(st.integers(1, 700))
    page = data.draw(st.binary(min_size=count, max_size=count))
    made = CODECS[codec]()
    assert back(made, made.compress(memoryview(page), item_bytes), len(page)) == page


@each
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_whole_pages_come_back(codec: str, item_bytes: int) -> None:
    page = np.random.default_rng(item_bytes).standard_normal(8 * KIB).astype(np.float32).tobytes()
    made = CODECS[codec]()
    assert back(made, made.compress(memoryview(page), item_bytes), len(page)) == page


@each
@given(stored=st.binary(max_size=200))
def test_other_bytes_are_refused(codec: str, stored: bytes) -> None:
    with pytest.raises(ValueError):
        back(CODECS[codec](), stored, 1000)


@each
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_damage_is_refused_or_gives_a_page_of_this_length(codec: str, at: int, bit: int) -> None:
    """The tier's checksums find what a codec cannot."""
    made = CODECS[codec]()
    stored = bytearray(made.compress(memoryview(bytes(range(256)) * 16), 2))
    stored[at % len(stored)] ^= 1 << bit
    try:
        assert len(back(made, bytes(stored), 4 * KIB)) == 4 * KIB
    except ValueError:
        return


@each
@pytest.mark.parametrize("length", [1, 4 * KIB - 1, 4 * KIB + 1, 1 << 20])
def test_a_page_of_another_length_is_refused(codec: str, length: int) -> None:
    made = CODECS[codec]()
    stored = made.compress(memoryview(bytes(4 * KIB)), 1)
    with pytest.raises(ValueError):
        back(made, stored, length)


@each
def test_a_small_stored_page_that_would_grow_without_end_takes_little_memory(codec: str) -> None:
    made = CODECS[codec]()
    stored = made.compress(memoryview(bytes(64 << 20)), 1)
    assert len(stored) < 1 << 20
    tracemalloc.start()
    with pytest.raises(ValueError):
        back(made, stored, 64 * KIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
