"""A real byte-level BPE tokenizer that often encodes a text to other tokens than it was made of, and a pool's
records in a dict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pdserve.engine.demo.chat import TURN_END
from pdserve.engine.turns.exact import Asked, ExactTurns
from pdserve.engine.turns.record import Memory
from pdserve.engine.turns.segments import StopTokens
from tests.support.random_model import train_tokenizer

OPENING = "\n<|im_start|>assistant\n"


@cache
def tokenizer() -> Any:
    """A `tokenizers.Tokenizer` of 600 tokens; those below 3 and above 593 are special or marks."""
    return train_tokenizer(600, 20_000)


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def letters(text: str) -> list[int]:
    """The tokens of a text of ASCII, one for each character."""
    return [token for letter in text for token in encode(letter)]


def decode(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids), skip_special_tokens=False))


def said(role: str, content: str) -> str:
    """A message as the demo model's template shows it, without the line's end."""
    return f"<|im_start|>{role}\n{content}{TURN_END}"


@cache
def end() -> int:
    """The token that ends a message."""
    return int(tokenizer().token_to_id(TURN_END))


class SmallTokenizer:
    """As `ExactTurns` asks it."""

    fingerprint = "small"

    def __init__(self) -> None:
        self.stop_tokens = StopTokens({end(): TURN_END})
        self.vocabulary = int(tokenizer().get_vocab_size())

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)


class Records:
    """A pool's records. `error` is raised instead of an answer."""

    def __init__(self) -> None:
        self.kept: dict[bytes, list[int]] = {}
        self.asked: list[Sequence[bytes]] = []
        self.error: Exception | None = None

    async def read(self, keys: Sequence[bytes], tenant: str = "") -> Mapping[bytes, list[int]]:
        self.asked.append(keys)
        if self.error is not None:
            raise self.error
        return {key: list(self.kept[key]) for key in keys if key in self.kept}

    def write(self, key: bytes, ids: Sequence[int], tenant: str = "") -> asyncio.Future[bool] | None:
        self.kept[key] = list(ids)
        return None


class Worker:
    """Exact turns of one worker, and the outcomes that it counted."""

    def __init__(self, records: Records | None = None, memory_bytes: int = 1 << 20) -> None:
        self.outcomes: list[str] = []
        self.turns = ExactTurns(SmallTokenizer(), Memory(memory_bytes), records, self.outcomes.append)

    async def answers(self, asked: Asked, answer: Sequence[int], wanted: int | None = None) -> list[int]:
        """One request, answered with these tokens and the end: the prompt's tokens."""
        turn = await self.turns.prompt(asked, wanted)
        assert turn is not None
        await self.turns.answer(turn, [*turn.ids, *answer, end()])
        return turn.ids


def asked(text: str, answers: int, **more: Any) -> Asked:
    """A prompt of this text."""
    return Asked(text, encode(text), answers, **more)
