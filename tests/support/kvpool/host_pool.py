"""SGLang's host KV pool, as far as a storage backend sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

PAGE_TOKENS = 4
TOKEN_BYTES = 64  # of K, or of V, in one layer
HEADS = 4
LAYERS = 3
HOST_PAGES = 200
_BY_PAGE = ("page_first", "page_head")  # the bytes of a page stand together


class HostPool:
    """`kv`: its memory."""

    def __init__(
        self,
        layout: str,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layers: int = LAYERS,
        page_tokens: int = PAGE_TOKENS,
        heads: int = HEADS,
    ) -> None:
        """`heads`: of this rank."""
        self.layout = layout
        self.layers = layers
        self.page_size = page_tokens
        self.dtype = dtype
        token_bytes = TOKEN_BYTES * heads // HEADS
        shape = (
            (2, HOST_PAGES, layers * page_tokens * token_bytes)
            if layout in _BY_PAGE
            else (2, layers, HOST_PAGES, page_tokens * token_bytes)
        )
        self.size = HOST_PAGES * page_tokens
        self.device_capacity_tokens = self.size // 2
        self.kv = np.zeros(shape, np.uint8)

    def segments(self, page: int) -> list[np.ndarray[Any, Any]]:
        if self.layout in _BY_PAGE:
            return [self.kv[part, page] for part in range(2)]
        return [self.kv[part, layer, page] for layer in range(self.layers) for part in range(2)]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        pages = indices.tolist()[:: self.page_size]
        found = [s for at in pages for s in self.segments(at // self.page_size)]
        return [s.ctypes.data for s in found], [s.nbytes for s in found]

    def fill(self, pages: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        for page in pages:
            for segment in self.segments(page):
                segment[:] = rng.integers(0, 256, segment.shape, np.uint8)


def indices(pages: list[int]) -> Any:
    """SGLang's host indices of whole pages, int64 [pages * PAGE_TOKENS]."""
    return torch.tensor([page * PAGE_TOKENS + token for page in pages for token in range(PAGE_TOKENS)])
