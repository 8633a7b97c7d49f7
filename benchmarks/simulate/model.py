"""What a simulation is about: the requests of a load, the rates of workers and pool, and how many workers
there are. Pure but for reading files.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from benchmarks.lib.load import trace_lines
from pdserve.errors import ConfigError
from pdserve.router.config.limits import ServiceLevel
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.worker import Role
from pdserve.router.placement.prefix_index import BLOCK_ENDS, Prefix

BLOCK_TOKENS: Final = 512
"""Tokens that one of a trace's `hash_ids` stands for."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. Lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Numbers of its prompt's blocks, of BLOCK_TOKENS tokens each. Equal ones begin alike."""
    prefix: Prefix
    """The same as the router's table sees them."""


def make_request(at_s: float, prompt_tokens: int, output_tokens: int, blocks: tuple[int, ...]) -> Request:
    """A request with at least one token each way."""
    prompt_tokens, output_tokens = max(1, prompt_tokens), max(1, output_tokens)
    return Request(at_s, prompt_tokens, output_tokens, blocks, _prefix(prompt_tokens, blocks))


def read_load(path: Path, requests: int, speed: float) -> list[Request]:
    """The first so many requests of a trace (0: all), `speed` times as fast. Raises ConfigError."""
    lines = trace_lines(path)
    lines = sorted(lines[:requests] if requests else lines, key=lambda line: line.timestamp)
    if any(line.input_length <= 0 for line in lines):
        raise ConfigError(f"--trace {path}: a line without input_length")
    start_ms = lines[0].timestamp
    return [
        make_request(
            (line.timestamp - start_ms) / 1e3 / speed,
            line.input_length,
            line.output_length,
            tuple(line.hash_ids),
        )
        for line in lines
    ]


def turning(seed: int, requests: int, rate_s: float) -> list[Request]:
    """A load that turns from long prompts to long answers in the middle: Poisson arrivals, nothing shared.

    First half: prompts of 2,000 to 8,000 tokens, answers of 20 to 100. Second half: prompts of 100 to 500
    tokens, answers of 200 to 800. All lengths are uniform.
    """
    draw, at_s, next_block = random.Random(f"turning {seed}"), 0.0, 0
    found = []
    for number in range(requests):
        at_s -= math.log(1.0 - draw.random()) / rate_s
        is_first = number < requests // 2
        prompt = round(draw.uniform(2_000, 8_000) if is_first else draw.uniform(100, 500))
        answer = round(draw.uniform(20, 100) if is_first else draw.uniform(200, 800))
        count = -(-prompt // BLOCK_TOKENS)
        found.append(make_request(at_s, prompt, answer, tuple(range(next_block, next_block + count))))
        next_block += count
    return found


def groups(seed: int, requests: int, rate_s: float, count: int, prefix_tokens: int) -> list[Request]:
    """Prompts in `count` groups, drawn alike: those of a group begin with the same `prefix_tokens`, and go on
    by themselves for 600 to 1,800 tokens; answers have 100 to 300. Poisson arrivals.
    """
    draw, at_s = random.Random(f"groups {seed}"), 0.0
    shared = -(-prefix_tokens // BLOCK_TOKENS)
    next_block, found = count * shared, []
    for _ in range(requests):
        at_s -= math.log(1.0 - draw.random()) / rate_s
        first = draw.randrange(count) * shared
        own = round(draw.uniform(600, 1800))
        more = -(-own // BLOCK_TOKENS)
        blocks = (*range(first, first + shared), *range(next_block, next_block + more))
        found.append(make_request(at_s, shared * BLOCK_TOKENS + own, round(draw.uniform(100, 300)), blocks))
        next_block += more
    return found


def _prefix(prompt_tokens: int, blocks: tuple[int, ...]) -> Prefix:
    """What the router would know of the prompt's text, with four bytes a token."""
    tokens_per_byte = Prefix().tokens_per_byte
    digests = []
    for number, end_bytes in enumerate(BLOCK_ENDS):
        end_tokens = int(end_bytes * tokens_per_byte)
        index = (end_tokens - 1) // BLOCK_TOKENS
        if end_tokens > prompt_tokens or index >= len(blocks):
            break
        digests.append(xxhash.xxh3_64_intdigest(b"%d/%d" % (blocks[index], number)))
    return Prefix(tuple(digests), tokens_per_byte)


# --- rates


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one worker, and of the way to the pool and back."""

    prefill_ms_per_token: float
    step_ms: float
    """A decode step for nobody; each request adds `step_ms_per_request`."""
    step_ms_per_request: float
    pool_ms_per_token: float = 0.0
    hop_ms: float = 0.0
    """What a hand-over takes, however long the prompt is: publishing, and the decode worker's first step."""


# --- sizes


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of each role."""

    prefill: int = 0
    decode: int = 0
    elastic: int = 0
    agg: int = 0

    @property
    def total(self) -> int:
        """All workers."""
        return self.prefill + self.decode + self.elastic + self.agg

    def __str__(self) -> str:
        return " + ".join(f"{count} {role}" for role, count in msgspec.structs.asdict(self).items() if count)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all sizes."""

    rates: Rates
    level: ServiceLevel
    max_running: int = 128
    worker_blocks: int = 1024
    """Blocks of 512 tokens in a worker's own memory."""
    pool_blocks: int | None = None
    """In the pool; None: no bound."""
    min_prefill_tokens: int = 0
    """0: the sizes differ by where prompts are computed, so all prompts have the prefill stage."""
    policy: str = "cache_aware"
    """Of the placement, for prompts and answers."""
    seed: int = 1

    def router(self, size: Size) -> RouterConfig:
        """The configuration of the router before workers of this size. It knows the rates as they are."""
        base = RouterConfig()
        rates = self.rates
        placement: dict[str, object] = {
            "prefill_ms_per_token": rates.prefill_ms_per_token,
            "pool_ms_per_token": rates.pool_ms_per_token,
        }
        counts: dict[Role, int] = {
            "prefill": size.prefill,
            "decode": size.decode,
            "agg": size.agg,
            "elastic": size.elastic,
        }
        urls: dict[Role, tuple[str, ...]] = {
            role: tuple(f"http://{role}{number}:1" for number in range(count))
            for role, count in counts.items()
        }
        return msgspec.structs.replace(
            base,
            **urls,
            min_prefill_tokens=self.min_prefill_tokens,
            prefill_policy=self.policy,
            decode_policy=self.policy,
            placement=msgspec.structs.replace(base.placement, **placement),
            slo=self.level,
        )
