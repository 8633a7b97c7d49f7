"""An estimate of the places of prompts' prefixes (workers, pool), from the requests sent there.

The router does not tokenize. It cuts the JSON of the prompt into blocks and hashes each with all blocks
before it, as SGLang does with pages of token ids. Two prompts with an equal block digest have equal bytes up
to the end of that block. A conversation's next turn repeats the bytes of the last turn, so it shares blocks:

    turn 1   [{"role":"user", ... }]                       block 0 | block 1 | (rest)
    turn 2   [{"role":"user", ... },{"role":"assis...      block 0 | block 1 | block 2 | ... | (rest)

Blocks have 1 KiB at the beginning of a prompt and grow with the distance from it, so a long prompt has a
hundred blocks. Other inputs of page keys (model, tools, cache salt) are hashed first.

For every block the table holds the last time at each worker and in the pool. Caches evict: after a half-life
half of the prompts are estimated to be evicted.

A restarted worker is a new incarnation without any blocks.

The table is bounded in bytes. The least recently seen block is dropped first, and of one prompt the last
block. So the known blocks of a prompt are always its first ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any, TypeAlias

import msgspec
import xxhash

from pdserve.router.api.request_body import RequestView, bytes_per_token
from pdserve.router.fleet.worker import Worker

FIRST_BLOCK_BYTES = 1024
BLOCKS_PER_SIZE = 16
"""After this many blocks of one size the size doubles: 48 KiB in 32 blocks, 32 MiB in 176."""
MAX_BLOCKS = 176
MAX_PLACES = 64
"""Number of workers stored for a block, the most recent ones."""
BLOCK_BYTES = 320
"""Memory of one block without its places, at most: its digest, its list, and its entry in the table, which
has room for up to six times as many.
"""
PLACE_BYTES = 64
"""The same for each worker that has it: two places of the list, which grows by steps, and a time."""
DEVICE_HALF_LIFE_S = 120.0
"""Estimated time until half of a prefix is evicted from a worker's device memory."""
HOST_HALF_LIFE_S = 900.0
"""The same of its host memory."""
POOL_HALF_LIFE_S = 7200.0
"""The same of the pool."""


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The blocks of one prompt: their digests in order, and the estimated tokens per byte."""

    digests: tuple[int, ...] = ()
    tokens_per_byte: float = 0.25

    def tokens(self, blocks: int) -> int:
        """Estimated tokens in the first `blocks` blocks."""
        return int(BLOCK_ENDS[blocks - 1] * self.tokens_per_byte) if blocks else 0


class Cached(msgspec.Struct, frozen=True, gc=False):
    """Estimated tokens of a prompt that a worker finds, by place. The places are disjoint."""

    device: float = 0.0
    host: float = 0.0
    pool: float = 0.0

    @property
    def total(self) -> float:
        """Tokens in all places."""
        return self.device + self.host + self.pool


NOTHING = Cached()


def _block_ends() -> Iterator[int]:
    end, size = 0, FIRST_BLOCK_BYTES
    for number in range(MAX_BLOCKS):
        end += size
        yield end
        if number % BLOCKS_PER_SIZE == BLOCKS_PER_SIZE - 1:
            size *= 2


BLOCK_ENDS = tuple(_block_ends())


def prefix_of(view: RequestView, prompt: bytes, scope: str) -> Prefix:
    """The blocks of a prompt, given as JSON. `scope`: further text that decides its page keys."""
    digest = xxhash.xxh3_64()
    before = view.tools, view.system, view.instructions
    for part in (scope.encode("utf-8", "surrogatepass"), view.cache_salt, *before):
        digest.update(b"%d:%b" % (len(part), bytes(part)))
    digests, start, text = [], 0, memoryview(prompt)
    for end in BLOCK_ENDS:
        if end > len(prompt):
            break
        digest.update(text[start:end])
        digests.append(digest.intdigest())
        start = end
    return Prefix(tuple(digests), 1 / bytes_per_token(prompt))


_Block: TypeAlias = list[Any]
"""[last time in the pool or None, then for each worker its incarnation and the last time there]. The worker
that had it last comes last. A list takes half of the memory of a dictionary.
"""


class PrefixTable:
    """Blocks of prompts with their places, in at most `capacity_bytes` of memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self.used_bytes = 0
        """What the table takes, at most."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: int) -> bool:
        return digest in self._blocks

    def record(self, prefix: Prefix, worker: Worker | None, now_s: float, *, in_pool: bool) -> None:
        """`worker` (or none) has just computed or read the prompt. `in_pool`: the pool has its pages."""
        blocks, incarnation = self._blocks, "" if worker is None else worker.incarnation
        for digest in reversed(prefix.digests):
            block = blocks.get(digest)
            if block is None:
                block = blocks[digest] = [None]
                self.used_bytes += BLOCK_BYTES
            else:
                blocks.move_to_end(digest)
            if incarnation:
                if len(block) > 1 and block[-2] == incarnation:  # as nearly always
                    block[-1] = now_s
                else:
                    self._renew(block, incarnation, now_s)
            if in_pool:
                block[0] = now_s
        while self.used_bytes > self._capacity_bytes:
            _, block = blocks.popitem(last=False)
            self.used_bytes -= BLOCK_BYTES + PLACE_BYTES * (len(block) // 2)

    def _renew(self, block: _Block, incarnation: str, now_s: float) -> None:
        """The worker has the block now. Beyond `MAX_PLACES` workers, who had it least recently goes."""
        if incarnation in block:
            place = block.index(incarnation)
            del block[place : place + 2]
        elif len(block) // 2 >= MAX_PLACES:
            del block[1:3]
        else:
            self.used_bytes += PLACE_BYTES
        block += incarnation, now_s

    def places(self, prefix: Prefix, now_s: float) -> Places:
        """The estimated places of the prompt's prefix."""
        workers: dict[str, tuple[int, float]] = {}
        pool: tuple[int, float] | None = None
        found, behind = [*map(self._blocks.get, prefix.digests)], None
        for i in range(len(found) - 1, -1, -1):
            block = found[i]
            if block is None or block == behind:  # who has the block behind it has this one too
                continue
            behind = block
            for place in range(1, len(block), 2):
                if block[place] not in workers:
                    workers[block[place]] = prefix.tokens(i + 1), now_s - block[place + 1]
            if pool is None and block[0] is not None:
                pool = prefix.tokens(i + 1), now_s - block[0]
        return Places(workers, pool)


