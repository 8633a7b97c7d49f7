"""What SGLang's interface v2 wants to know of pages and their parts, from those that the pool has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransfer, PoolTransferResult

from pdserve.pages import restorable_lengths


def leading_pages(present: Sequence[bool]) -> int:
    """The number of pages from the start that are there."""
    return present.index(False) if False in present else len(present)


def window_pages(transfer: PoolTransfer) -> int:
    """See `PagePart.window_pages`. SGLang says it by the number of keys. It fills them in when it reads."""
    if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
        return 0
    return max(1, len(transfer.keys or ()))


def lookup_result(windows: Mapping[str, int], present: Sequence[Sequence[bool]]) -> PoolTransferResult:
    """`windows`: by part, KV first. `present`: for each part and each page of the chain, whether it is there.

    All lengths are answered: one rank may lack a page that another has, and SGLang intersects them.
    """
    kv_pages = leading_pages(present[0])
    parts = [(window, there[:kv_pages]) for window, there in zip(windows.values(), present, strict=True)]
    longest = [max(restorable_lengths([part]), default=0) for part in parts]
    hits = {name: pages for name, pages in zip(windows, longest, strict=True) if pages}
    lengths = restorable_lengths(parts)
    return PoolTransferResult(max(lengths, default=0), hits, lengths)
