"""Bytes of files as pages of content: digests and padding. No input or output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import xxhash

from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.weights.cutting import Cut, cuts
from pdserve.kvpool.weights.manifest import FORMAT, Piece, Root, piece_key


def padded(data: memoryview | bytes, stored: int) -> Bytes1D:
    """The page that holds `data`: uint8, shape [stored], zeros behind the data."""
    if len(data) == stored:
        return np.frombuffer(data, np.uint8)
    page = np.zeros(stored, np.uint8)
    page[: len(data)] = np.frombuffer(data, np.uint8)
    return page


def piece_of(page: Bytes1D, cut: Cut) -> Piece:
    """The record of a page. `page`: as of `padded`."""
    return Piece(piece_key(page.data), digest_of(page), cut.length, cut.stored)


def digest_of(page: Bytes1D) -> bytes:
    """What a read of the page is compared with. The GIL is released meanwhile."""
    return bytes(xxhash.xxh3_128_digest(page.data))


def is_named(data: Bytes1D, piece: Piece) -> bool:
    """Whether the page of these bytes has the piece's name: SHA-256, for files that decide what runs."""
    digest = hashlib.sha256(data.data)
    digest.update(bytes(piece.stored - piece.length))
    return digest.digest() == piece.key


def cut_bytes(data: bytes) -> Iterator[tuple[Piece, Bytes1D]]:
    """A text in memory as pages."""
    view = memoryview(data)
    for cut in cuts(len(data)):
        page = padded(view[cut.start : cut.start + cut.length], cut.stored)
        yield piece_of(page, cut), page


def root_of(manifest: bytes) -> Root:
    """The first page's record for an encoded manifest."""
    pieces = [piece for piece, _ in cut_bytes(manifest)]
    return Root(FORMAT, len(manifest), hashlib.sha256(manifest).digest(), pieces)
