"""Page tags: of bytes and key, whatever the segments; nothing else fits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.protocol.page_tag import TAG_BYTES, PageTags, page_key_id

SECRET, OTHER = "a" * 32, "b" * 32
KEY = bytes(range(32))


def array(data: bytes) -> Bytes1D:
    return np.frombuffer(data, np.uint8)


@given(st.binary(min_size=1, max_size=500), st.lists(st.integers(0, 500), max_size=5))
def test_a_tag_does_not_depend_on_how_the_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    tags = PageTags(SECRET, "ns")
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    segments = [array(data[a:b]) for a, b in itertools.pairwise(places)]
    assert tags.tag(KEY, segments) == tags.tag(KEY, [array(data)])
    assert tags.fits(KEY, segments, array(tags.tag(KEY, [array(data)])))


@given(st.binary(min_size=1, max_size=500), st.integers(0, 10**6))
def test_one_changed_bit_of_page_key_or_tag_fits_no_more(data: bytes, where: int) -> None:
    tags = PageTags(SECRET, "ns")
    tag = tags.tag(KEY, [array(data)])
    assert len(tag) == TAG_BYTES

    def flipped(text: bytes) -> bytes:
        place, bit = divmod(where % (len(text) * 8), 8)
        return text[:place] + bytes([text[place] ^ (1 << bit)]) + text[place + 1 :]

    assert not tags.fits(KEY, [array(flipped(data))], array(tag))
    assert not tags.fits(flipped(KEY), [array(data)], array(tag))
    assert not tags.fits(KEY, [array(data)], array(flipped(tag)))


@given(st.binary(max_size=64))
def test_appended_zeros_change_the_tag(data: bytes) -> None:
    tags = PageTags(SECRET, "ns")
    assert tags.tag(KEY, [array(data)]) != tags.tag(KEY, [array(data + b"\0")])


@pytest.mark.parametrize(("secret", "namespace"), [(OTHER, "ns"), (SECRET, "other")])
def test_another_page_key_or_namespace_makes_other_tags(secret: str, namespace: str) -> None:
    page = [array(b"page")]
    assert PageTags(SECRET, "ns").tag(KEY, page) != PageTags(secret, namespace).tag(KEY, page)


def test_page_keys_are_told_apart_without_telling_them() -> None:
    assert page_key_id(SECRET) != page_key_id(OTHER)
    assert SECRET not in page_key_id(SECRET)


def test_tags_stay_the_same_from_version_to_version() -> None:
    """Pages outlive a worker: a changed tag makes a pool of them unreadable."""
    assert PageTags(SECRET, "ns").tag(KEY, [array(b"page")]).hex() == "aac9d9b4af253e0b6c518de73f2e867b"
