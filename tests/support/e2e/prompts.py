"""Prompts for the equality checks, and the check itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PAGE = 64
LOGPROB_TOLERANCE = 1e-2
NEW_TOKENS = 6

LENGTHS = (1, 63, 64, 65, 66, 127, 128, 129, 192, 257, 511, 512, 513, 640, 1025, 1999, 2048, 3000)
"""Tokens: on, just below and just above the bounds of pages and of chunks, and sizes in between."""

# fmt: off
ALL_LENGTHS = (
    1, 2, 7, 33, 63, 64, 65, 66, 100, 127, 128, 129, 150, 191, 192, 193, 200, 255, 256, 257, 300, 319, 320,
    321, 350, 383, 384, 385, 400, 447, 448, 450, 500, 511, 512, 513, 600, 639, 640, 641, 700, 767, 768, 800,
    900, 1000, 1024, 1025, 1500, 1999, 2048, 3000,
)
"""Of a run of all tests: more bounds of pages."""
# fmt: on


@dataclass(frozen=True)
class Answer:
    """Greedy output: token ids and the log-probability of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Answer:
        """From the body of SGLang's /generate with return_logprob."""
        pairs = body["meta_info"]["output_token_logprobs"]
        return cls(tuple(pair[1] for pair in pairs), tuple(pair[0] for pair in pairs))


def token_ids(seed: int, length: int, vocabulary: int = 500) -> list[int]:
    """`length` token ids, the same for the same seed; ids below 10 are left out (special tokens)."""
    source = random.Random(seed)
    return [source.randrange(10, vocabulary) for _ in range(length)]


def first_turns(lengths: Sequence[int]) -> list[list[int]]:
    """One prompt per length; every third begins as the others of these, as conversations do."""
    shared = token_ids(1, 3000)
    return [
        (shared if i % 3 == 0 else token_ids(100 + i, length))[:length] for i, length in enumerate(lengths)
    ]


def second_turn(prompt: Sequence[int], answer: Answer, i: int) -> list[int]:
    """The conversation goes on: what was said, what was answered, and 20 tokens more."""
    return [*prompt, *answer.tokens, *token_ids(9000 + i, 20)]


def differences(
    expected: Sequence[Answer], got: Sequence[Answer], describe: Callable[[int], str]
) -> list[str]:
    """One line per answer whose tokens differ or whose log-probabilities are further apart than the
    tolerance.
    """
    lines = []
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want.tokens != have.tokens:
            lines.append(f"{describe(i)}: tokens {have.tokens}, expected {want.tokens}")
            continue
        apart = max(abs(a - b) for a, b in zip(want.logprobs, have.logprobs, strict=True))
        if apart > LOGPROB_TOLERANCE:
            lines.append(f"{describe(i)}: log-probabilities {apart:.4f} apart")
    return lines
