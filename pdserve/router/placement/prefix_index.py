"""Where prompts' beginnings live: on which worker, and in the pool. A belief, from what was sent where.

The router does not tokenize. It cuts the JSON of the prompt into blocks and hashes each with all before it,
as SGLang does with pages of token ids: two prompts with the same block digest begin with the same bytes. A
conversation's next turn repeats the last one's bytes, so it has the same blocks up to where it goes on:

    turn 1   [{"role":"user", ... }]                       block 0 | block 1 | (rest)
    turn 2   [{"role":"user", ... },{"role":"assis...      block 0 | block 1 | block 2 | ... | (rest)

Blocks have 1 KiB at the beginning of a prompt and grow with the distance from it, so that a long prompt has
some hundreds. What decides pages beside the text (model, tools, cache salt) is hashed first.

For every block the table holds when it was last at which worker, and in the pool. Workers forget what they
do not see again: after `half_life_s` half of it is thought to have left. What a worker's answer says it
found cached corrects this belief: `trust` is the running mean of found over expected, one number per worker.
A worker that was restarted is a new incarnation, of which nothing is believed.

The table is bounded; the block unseen longest goes first, and of one prompt the last block first, so that a
prompt's known blocks are always its first ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec
import xxhash

from pdserve.router.api.request_body import RequestView, bytes_per_token
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.worker import Worker

FIRST_BLOCK_BYTES = 1024
BLOCKS_PER_SIZE = 64
"""After so many blocks of a size, blocks are twice as long: 64 KiB in 64 blocks, 32 MiB in 576."""
MAX_BLOCKS = 576
MAX_PLACES = 64
"""Workers that a block is remembered at, those last seen."""
MAX_TRUSTED = 1024
TRUST_GAIN = 0.1
"""Weight of one answer in a worker's `trust`."""
MIN_TRUST_TOKENS = 256
"""Answers about fewer expected tokens teach nothing: the estimate of tokens is too coarse."""


class Prefix(msgspec.Struct, frozen=True, gc=False):
    """The blocks of one prompt: digests, first to last, and the size of each in tokens."""

    digests: tuple[int, ...] = ()
    tokens_per_byte: float = 0.25

    def tokens(self, blocks: int) -> int:
        """Estimated tokens in the first `blocks` blocks."""
        return int(BLOCK_ENDS[blocks - 1] * self.tokens_per_byte) if blocks else 0


class Cached(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a prompt that a worker is thought to find, by place. Disjoint."""

    device: float = 0.0
    host: float = 0.0
    pool: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
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
    """The blocks of a prompt, given as JSON. `scope` is whatever else keeps its pages apart from others'."""
    digest = xxhash.xxh3_64()
    for part in (scope.encode("utf-8", "surrogatepass"), bytes(view.cache_salt), bytes(view.tools)):
        digest.update(b"%d:%b" % (len(part), part))
    digests, start, text = [], 0, memoryview(prompt)
    for end in BLOCK_ENDS:
        if end > len(prompt):
            break
        digest.update(text[start:end])
        digests.append(digest.intdigest())
        start = end
    return Prefix(tuple(digests), 1 / bytes_per_token(prompt))


class _Block(msgspec.Struct):
    """When a block was last at each worker (by incarnation), and in the pool."""

    seen_s: dict[str, float]
    pool_s: float | None = None


class PrefixTable:
    """Up to `capacity_blocks` blocks of prompts, with their places."""

    def __init__(self, settings: PlacementSettings) -> None:
        self._settings = settings
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._trust: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def record(self, prefix: Prefix, worker: Worker | None, now_s: float, *, in_pool: bool) -> None:
        """`worker` (None: no worker) has just computed or read the prompt; `in_pool`: its pages are there."""
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
        """Where the prompt's beginning is thought to be."""
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
        return Places(self._settings, workers, pool, self._trust)

    def learn(self, worker: Worker, believed_tokens: float, found_tokens: int) -> None:
        """The worker found so many of the tokens that `Places.believed` says are in its own memory."""
        if believed_tokens >= MIN_TRUST_TOKENS:
            trust = self._trust.get(worker.incarnation, 1.0)
            found = min(1.0, found_tokens / believed_tokens)
            trust += TRUST_GAIN * (found - trust)
            _renew(self._trust, worker.incarnation, trust, MAX_TRUSTED)


class Places:
    """Where one prompt's beginning is thought to be: incarnation → (tokens, age), and the pool."""

    __slots__ = ("_pool", "_settings", "_trust", "_workers")

    def __init__(
        self,
        settings: PlacementSettings,
        workers: dict[str, tuple[int, float]],
        pool: tuple[int, float] | None,
        trust: dict[str, float],
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._pool = pool
        self._trust = trust

    def add(self, worker: Worker, tokens: int, age_s: float) -> None:
        """The worker has more than its blocks say: the answer to the session's last turn too."""
        known = self._workers.get(worker.incarnation)
        if known is None or known[0] < tokens:
            self._workers[worker.incarnation] = tokens, age_s

    def believed(self, worker: Worker) -> float:
        """Tokens in the worker's own memory as far as age goes; its `trust` is left out."""
        tokens, age_s = self._workers.get(worker.incarnation, (0, 0.0))
        return tokens * _left(age_s, max(self._settings.host_half_life_s, self._settings.device_half_life_s))

    def cached(self, worker: Worker) -> Cached:
        """Tokens that the worker is expected to find in its device and host memory and in the pool.

        A share 2^(-age/half life) is still there; what the device has lost the host may have, and what both
        have lost, or never had, the pool.
        """
        if self._pool is None and worker.incarnation not in self._workers:
            return NOTHING
        own = device = pool = 0.0
        found = self._workers.get(worker.incarnation)
        if found is not None:
            trust = self._trust.get(worker.incarnation, 1.0)
            own = self.believed(worker) * trust
            device = min(own, found[0] * trust * _left(found[1], self._settings.device_half_life_s))
        if self._pool is not None:
            tokens, age_s = self._pool
            pool = max(0.0, tokens - own) * _left(age_s, self._settings.pool_half_life_s)
        return Cached(device, own - device, pool)


def _renew(values: dict[str, float], key: str, value: float, limit: int) -> None:
    """Set the value; beyond `limit` the key set longest ago is dropped."""
    values.pop(key, None)
    values[key] = value
    if len(values) > limit:
        del values[next(iter(values))]


def _left(age_s: float, half_life_s: float) -> float:
    return float(2.0 ** (-age_s / half_life_s))
