"""The bound on how much text a token stands for: never more tokens than a tokenizer makes of any text."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pdserve.engine.token_bytes import NORMAL_FORM_SHRINK, described_bound, text_bound
from pdserve.text_bound import NO_BOUND, TextBound
from tests.support.suite.extended import examples

TEXTS = ["the cat sat on the mat " * 20, "    " * 30, "naïve Ångström ΩΩ 日本語 한국어", "=" * 64]


class Fast:
    """A fast tokenizer of transformers, as far as the measurement asks."""

    is_fast = True

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def byte_level(normalizer: Any = None, split: Any = None, size: int = 600) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    split = split or pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece_like(byte_fallback: bool = True) -> Tokenizer:
    """As Llama 2 and Gemma: spaces become `▁`, unknown characters their bytes."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ("▁", "a", "b", "▁▁", "ab", "▁▁▁▁"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "▁"), ("a", "b"), ("▁▁", "▁▁")]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def bound_of(tokenizer: Tokenizer) -> TextBound:
    return text_bound(Fast(tokenizer))


PLAIN, NFC, NFKC = byte_level(), byte_level(normalizers.NFC()), byte_level(normalizers.NFKC())
PIECES = sentencepiece_like()


@pytest.mark.parametrize("tokenizer", [PLAIN, NFC, NFKC, PIECES], ids=["plain", "NFC", "NFKC", "pieces"])
def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer) -> None:
    bound = bound_of(tokenizer)
    assert bound
    piece = st.sampled_from([" ", "a", "e\u0301", "\u212a", "Å", "▁", "=", "\u1f82", "\U0001d400", "한"])

    @settings(max_examples=examples(300), deadline=None, derandomize=True, database=None)
    @given(st.text(max_size=80) | st.lists(piece, max_size=60).map("".join))
    def check(text: str) -> None:
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) >= bound.fewest_tokens(text)

    check()


def test_the_longest_token_counts_in_bytes_and_added_ones_count() -> None:
    assert bound_of(PLAIN).longest_token_bytes == max(len(token) for token in PLAIN.get_vocab())
    assert bound_of(PIECES) == TextBound(len("▁▁▁▁".encode()))
    mark = byte_level()
    mark.add_tokens([AddedToken("ü" * 300, normalized=False)])
    assert bound_of(mark).longest_token_bytes == 600


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_normal_form_makes_no_character_shorter_than_the_bound_takes_it_to_be(form: Any) -> None:
    """Of every character in the form, the longest text that becomes it is weighed as the bound weighs it."""
    taken_apart: Any = {"NFC": "NFD", "NFKC": "NFKD"}[form]
    # unassigned and private ones are their own form, and no other's
    characters = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")]

    def weight(character: str) -> float:
        return 1 if character.isascii() else len(character.encode()) / NORMAL_FORM_SHRINK

    heaviest: dict[str, float] = {}
    parts = {each: unicodedata.normalize(taken_apart, each) for each in characters}
    for each in characters:
        if len(parts[each]) == 1:
            heaviest[parts[each]] = max(heaviest.get(parts[each], 0), weight(each))
    for each in characters:
        whole = sum(heaviest[part] for part in parts[each])
        assert weight(each) <= whole or len(parts[each]) == 1
        if unicodedata.is_normalized(form, each):
            assert whole <= len(each.encode()), hex(ord(each))


def changed(**parts: Any) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(PLAIN.to_str())
    return described | parts


REMOVES = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Removed", "invert": False}
SWALLOWS = {"content": "<x>", "lstrip": False, "rstrip": True}


@pytest.mark.parametrize(
    "described",
    [
        changed(pre_tokenizer=REMOVES),
        changed(pre_tokenizer={"type": "BertPreTokenizer"}),
        changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [REMOVES, {"type": "ByteLevel"}]}),
        changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed(normalizer={"type": "Replace", "pattern": {"String": "aaaa"}, "content": "b"}),
        changed(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
        changed(added_tokens=[SWALLOWS]),
        changed(model={"type": "WordPiece", "vocab": {"[UNK]": 0}}),
        changed(model={"type": "Unigram", "vocab": [["a", 0.0]]}),
        changed(model={"type": "BPE", "vocab": {"a": 0, "b": 1}}),  # all other bytes are dropped
        json.loads(sentencepiece_like(byte_fallback=False).to_str()),
    ],
)
def test_a_tokenizer_that_may_drop_or_fold_text_has_no_bound(described: dict[str, Any]) -> None:
    assert described_bound(described) == NO_BOUND


def test_a_tokenizer_that_does_other_than_it_describes_has_no_bound() -> None:
    class Shorter(Fast):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.strip())

    assert text_bound(Fast(PLAIN))
    assert text_bound(Shorter(PLAIN)) == NO_BOUND


def test_without_a_tokenizer_or_with_a_slow_one_there_is_no_bound() -> None:
    assert text_bound(None) == NO_BOUND
    assert text_bound(object()) == NO_BOUND
    assert NO_BOUND.fewest_tokens("x" * 1000) == 0
