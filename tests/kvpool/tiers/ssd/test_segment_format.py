"""Damage in a segment file costs pages, never an exception and never a wrong page."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.protocol.page_bytes import checksum_bytes
from pdserve.kvpool.tiers.base import TierPage, padded
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    Record,
    SegmentHeader,
    encode_footer,
    encode_record_header,
    encode_segment_header,
    read_index,
)
from tests.support.kvpool.tier_tools import contents, key, page
from tests.support.suite.extended import examples

NONCE = 0x1234_5678_9ABC_DEF0
HEADER = SegmentHeader(7, NONCE)


def segment(lengths: list[int], *, sealed: bool, spare_blocks: int = 0) -> tuple[bytes, list[Record]]:
    """A file as the tier writes it, and its records."""
    file = bytearray(encode_segment_header(HEADER))
    records = []
    for n, length in enumerate(lengths):
        found, _ = page(n, length, space=(1 + n % 3) << 40)
        data = contents(n, length).tobytes()
        header = bytearray(BLOCK_BYTES)
        block = len(file) // BLOCK_BYTES
        encode_record_header(header, 0, NONCE, block, found, checksum_bytes(data))
        file += header + data + bytes(padded(length) - length)
        records.append(Record(block, found))
    if sealed:
        file += encode_footer(records, len(file) // BLOCK_BYTES, NONCE)
    return bytes(file) + bytes(spare_blocks * BLOCK_BYTES), records


def index(file: bytes) -> tuple[list[tuple[int, TierPage]], bool] | None:
    found = read_index(lambda offset, size: file[offset : offset + size], len(file))
    if found is None:
        return None
    assert found.header == HEADER
    return plain(found.records), found.sealed


def plain(records: Sequence[Record]) -> list[tuple[int, TierPage]]:
    return [(record.block, record.page) for record in records]


LENGTHS = [1, 4096, 5000, 12288, 100]


def test_a_sealed_segment_is_read_from_its_footer() -> None:
    file, records = segment(LENGTHS, sealed=True)
    reads: list[tuple[int, int]] = []

    def read(offset: int, size: int) -> bytes:
        reads.append((offset, size))
        return file[offset : offset + size]

    found = read_index(read, len(file))
    assert found is not None
    assert (plain(found.records), found.sealed) == (plain(records), True)
    assert sum(size for _, size in reads) == 3 * BLOCK_BYTES  # header, trailer, footer


@pytest.mark.parametrize("lengths", [LENGTHS, []], ids=["full", "empty"])
@pytest.mark.parametrize("spare", [0, 1, 300])
def test_a_segment_that_was_not_sealed_is_read_record_by_record(lengths: list[int], spare: int) -> None:
    file, records = segment(lengths, sealed=False, spare_blocks=spare)
    assert index(file) == (plain(records), False)


def test_a_damaged_footer_costs_no_page() -> None:
    file, records = segment(LENGTHS, sealed=True)
    for at in (len(file) - BLOCK_BYTES + 3, len(file) - 2 * BLOCK_BYTES + 3):
        damaged = bytearray(file)
        damaged[at] ^= 4
        assert index(bytes(damaged)) == (plain(records), False)


def test_every_cut_loses_what_was_cut_and_nothing_before_it() -> None:
    file, records = segment(LENGTHS, sealed=False)
    for end in range(BLOCK_BYTES, len(file) + 1, 1024):
        whole = [one for one in plain(records) if Record(*one).end_block * BLOCK_BYTES <= end]
        assert index(file[:end]) == (whole, False)


def test_damage_in_one_record_costs_that_record() -> None:
    file, records = segment(LENGTHS, sealed=False)
    for n, record in enumerate(records):
        others = plain(records[:n] + records[n + 1 :])
        for at in (record.block * BLOCK_BYTES + 40, (record.block + 1) * BLOCK_BYTES):  # key; first byte
            damaged = bytearray(file)
            damaged[at] ^= 1
            assert index(bytes(damaged)) == (others, False)


def test_a_page_that_imitates_a_record_is_none() -> None:
    """A page may hold anything, also a copy of a segment."""
    inner, _ = segment([100, 100], sealed=False)
    copied = inner[BLOCK_BYTES:]  # two records of a segment with our very nonce, at other blocks
    found = TierPage(1, key(1), len(copied), 0, 1)
    header = bytearray(BLOCK_BYTES)
    encode_record_header(header, 0, NONCE, 3, found, checksum_bytes(copied))
    head = encode_segment_header(HEADER)
    file = head + bytes(2 * BLOCK_BYTES) + bytes(header) + copied
    assert index(file) == ([(3, found)], False)
    header[50] ^= 1  # the real record is damaged: what is inside is still none
    assert index(head + bytes(2 * BLOCK_BYTES) + bytes(header) + copied) == ([], False)


DAMAGE = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
        st.tuples(st.just("zero"), st.floats(0, 1, exclude_max=True), st.integers(1, 9000)),
        st.tuples(st.just("noise"), st.floats(0, 1, exclude_max=True), st.integers(1, 5000)),
        st.tuples(st.just("move"), st.floats(0, 1, exclude_max=True), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(300), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 13_000), max_size=5),
    sealed=st.booleans(),
    spare=st.integers(0, 3),
    damage=DAMAGE,
)
def test_whatever_the_damage_no_page_is_made_up(
    lengths: list[int], sealed: bool, spare: int, damage: list[tuple[str, float, int]]
) -> None:
    file, records = segment(lengths, sealed=sealed, spare_blocks=0 if sealed else spare)
    damaged = bytearray(file)
    for what, where, amount in damage:
        at = int(where * len(damaged))
        if what == "flip" and damaged:
            damaged[at] ^= 1 << amount
        elif what == "cut":
            del damaged[at:]
        elif what == "zero":
            damaged[at : at + amount] = bytes(len(damaged[at : at + amount]))
        elif what == "noise":
            damaged[at : at + amount] = contents(amount, len(damaged[at : at + amount])).tobytes()
        elif what == "move":  # whole blocks appear elsewhere, as after a misplaced write
            block = at // BLOCK_BYTES * BLOCK_BYTES
            damaged[block:block] = damaged[block : block + amount * BLOCK_BYTES]
    found = index(bytes(damaged))
    assert found is None or set(found[0]) <= set(plain(records))


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=3 * BLOCK_BYTES))
def test_random_bytes_are_no_segment(data: bytes) -> None:
    assert index(data) is None
    found = index(encode_segment_header(HEADER) + data)
    assert found is not None
    assert found[0] == []
