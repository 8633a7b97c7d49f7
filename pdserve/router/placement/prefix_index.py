"""An estimate of the places of prompts' prefixes (workers, pool), from the requests sent there.

The router does not tokenize. It cuts the JSON of the prompt into blocks and hashes each with all blocks
before it, as SGLang does with pages of token ids. Two prompts with an equal block digest have equal bytes up
to the end of that block. A conversation's next turn repeats the bytes of the last turn, so it shares blocks:

    turn 1   [{"role":"user", ... }]                       block 0 | block 1 | (rest)
    turn 2   [{"role":"user", ... },{"role":"assis...      block 0 | block 1 | block 2 | ... | (rest)

Blocks have 1 KiB at the beginning of a prompt and grow with the distance from it, so a long prompt has some
hundreds of blocks. Other inputs of page keys (model, tools, cache salt) are hashed first.

For every block the table holds the last time at each worker and in the pool. Caches evict: after a half-life
half of the prompts are estimated to be evicted. Workers report the tokens that they found, which corrects
both parts of the estimate:

- The half-life, of each worker and of the pool (`half_lives = "learned"`). A prompt of age a was there, or it
  was not. The logarithm of the half-life moves by `LIFE_GAIN` times (was there - 2^(-a / half-life)), so it
  comes to rest where as many prompts are found as expected.
- `trust`, the running mean of found / estimated tokens where a prompt was there: the estimate of tokens by
  bytes is coarse. One number per worker.

A restarted worker is a new incarnation without any blocks.

The table is bounded. The least recently seen block is dropped first, and of one prompt the last block. So
the known blocks of a prompt are always its first ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

import msgspec
import xxhash

from pdserve.router.api.request_body import RequestView, bytes_per_token
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.worker import Worker

FIRST_BLOCK_BYTES = 1024
BLOCKS_PER_SIZE = 64
"""After this many blocks of one size the size doubles: 64 KiB in 64 blocks, 32 MiB in 576."""
MAX_BLOCKS = 576
MAX_PLACES = 64
"""Number of workers stored for a block, the most recent ones."""
MAX_TRUSTED = 1024
TRUST_GAIN = 0.1
"""Weight of one answer in a worker's `trust`."""
LIFE_GAIN = 0.2
"""Largest part by which one answer changes a half-life."""
LIVES_S = 1.0, 30 * 86400.0
"""Bounds of a half-life."""
MIN_TRUST_TOKENS = 256
"""Answers with fewer expected tokens teach nothing: the estimate of tokens is too coarse."""


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


class _Block(msgspec.Struct):
    """The last time of a block at each worker (by incarnation), and in the pool."""

    seen_s: dict[str, float]
    pool_s: float | None = None


class PrefixTable:
    """At most `capacity_blocks` blocks of prompts, with their places."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._settings = settings
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._beliefs = Beliefs(settings)

    def __len__(self) -> int:
        return len(self._blocks)

    def record(self, prefix: Prefix, worker: Worker | None, now_s: float, *, in_pool: bool) -> None:
        """`worker` (or none) has just computed or read the prompt. `in_pool`: the pool has its pages."""
        blocks = self._blocks
        for digest in reversed(prefix.digests):
            block = blocks.get(digest)
            if block is None:
                block = blocks[digest] = _Block({})
            else:
                blocks.move_to_end(digest)
            if worker is not None:
                _renew(block.seen_s, worker.incarnation, now_s, MAX_PLACES)
            if in_pool:
                block.pool_s = now_s
        while len(blocks) > self._settings.capacity_blocks:
            blocks.popitem(last=False)

    def places(self, prefix: Prefix, now_s: float) -> Places:
        """The estimated places of the prompt's prefix."""
        workers: dict[str, tuple[int, float]] = {}
        pool: tuple[int, float] | None = None
        for i in range(len(prefix.digests) - 1, -1, -1):
            block = self._blocks.get(prefix.digests[i])
            if block is None:
                continue
            for incarnation, seen_s in block.seen_s.items():
                if incarnation not in workers:
                    workers[incarnation] = prefix.tokens(i + 1), now_s - seen_s
            if pool is None and block.pool_s is not None:
                pool = prefix.tokens(i + 1), now_s - block.pool_s
        return Places(self._beliefs, workers, pool)