class Places:
    """The estimated places of one prompt's prefix: incarnation → (tokens, age in s), and the pool."""

    __slots__ = ("_pool_left", "_pool_tokens", "_workers")

    def __init__(self, workers: dict[str, tuple[int, float]], pool: tuple[int, float] | None) -> None:
        self._workers = workers
        self._pool_tokens, age_s = pool or (0, 0.0)
        self._pool_left = _left(age_s, POOL_HALF_LIFE_S)

    def add(self, worker: Worker, tokens: int, age_s: float) -> None:
        """Add tokens that the blocks do not cover: the answer to the session's last turn."""
        known = self._workers.get(worker.incarnation)
        if known is None or known[0] < tokens:
            self._workers[worker.incarnation] = tokens, age_s

    @property
    def incarnations(self) -> Collection[str]:
        """Those of the workers that have a part of the prompt themselves."""
        return self._workers.keys()

    @property
    def in_pool(self) -> Cached:
        """What any other worker finds."""
        return Cached(pool=self._pool_tokens * self._pool_left) if self._pool_tokens else NOTHING

    def cached(self, worker: Worker) -> Cached:
        """Estimated tokens that the worker finds in its device memory, its host memory and the pool.

        A share 2^(-age / half-life) remains in each place. Tokens count at the fastest place that has them:
        device, then host, then pool.
        """
        found = self._workers.get(worker.incarnation)
        if found is None:
            return self.in_pool
        tokens, age_s = found
        own, device = tokens * _left(age_s, HOST_HALF_LIFE_S), tokens * _left(age_s, DEVICE_HALF_LIFE_S)
        return Cached(device, own - device, max(0.0, self._pool_tokens - own) * self._pool_left)


def _left(age_s: float, half_life_s: float) -> float:
    return math.exp2(-age_s / half_life_s)
