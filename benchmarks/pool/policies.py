"""How often each eviction policy has what is asked for: traces replayed through the pool's own policy
classes.

A cache of `capacity` blocks, all of one size, under one policy. A request reads its blocks from the first
on; what is missing is written after that, in order, each block evicting the policy's best victim when the
cache is full. Blocks that are there behind a missing one are of no use to the reader; they are neither read
nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.pool.traces import Request
from pdserve.kvpool.policies import make_policy
from pdserve.kvpool.policies.base import Links
from pdserve.kvpool.policies.ttl import Ttl

CAPACITIES: Final = (1_000, 3_000, 10_000, 30_000)
TTL_S: Final = 600.0


class HitRate(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace with one capacity."""

    trace: str
    policy: str
    capacity_blocks: int
    requests: int
    blocks: int
    hits: int
    hit_rate: float


class Cache:
    """Blocks by number, in slots; evicts by `policy`."""

    def __init__(self, policy: str, capacity: int, ttl_s: float = TTL_S) -> None:
        self._policy = make_policy(policy, Links(capacity), ttl_s if policy == "ttl" else None)
        self._slot_of: dict[int, int] = {}
        self._block_in = [0] * capacity
        self._free = list(range(capacity))

    def request(self, blocks: Sequence[int], now_s: float) -> int:
        """Read, and write what is missing; how many blocks were there, from the first on."""
        if isinstance(self._policy, Ttl):
            for slot in list(self._policy.ended(now_s)):
                self._policy.on_remove(slot)
                self._forget(slot)
        hits = 0
        for block in blocks:
            found = self._slot_of.get(block)
            if found is None:
                break
            self._policy.on_hit(found, now_s)
            hits += 1
        for block in blocks[hits:]:
            if block not in self._slot_of:
                self._write(block, now_s)
        return hits

    def _write(self, block: int, now_s: float) -> None:
        if not self._free:
            victim = next(self._policy.victims())
            self._policy.on_evict(victim, _key(self._block_in[victim]))
            self._forget(victim)
        slot = self._free.pop()
        self._slot_of[block] = slot
        self._block_in[slot] = block
        self._policy.on_insert(slot, _key(block), now_s)

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._block_in[slot]]
        self._free.append(slot)


def replay(trace: str, requests: Sequence[Request], policy: str, capacity: int) -> HitRate:
    """The share of all blocks asked for that were hit by prefix."""
    cache = Cache(policy, capacity)
    hits = sum(cache.request(blocks, now_s) for now_s, blocks in requests)
    total = sum(len(blocks) for _, blocks in requests)
    return HitRate(
        trace=trace,
        policy=policy,
        capacity_blocks=capacity,
        requests=len(requests),
        blocks=total,
        hits=hits,
        hit_rate=round(hits / total, 4),
    )


def _key(block: int) -> bytes:
    # the policies want digests: well mixed in every part
    return (block * 0x9E37_79B9_7F4A_7C15 & (1 << 64) - 1).to_bytes(8, "little") * 4
