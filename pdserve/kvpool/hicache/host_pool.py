"""SGLang's host pools: where the pages of a part lie in this process's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pdserve.errors import PageMismatch
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers


class _Stretch(NamedTuple):
    """The memory in which one segment of all pages lies, and the length of that segment."""

    start: int
    memory: Bytes1D
    segment_bytes: int


class HostPool:
    """SGLang's host pool of one part, and what the keys of its pages' pieces end with."""

    def __init__(self, pool: Any, suffixes: tuple[bytes, ...]) -> None:
        """Raises ValueError, NotImplementedError: it has no addresses of pages."""
        self.pool = pool
        self.suffixes = suffixes
        self.page_tokens = tokens = int(pool.page_size)
        last = max(0, int(pool.size) // tokens - 1)
        starts, sizes = pool.get_page_buffer_meta(torch.arange(tokens))
        ends, _ = pool.get_page_buffer_meta(torch.arange(last * tokens, (last + 1) * tokens))
        self._stretches = [
            _Stretch(min(one, other), _memory(min(one, other), abs(other - one) + size), size)
            for one, other, size in zip(starts, ends, sizes, strict=True)
        ]

    @property
    def page_bytes(self) -> int:
        """The length of a page."""
        return sum(stretch.segment_bytes for stretch in self._stretches)

    def pages(self, count: int, host_indices: torch.Tensor) -> list[PageBuffers]:
        """The segments of pages, each uint8. `host_indices`: int64 [count * page_tokens]. SGLang keeps the
        memory alive as long as it uses us.

        Raises PageMismatch: there are not so many indices, or a page lies outside of the pool.
        """
        if len(host_indices) != count * self.page_tokens:
            raise PageMismatch(f"{len(host_indices)} indices for {count} pages of {self.page_tokens} tokens")
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        segments = len(self._stretches)
        if len(addresses) != count * segments:
            raise PageMismatch(f"{len(addresses)} segments for {count} pages")
        return [
            [
                _segment(stretch, address, size)
                for stretch, address, size in zip(
                    self._stretches,
                    addresses[first : first + segments],
                    sizes[first : first + segments],
                    strict=True,
                )
            ]
            for first in range(0, len(addresses), segments)
        ]

    def pieces(self, pages: Sequence[PageBuffers]) -> Sequence[PageBuffers]:
        """Each page in as many pieces as it has suffixes. Raises PageMismatch: segments cannot be divided."""
        count = len(self.suffixes)
        if count == 1:
            return pages
        if any(stretch.segment_bytes % count for stretch in self._stretches):
            raise PageMismatch(f"a segment of a page cannot be divided into {count} pieces")
        return [[np.split(one, count)[i] for one in page] for page in pages for i in range(count)]


def _segment(stretch: _Stretch, address: int, size_bytes: int) -> Bytes1D:
    start = address - stretch.start
    if size_bytes != stretch.segment_bytes or not 0 <= start <= len(stretch.memory) - size_bytes:
        raise PageMismatch("a page lies outside of the host pool")
    return stretch.memory[start : start + size_bytes]


def _memory(address: int, size_bytes: int) -> Bytes1D:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), np.uint8)
