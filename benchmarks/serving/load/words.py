"""Spans made into prompts: token ids for `/v1/completions`, whose number is exact, or words for
`/v1/chat/completions`, where the server's tokenizer has the last word and its `usage` says what it made of
them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

from benchmarks.serving.load.plan import Ask, Span

Api: TypeAlias = Literal["completions", "chat"]

LOWEST_ID: Final = 300  # bytes and special tokens lie below, in the vocabularies we know
HIGHEST_ID: Final = 4000  # every vocabulary reaches this far
_ANSWERS: Final = 1 << 48  # sources of made-up answers

WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child"),
    *("world", "school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "government", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"),
    *("side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game"),
    *("line", "end", "member", "law", "car", "city", "community", "name"),
)


class Answer(Protocol):
    """What is needed of an answer to go on from it."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


class Talk(Protocol):
    """One session's conversation."""

    def ask(self, ask: Ask) -> dict[str, Any]:
        """The part of the body that holds the prompt."""
        ...

    def heard(self, ask: Ask, answer: Answer | None) -> None:
        """The answer, or None where there was none: one of the planned length is made up, so that the load
        stays what it was planned to be.
        """
        ...


class IdTalk:
    """Prompts of token ids. An answer's ids are those the server says (`return_token_ids`; `nvext` is how
    Dynamo is asked), made up where it says none.
    """

    def __init__(self, seed: int, keeps_history: bool) -> None:
        self._seed = seed
        self._keeps_history = keeps_history
        self._ids: list[int] = []

    def ask(self, ask: Ask) -> dict[str, Any]:
        if not self._keeps_history:
            self._ids = []
        for span in ask.spans:
            self._ids += ids_of(self._seed, span)
        said = {"extra_fields": ["completion_token_ids"]}
        return {"prompt": self._ids, "return_token_ids": True, "nvext": said}

    def heard(self, ask: Ask, answer: Answer | None) -> None:
        said = list(answer.token_ids) if answer is not None else []
        self._ids += said or ids_of(self._seed, _made_up(ask))


class ChatTalk:
    """Prompts of words. `words_per_token`: how many words the server's tokenizer needs for one."""

    def __init__(self, seed: int, keeps_history: bool, words_per_token: float) -> None:
        self._seed = seed
        self._keeps_history = keeps_history
        self._words_per_token = words_per_token
        self._messages: list[dict[str, str]] = []

    def ask(self, ask: Ask) -> dict[str, Any]:
        if not self._keeps_history:
            self._messages = []
        *before, new = [words_of(self._seed, span, self._words_per_token) for span in ask.spans]
        if before and not self._messages:
            self._messages.append({"role": "system", "content": " ".join(before)})
        self._messages.append({"role": "user", "content": new})
        return {"messages": self._messages}

    def heard(self, ask: Ask, answer: Answer | None) -> None:
        said = answer.text if answer is not None else ""
        said = said or words_of(self._seed, _made_up(ask), self._words_per_token)
        self._messages.append({"role": "assistant", "content": said})


def ids_of(seed: int, span: Span) -> list[int]:
    """The span's token ids; a shorter span of the same source is a beginning of it."""
    rng = np.random.default_rng((seed, span.source))
    ids: list[int] = rng.integers(LOWEST_ID, HIGHEST_ID, span.length).tolist()
    return ids


def words_of(seed: int, span: Span, words_per_token: float) -> str:
    """The span as words, about as many tokens as it has."""
    count = max(1, round(span.length * words_per_token))
    rng = np.random.default_rng((seed, span.source))
    return " ".join(WORDS[place] for place in rng.integers(0, len(WORDS), count).tolist())


def _made_up(ask: Ask) -> Span:
    return Span(_ANSWERS + ask.session * 1_000_000 + ask.turn, ask.output_tokens)
