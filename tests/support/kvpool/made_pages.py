"""Pages whose bytes are a function of their number, so that one wrong byte anywhere is seen. Pure.

A page's number says who writes it and how it may be judged:

    bits 40 and up   zone
    bits 32 to 39    writer (in zone OWNED)
    bits 0 to 31     which

A page is one fixed random block, XORed with its key in every 32 bytes. So pages of two keys differ in every
32 bytes, and a page that is shifted, mixed from two, partly zero or flipped in one bit is no page at all.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Final

import numpy as np

from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

DAMAGED: Final = 0  # bits are flipped in these; only clients with checksums read them
OWNED: Final = 1  # each written by one writer, once: what is acknowledged must be there
CONTESTED: Final = 2  # all write them, all the time

SHAPES: Final[tuple[tuple[int, ...], ...]] = ((16 * 1024,), (24 * 1024, 40 * 1024))
"""Segments of a page in bytes, by the number's remainder; multiples of 32."""
LARGE_EVERY: Final = 8
_BLOCK: Final = np.random.default_rng(20261121).integers(0, 2**64, 8 * 1024, np.uint64)


def number(zone: int, writer: int, which: int) -> int:
    return zone << 40 | writer << 32 | which


def zone_of(page: int) -> int:
    return page >> 40


def segments_of(page: int) -> tuple[int, ...]:
    """Lengths in bytes."""
    return SHAPES[page % LARGE_EVERY == 0]


def key_of(seed: int, page: int) -> bytes:
    """32 bytes, different in different runs."""
    return hashlib.blake2b(page.to_bytes(8, "little"), key=str(seed).encode(), digest_size=KEY_BYTES).digest()


def any_key(draw: random.Random) -> bytes:
    """32 bytes that are nobody else's, everywhere on the ring alike."""
    return hashlib.blake2b(draw.randbytes(8), digest_size=KEY_BYTES).digest()


def content(key: bytes, page_bytes: int) -> Bytes1D:
    """The page's bytes, shape [page_bytes]; at most 64 KiB, a multiple of 32."""
    lanes = _BLOCK[: page_bytes // 8].reshape(-1, KEY_BYTES // 8) ^ np.frombuffer(key, np.uint64)
    return lanes.reshape(-1).view(np.uint8)


def segments(whole: Bytes1D, page: int) -> PageBuffers:
    """A page's memory as its segments."""
    starts = np.cumsum((0, *segments_of(page)))
    return [whole[start:end] for start, end in itertools.pairwise(starts)]
