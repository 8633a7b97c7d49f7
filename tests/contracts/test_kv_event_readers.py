"""A pool node's events, read by the code of those that read them."""

from __future__ import annotations

from array import array

import msgspec
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

from pdserve.kvpool.protocol.kv_events import MEDIUM, Blocks, Told, block_hash
from pdserve.pages import page_hashes

TOKENS = list(range(100, 100 + 3 * 64))


def test_sglang_decodes_the_events() -> None:
    first, second, third = page_hashes(TOKENS, 64)
    pages = [Told("m@1", 64, first, "dram"), Told("m@1", 64, second, "dram"), Told("m@1", 64, third, "")]
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    batch = decoder.decode(Blocks().batch(pages, 1.5))
    stored, removed = batch.events
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 0)
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == (
        [block_hash(first), block_hash(second)],
        [],
        64,
    )
    assert stored.medium == removed.medium == StorageMedium.EXTERNAL == MEDIUM
    assert isinstance(decoder.decode(Blocks().void(1.5)).events[0], AllBlocksCleared)


def test_blocks_have_the_hashes_of_sglangs_own_events() -> None:
    """So the tokens of a block that a worker has told of are known when the pool tells of it."""
    theirs = get_hash_str(RadixKey(array("q", TOKENS)), None, page_size=64)
    assert [hash_str_to_int64(one) for one in theirs] == [block_hash(one) for one in page_hashes(TOKENS, 64)]
