"""Headers of safetensors files, and where such files are cut."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.weights.manifest import (
    LARGE_TENSOR_BYTES,
    PAGE_BYTES,
    REST_BYTES,
    BadHeader,
    FileEntry,
    Piece,
    TensorPlace,
    cuts,
    header_bytes,
    parse_header,
    run_starts,
)
from pdserve.kvpool.weights.streaming import cut_spans

MIB = 1 << 20


def said(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parsed(header: Any, data_bytes: int = 24) -> list[TensorPlace]:
    return parse_header(json.dumps(header).encode(), data_bytes)


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {"b": said("U8", [4], [24, 28]), "__metadata__": {"x": "y"}, "a": said()}
    assert parsed(header, 28) == [
        TensorPlace("a", "F32", (2, 3), 0, 24),
        TensorPlace("b", "U8", (4,), 24, 28),
    ]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ([], "no object"),
        ({"a": 1}, "no object"),
        ({"a": said("F33")}, "unknown dtype"),
        ({"a": said(["F32"])}, "unknown dtype"),
        ({"a": said(shape="23")}, "impossible shape"),
        ({"a": said(shape=[2, -3])}, "impossible shape"),
        ({"a": said(shape=[True, 6])}, "impossible shape"),
        ({"a": said(shape=[1] * 17)}, "impossible shape"),
        ({"a": said(shape=[1 << 62])}, "impossible shape"),
        ({"a": said(offsets=[0])}, "impossible shape"),
        ({"a": said(offsets=[0, 24.0])}, "impossible shape"),
        ({"a": said(offsets=[-24, 0])}, "impossible shape"),
        ({"a": said(offsets=[24, 0])}, "not as many bytes"),
        ({"a": said(offsets=[0, 23])}, "not as many bytes"),
        ({"a": said(offsets=[1, 25])}, "its tensors need"),
        ({"a": said(), "b": said(offsets=[23, 47])}, "overlaps"),
    ],
)
def test_impossible_headers_are_refused(header: Any, problem: str) -> None:
    with pytest.raises(BadHeader, match=problem):
        parsed(header)


def test_a_header_that_is_no_json_is_refused() -> None:
    for text in (b"", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(BadHeader, match="no JSON"):
            parse_header(text, 10)


@pytest.mark.parametrize(
    ("first", "size"), [(b"", 100), (b"\x02", 100), ((93).to_bytes(8, "little"), 100), (b"\xff" * 8, 1 << 62)]
)
def test_impossible_lengths_of_a_header_are_refused(first: bytes, size: int) -> None:
    with pytest.raises(BadHeader):
        header_bytes(first, size)
    assert header_bytes((92).to_bytes(8, "little"), 100) == 92


SIZES = st.lists(st.sampled_from([0, 1, 100, MIB - 1, MIB, 3 * MIB, 4 * MIB, 9 * MIB + 7]), max_size=8)


@given(sizes=SIZES, header=st.integers(10, 300_000))
def test_pages_cover_a_file_once_and_each_large_tensor_begins_one(sizes: list[int], header: int) -> None:
    ends = list(accumulate(sizes))
    tensors = [
        TensorPlace(f"t{i}", "U8", (n,), end - n, end)
        for i, (n, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    size = header + sum(sizes)
    found = list(cuts(size, run_starts(header, tensors)))
    assert [cut.start for cut in found] == [0, *accumulate(cut.length for cut in found)][:-1]
    assert sum(cut.length for cut in found) == size
    assert all(cut.stored in (PAGE_BYTES, REST_BYTES) and 0 < cut.length <= cut.stored for cut in found)
    begins = {cut.start for cut in found}
    assert all(header + t.start in begins for t in tensors if t.end - t.start >= LARGE_TENSOR_BYTES)


@given(sizes=SIZES, header=st.integers(10, 300_000), by_tensor=st.booleans())
def test_spans_hold_each_tensor_once_with_all_of_its_pages(
    sizes: list[int], header: int, by_tensor: bool
) -> None:
    """Also where another version cut the file otherwise."""
    ends = list(accumulate(sizes))
    tensors = [
        TensorPlace(f"t{i}", "U8", (n,), end - n, end)
        for i, (n, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    size = header + sum(sizes)
    found = list(cuts(size, run_starts(header, tensors) if by_tensor else [0]))
    pieces = [Piece(b"", b"", cut.length, cut.stored) for cut in found]
    places = [cut.start for cut in found] + [size]
    spans = cut_spans(FileEntry("f", size, pieces), places, tensors, header)
    assert [t for span in spans for t in span.tensors] == tensors
    for span in spans:
        at = span.start
        for place, piece in span.pieces:
            assert place == at
            at += piece.length
        assert at == span.end
        for tensor in span.tensors:
            assert span.start <= header + tensor.start <= header + tensor.end <= span.end
    if by_tensor:
        large = [t for t in tensors if t.end - t.start >= LARGE_TENSOR_BYTES]
        assert len(spans) >= len(large)
