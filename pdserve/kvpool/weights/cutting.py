"""Where a file is cut into pages. Pure.

Pages have two sizes only, because a node gives each size slabs of its own. A run of a file is cut into pages
of PAGE_BYTES, and its rest into pages of REST_BYTES, the last one padded with zeros.

A safetensors file is cut at its tensors: its header is a run, each large tensor is one, and the small ones
between two large ones are one. So a tensor that a fine-tune leaves alone has the same pages in both models,
wherever it lies in their files. Any other file is one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pdserve.kvpool.weights.tensors import TensorPlace

PAGE_BYTES: Final = 4 << 20
REST_BYTES: Final = 256 << 10
LARGE_TENSOR_BYTES: Final = 1 << 20


class Cut(NamedTuple):
    """The bytes [start, start + length) of a file, stored in a page of `stored` bytes."""

    start: int
    length: int
    stored: int


def run_starts(data_start: int, tensors: Sequence[TensorPlace]) -> list[int]:
    """Where the runs of a safetensors file begin. `tensors`: in the order of the file."""
    starts, after_large = [0, data_start], True
    for tensor in tensors:
        is_large = tensor.end - tensor.start >= LARGE_TENSOR_BYTES
        if is_large or after_large:
            starts.append(data_start + tensor.start)
        after_large = is_large
    return sorted(set(starts))


def cuts(file_bytes: int, starts: Sequence[int] = (0,)) -> Iterator[Cut]:
    """The pages of a file whose runs begin at `starts` (ascending, from 0 on)."""
    for start, end in pairwise([*(start for start in starts if start < file_bytes), file_bytes]):
        while start < end:
            left = end - start
            stored = PAGE_BYTES if left >= PAGE_BYTES else REST_BYTES
            yield Cut(start, min(left, stored), stored)
            start += stored
