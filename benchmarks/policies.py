"""How often each eviction policy has what is asked for: traces replayed through the pool's own policy
classes.

A cache of `capacity` blocks, all of one size, under one policy. A request names the blocks of one prompt in
order, each by a number; equal numbers are equal blocks with equal prefixes. It reads its blocks from the
first on; what is missing is written after that, in order, each block evicting the policy's best victim when
the cache is full. Blocks that are there behind a missing one are of no use to the reader; they are neither
read nor written.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np
import typer

from benchmarks.lib.load import trace_lines
from benchmarks.lib.report import FormatOption, Output, Table, numbers, script
from pdserve.kvpool.policies import POLICIES, check_policy, make_policy
from pdserve.kvpool.policies.base import Links
from pdserve.kvpool.policies.orders import Ttl

TTL_S: Final = 600.0

Request: TypeAlias = tuple[float, list[int]]  # seconds since the start, blocks


def skewed(seed: int, requests: int = 100_000, blocks: int = 60_000, exponent: float = 0.9) -> list[Request]:
    """Single blocks, their popularity by Zipf's law: the block of rank r is asked for in proportion to
    r^-exponent; ten a second.
    """
    drawn = _zipf(np.random.default_rng(seed), requests, blocks, exponent)
    return [(n / 10, [block]) for n, block in enumerate(drawn)]


def multi_turn(seed: int, sessions: int = 2_000) -> list[Request]:
    """Conversations: one of 20 system prompts, then turns that each repeat all before and add some blocks.

    Sessions begin at random, twelve a minute; they have 5 turns on average (geometric), of 4 new blocks on
    average (Poisson, at least 1), a minute apart on average (exponential). What is asked for in a turn and
    answered is there for the next one.
    """
    rng = np.random.default_rng(seed)
    next_block = 0
    prompts = []
    for length in rng.integers(4, 40, 20).tolist():
        prompts.append(list(range(next_block, next_block + length)))
        next_block += length
    due = [
        (start, session) for session, start in enumerate(np.sort(rng.uniform(0, 5.0 * sessions, sessions)))
    ]
    turns = rng.geometric(1 / 5, sessions).tolist()
    history = [list(prompts[which]) for which in rng.integers(0, len(prompts), sessions).tolist()]
    found: list[Request] = []
    heapq.heapify(due)
    while due:
        now_s, session = heapq.heappop(due)
        added = max(1, int(rng.poisson(4)))
        history[session] += range(next_block, next_block + added)
        next_block += added
        found.append((float(now_s), list(history[session])))
        turns[session] -= 1
        if turns[session]:
            heapq.heappush(due, (now_s + float(rng.exponential(60.0)), session))
    return found


GENERATED: Final[dict[str, Callable[[int], list[Request]]]] = {
    "skewed": skewed,
    "multi-turn": multi_turn,
}


def main(
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace too: Mooncake's JSON lines with hash_ids.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas. Default: all.")] = "",
    capacity: Annotated[str, typer.Option(help="Capacities in blocks.")] = "1000,3000,10000,30000",
    generated: Annotated[bool, typer.Option(help="Replay the generated traces.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the generated traces.")] = 1,
    format: FormatOption = "text",
) -> None:
    names = policy.split(",") if policy else list(POLICIES)
    for name in names:
        check_policy(name, 1.0)
    traces = [(name, make(seed)) for name, make in GENERATED.items() if generated]
    if trace is not None:
        requests = [(line.timestamp / 1000, line.hash_ids) for line in trace_lines(trace)]
        traces.append((trace.stem.replace("_", " "), requests))
    output = Output(format)
    by_row: dict[tuple[str, str], list[str]] = {}
    for label, requests in traces:
        for name in names:
            for blocks in numbers("capacity", capacity):
                rate = replay(label, requests, name, blocks)
                output.row(rate)
                by_row.setdefault((label, f"{blocks:,}"), []).append(f"{100 * rate.hit_rate:.1f}")
    rows = [(*which, *values) for which, values in by_row.items()]
    output.show(Table("Blocks hit by prefix, %", ("trace", "blocks held", *names), rows, left=("trace",)))


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


def _zipf(rng: np.random.Generator, requests: int, blocks: int, exponent: float) -> list[int]:
    weights = np.arange(1, blocks + 1, dtype=np.float64) ** -exponent
    edges = np.cumsum(weights / weights.sum())
    drawn: list[int] = np.searchsorted(edges, rng.random(requests)).clip(0, blocks - 1).tolist()
    return drawn


if __name__ == "__main__":
    script(main, __doc__)
