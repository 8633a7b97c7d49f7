"""Offsets of tokens in a text, for vocabularies of bytes and of pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai import utils

from pdserve.engine.sglang.text_offsets import locate, saying

PIECES = ["\u2581The", "\u2581cat", "<0xE4>", "<0xB8>", "<0x96>", "</s>", "!"]
"""Of a SentencePiece vocabulary; three of its tokens are a character's bytes."""


SPECIAL = frozenset([5])


class Pieces:
    def convert_ids_to_tokens(self, token_id: int) -> str:
        return PIECES[token_id]

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(PIECES)}


def offsets(meta: dict[str, Any], *, is_echoed: bool = False) -> list[int]:
    locate(meta, Pieces(), SPECIAL, is_echoed=is_echoed)
    return [one.offset for name in meta for one in meta[name]]


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks a real tokenizer whether its vocabulary is of bytes."""
    monkeypatch.setattr(utils, "_is_byte_level_tokenizer", lambda tokenizer: False)


def tokens(*ids: int) -> list[tuple[float, int, str]]:
    return [(-0.5, one, PIECES[one]) for one in ids]


def test_tokens_of_a_split_character_have_its_place_and_special_ones_add_nothing() -> None:
    assert offsets({"output_token_logprobs": tokens(0, 1, 2, 3, 4, 6, 5)}) == [0, 4, 8, 8, 8, 9, 10]


def test_the_list_that_grows_from_step_to_step_is_counted_once() -> None:
    meta = {"output_token_logprobs": tokens(0, 2)}
    assert offsets(meta) == [0, 4]
    first = meta["output_token_logprobs"][0]
    meta["output_token_logprobs"].extend(tokens(3, 4, 1))
    assert offsets(meta) == [0, 4, 4, 4, 5]
    assert meta["output_token_logprobs"][0] is first


def test_an_echoed_prompt_comes_first() -> None:
    meta = {"input_token_logprobs": tokens(0, 1), "output_token_logprobs": tokens(6)}
    assert offsets(meta, is_echoed=True) == [0, 4, 8]


def test_sglangs_own_form_says_them() -> None:
    meta = {"output_token_logprobs": tokens(0, 1)}
    locate(meta, Pieces(), SPECIAL, is_echoed=False)
    said = saying(utils.to_openai_style_logprobs)(
        output_token_logprobs=meta["output_token_logprobs"], tokenizer=SimpleNamespace()
    )
    assert (said.tokens, said.text_offset) == (["\u2581The", "\u2581cat"], [0, 4])
