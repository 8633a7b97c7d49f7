"""Texts that are encoded once."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.sglang.encodings import Encodings
from pdserve.engine.sglang.long_texts import SHORT_CHARS

LONG = "x" * (SHORT_CHARS + 1)


class Encoder:
    """Counts what it encodes."""

    def __init__(self, encodings: Encodings) -> None:
        self.encodings = encodings
        self.count = 0

    def __call__(self, text: Any, options: dict[str, Any] | None = None, result: Any = None) -> Any:
        def encode() -> Any:
            self.count += 1
            return [self.count] * 1000 if result is None else result

        return self.encodings.of(text, options, encode)


def test_the_same_text_under_the_same_options_has_the_same_tokens() -> None:
    encode = Encoder(Encodings())
    first = encode(LONG, {"a": 1, "b": 2})
    first.append(9)
    assert encode(LONG, {"b": 2, "a": 1}) == [1] * 1000
    assert encode(LONG, {"a": 2, "b": 2}) == [2] * 1000
    assert encode(LONG) == [3] * 1000
    assert encode(LONG + "y") == [4] * 1000
    assert encode(LONG + "\ud800") == [5] * 1000
    assert encode(LONG + "\ud800") == [5] * 1000


@pytest.mark.parametrize("text", ["x" * SHORT_CHARS, [LONG], None], ids=["short", "several", "none"])
def test_what_is_no_long_text_is_encoded_each_time(text: Any) -> None:
    encode = Encoder(Encodings())
    encode(text)
    encode(text)
    assert encode.count == 2


def test_what_is_no_list_of_tokens_is_not_kept() -> None:
    encode = Encoder(Encodings())
    encode(LONG, result=(1, 2))
    assert encode(LONG, result=(1, 2)) == (1, 2)
    assert encode.count == 2


def test_memory_is_bounded_and_can_be_emptied() -> None:
    encode = Encoder(Encodings(10_000))
    for end in "abc":
        encode(LONG + end)
    encode(LONG + "c")
    assert encode.count == 3
    encode(LONG + "a")
    assert encode.count == 4, "the oldest was forgotten"
    encode.encodings.clear()
    encode(LONG + "a")
    assert encode.count == 5
