"""Requests for pages, to compare eviction policies on: generated from a seed, or read from a trace.

A request names the blocks of one prompt in order, each by a number; equal numbers are equal blocks with equal
prefixes, so of a request only the blocks before the first missing one are of use (a hit by prefix).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np

from pdserve.errors import ConfigError

Request: TypeAlias = tuple[float, list[int]]  # seconds since the start, blocks


def skewed(seed: int, requests: int = 100_000, blocks: int = 60_000, exponent: float = 0.9) -> list[Request]:
    """Single blocks, their popularity by Zipf's law: the block of rank r is asked for in proportion to
    r^-exponent; ten a second.
    """
    drawn = _zipf(np.random.default_rng(seed), requests, blocks, exponent)
    return [(n / 10, [block]) for n, block in enumerate(drawn)]


def scanning(seed: int, requests: int = 100_000, blocks: int = 6_000, scan: int = 15_000) -> list[Request]:
    """As `skewed`, on fewer blocks; and a third of all requests, in runs, walk through blocks that are asked
    for once (a batch job reading documents).
    """
    rng = np.random.default_rng(seed)
    drawn = _zipf(rng, requests, blocks, 0.9)
    found: list[int] = []
    next_new = blocks
    while len(found) < requests:
        found += drawn[len(found) : len(found) + 2 * scan]
        found += range(next_new, next_new + scan)
        next_new += scan
    return [(n / 10, [block]) for n, block in enumerate(found[:requests])]


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
    "scanning": scanning,
    "multi-turn": multi_turn,
}


class TraceLine(msgspec.Struct, frozen=True):
    """A request of a trace in the format of Mooncake's FAST'25 release. Lengths in tokens."""

    timestamp: float  # milliseconds
    hash_ids: list[int]
    input_length: int = 0
    output_length: int = 0


def read_trace(path: Path) -> list[Request]:
    """The blocks of a trace's requests. Raises ConfigError."""
    return [(line.timestamp / 1000, line.hash_ids) for line in trace_lines(path)]


def trace_lines(path: Path) -> list[TraceLine]:
    """A trace: one JSON object a line. Raises ConfigError."""
    found: list[TraceLine] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror or error}") from error
    for number, text in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(text, type=TraceLine))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"--trace {path}, line {number}: {error}") from error
    if not found:
        raise ConfigError(f"--trace {path}: it has no lines")
    return found


def _zipf(rng: np.random.Generator, requests: int, blocks: int, exponent: float) -> list[int]:
    weights = np.arange(1, blocks + 1, dtype=np.float64) ** -exponent
    edges = np.cumsum(weights / weights.sum())
    drawn: list[int] = np.searchsorted(edges, rng.random(requests)).clip(0, blocks - 1).tolist()
    return drawn