class Beliefs:
    """What has been learned of workers, by incarnation, and of the pool."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._learns = settings.half_lives == "learned"
        self._first_s = max(settings.host_half_life_s, settings.device_half_life_s)
        self._device_share = settings.device_half_life_s / self._first_s
        self._lives_s: dict[str, float] = {}
        self._trust: dict[str, float] = {}
        self.pool_life_s = settings.pool_half_life_s

    def trust(self, incarnation: str) -> float:
        """Found tokens for each estimated one."""
        return self._trust.get(incarnation, 1.0)

    def lives_s(self, incarnation: str) -> tuple[float, float]:
        """Half-lives in a worker's own memory, and in the part of it that is the device's."""
        life_s = self._lives_s.get(incarnation, self._first_s)
        return life_s, life_s * self._device_share

    def learn_worker(self, incarnation: str, tokens: int, age_s: float, found_tokens: int) -> None:
        """A worker found `found_tokens` of `tokens` that were estimated before any eviction."""
        if tokens < MIN_TRUST_TOKENS:
            return
        trust = self.trust(incarnation)
        is_there = _is_there(found_tokens, tokens * trust)
        if is_there or not self._learns:
            trust += TRUST_GAIN * (min(1.0, found_tokens / tokens) - trust)
            _renew(self._trust, incarnation, trust, MAX_TRUSTED)
        if self._learns:
            life_s = _corrected(self.lives_s(incarnation)[0], age_s, is_there=is_there)
            _renew(self._lives_s, incarnation, life_s, MAX_TRUSTED)

    def learn_pool(self, tokens: float, age_s: float, found_tokens: int) -> None:
        """The same of the pool."""
        if self._learns and tokens >= MIN_TRUST_TOKENS:
            is_there = _is_there(found_tokens, tokens)
            self.pool_life_s = _corrected(self.pool_life_s, age_s, is_there=is_there)


class Places:
    """The estimated places of one prompt's prefix: incarnation → (tokens, age in s), and the pool."""

    __slots__ = ("_beliefs", "_pool", "_workers")

    def __init__(
        self,
        beliefs: Beliefs,
        workers: dict[str, tuple[int, float]],
        pool: tuple[int, float] | None,
    ) -> None:
        self._beliefs = beliefs
        self._workers = workers
        self._pool = pool

    def learn(self, worker: Worker, found_tokens: int, pool_tokens: int | None) -> None:
        """`worker` found so many tokens in its own memory. `pool_tokens`: of the rest in the pool, as it was
        when this was estimated; None: it does not say.
        """
        known = self._workers.get(worker.incarnation)
        if known is not None:
            self._beliefs.learn_worker(worker.incarnation, *known, found_tokens)
        if self._pool is not None and pool_tokens is not None:
            tokens, age_s = self._pool
            trust = self._beliefs.trust(worker.incarnation)
            self._beliefs.learn_pool(tokens * trust - found_tokens, age_s, pool_tokens)

    def add(self, worker: Worker, tokens: int, age_s: float) -> None:
        """Add tokens that the blocks do not cover: the answer to the session's last turn."""
        known = self._workers.get(worker.incarnation)
        if known is None or known[0] < tokens:
            self._workers[worker.incarnation] = tokens, age_s

    def believed(self, worker: Worker) -> float:
        """Estimated tokens in the worker's own memory, from their age alone, without `trust`."""
        tokens, age_s = self._workers.get(worker.incarnation, (0, 0.0))
        return tokens * _left(age_s, self._beliefs.lives_s(worker.incarnation)[0])

    def cached(self, worker: Worker) -> Cached:
        """Estimated tokens that the worker finds in its device memory, its host memory and the pool.

        A share 2^(-age / half-life) remains in each place. Tokens count at the fastest place that has them:
        device, then host, then pool.
        """
        if self._pool is None and worker.incarnation not in self._workers:
            return NOTHING
        own = device = pool = 0.0
        found = self._workers.get(worker.incarnation)
        if found is not None:
            tokens, age_s = found
            life_s, device_s = self._beliefs.lives_s(worker.incarnation)
            most = tokens * self._beliefs.trust(worker.incarnation)
            own, device = most * _left(age_s, life_s), most * _left(age_s, device_s)
        if self._pool is not None:
            tokens, age_s = self._pool
            pool = max(0.0, tokens - own) * _left(age_s, self._beliefs.pool_life_s)
        return Cached(device, own - device, pool)


def _renew(values: dict[str, float], key: str, value: float, limit: int) -> None:
    """Set the value. Beyond `limit` keys, drop the key that was set least recently."""
    values.pop(key, None)
    values[key] = value
    if len(values) > limit:
        del values[next(iter(values))]


def _is_there(found_tokens: float, expected_tokens: float) -> bool:
    """A prompt of which half is found counts as found: its last pages are evicted first."""
    return found_tokens >= expected_tokens / 2


def _corrected(life_s: float, age_s: float, *, is_there: bool) -> float:
    """A half-life after one more prompt of this age."""
    life_s *= math.exp(LIFE_GAIN * (is_there - _left(age_s, life_s)))
    return min(max(life_s, LIVES_S[0]), LIVES_S[1])


def _left(age_s: float, half_life_s: float) -> float:
    return float(2.0 ** (-age_s / half_life_s))
