"""How small and how fast the codecs of tiers make pages, one page after the other on one processor.

The pages come from the segments of an SSD tier, so they are somebody's real KV. Without one they are numbers
of 16 bits from a normal distribution, which are harder to compress than KV.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.stores import BenchError
from pdserve.kvpool.tiers.base import LOADED, PageMemory, SpaceFacts, TierPage
from pdserve.kvpool.tiers.encryption import PageCipher, SecretEntry
from pdserve.kvpool.tiers.page_codec import PageCodec, StoredPage
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, read_index

MADE_PAGES: Final = 16


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`ratio`: bytes of the pages to stored bytes. Rates in 10^9 bytes of pages per second."""

    codec: str
    pages: int
    page_bytes: int
    ratio: float
    store_gbps: float
    load_gbps: float


def kv_pages(source: Path | None, count: int, page_bytes: int) -> list[PageMemory]:
    """Pages to measure with. Raises BenchError: there are none."""
    if source is None:
        random = np.random.default_rng(0)
        made = [random.standard_normal(page_bytes // 2).astype(np.float32) for _ in range(MADE_PAGES)]
        return [(one.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for one in made]
    found = [page for page, _ in zip(_stored_pages(source), range(count), strict=False)]
    if not found:
        raise BenchError(f"{source} has no segments of an SSD tier with pages that are stored as they are")
    return found


def _stored_pages(source: Path) -> Iterator[PageMemory]:
    for file in sorted(source.glob("*.seg")):
        try:
            content = np.memmap(file, np.uint8, "r")
        except (OSError, ValueError):
            continue  # the node dropped it meanwhile, or it is empty
        index = read_index(lambda at, size, of=content: of[at : at + size].tobytes(), len(content))  # type: ignore[misc]
        for record in index.records if index else ():
            if not record.stored_bytes:
                at = (record.block + 1) * BLOCK_BYTES
                yield np.array(content[at : at + record.page.length_bytes])


def measure_codec(
    compression: str, pages: list[PageMemory], item_bytes: int, rounds: int, *, encrypted: bool
) -> CodecFigures:
    """Medians over rounds. Raises BenchError, ConfigError."""
    cipher = PageCipher([SecretEntry("5e" * 32)]) if encrypted else None
    codec, facts = (
        PageCodec(compressed=bool(compression), cipher=cipher),
        SpaceFacts("bench", "0" * 32, item_bytes),
    )
    names = [TierPage(1, n.to_bytes(32, "little"), len(page), 0, 1) for n, page in enumerate(pages)]
    into = [np.zeros(len(page), np.uint8) for page in pages]
    store_s, load_s = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        stored = [codec.encode(name, page, facts) for name, page in zip(names, pages, strict=True)]
        store_s.append(time.perf_counter() - began)
        coded = [(one, to) for one, to in zip(stored, into, strict=True) if one.coding[0]]
        load_s.append(_timed(partial(_decode, codec, coded, facts)))
    for one, page, to in zip(stored, pages, into, strict=True):
        if one.coding[0] and (codec.decode(one, to, facts).status != LOADED or not np.array_equal(page, to)):
            raise BenchError("the codec did not bring a page back")
    total = sum(map(len, pages))
    return CodecFigures(
        codec=" + ".join(filter(None, (compression, "aes-gcm" if encrypted else ""))),
        pages=len(pages),
        page_bytes=total // len(pages),
        ratio=round(total / sum(one.size_bytes for one in stored), 3),
        store_gbps=round(total / statistics.median(store_s) / 1e9, 3),
        load_gbps=round(total / statistics.median(load_s) / 1e9, 3),
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _decode(codec: PageCodec, coded: list[tuple[StoredPage, PageMemory]], facts: SpaceFacts) -> None:
    for one, into in coded:
        codec.decode(one, into, facts)
