"""The requests that are simulated: of a trace, or generated from a seed. Pure but for the reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from benchmarks.dice import Dice
from benchmarks.pool.traces import trace_lines
from pdserve.errors import ConfigError
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


def scaled(load: Sequence[Request], factor: float) -> list[Request]:
    """The same requests with lengths times `factor`, at the same times."""
    return [
        make_request(
            one.at_s, round(one.prompt_tokens * factor), round(one.output_tokens * factor), one.blocks
        )
        for one in load
    ]


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
    dice, at_s, next_block = Dice("turning", seed), 0.0, 0
    found = []
    for number in range(requests):
        at_s -= math.log(1.0 - dice.between(0.0, 1.0 - 1e-12)) / rate_s
        is_first = number < requests // 2
        prompt = round(dice.between(2_000, 8_000) if is_first else dice.between(100, 500))
        answer = round(dice.between(20, 100) if is_first else dice.between(200, 800))
        count = -(-prompt // BLOCK_TOKENS)
        found.append(make_request(at_s, prompt, answer, tuple(range(next_block, next_block + count))))
        next_block += count
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
