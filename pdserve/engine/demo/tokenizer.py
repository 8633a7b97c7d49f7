"""The demo model's tokenizer, made from text found on this machine.

Byte-level BPE (every byte is a token, so any text round-trips), trained on the paragraphs below and on the
sources of Python's standard library, read in name order. The result is the same each time for one Python
installation; another Python version gives other merges, so a demo model is made once and its directory
shared, not made on each host.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdserve.engine.demo.chat import END_OF_TEXT, TURN_END, TURN_START

SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Marks that SGLang's qwen tool-call and reasoning parsers look for; ordinary text to a client, so not
# special.
MARK_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# GPT-4's split, as used by Qwen: contractions, words, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PARAGRAPHS = """
A cache is a promise that work done once need not be done again. A page of attention keys
and values depends on every token before it and on nothing after it, so two conversations
that begin alike may share what they have in common. The prefill worker reads the prompt and
fills pages; the decode worker writes the answer one token at a time.

Please tell me about the weather in Paris, the price of bread in Berlin, and the best way
from Lisbon to Porto. What is the capital of Peru? Who wrote the first program? How many
days are there in February? Write a short poem about rain. You are a helpful assistant.
Answer in one sentence. Think step by step, then give the final answer as JSON.

Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Le cœur déçu mais l'âme
plutôt naïve, Louÿs rêva de crapaüter en canoë. El pingüino Wenceslao hizo kilómetros bajo
exhaustiva lluvia. 敏捷的棕色狐狸跳过了懒狗。
いろはにほへと ちりぬるを。 Съешь ещё этих мягких французских булок, да
выпей чаю. 😀 🚀 ✓

{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}
{"role": "user", "content": "Hello!"}
{"type": "object", "properties": {"answer": {"type": "string"}}, "required": []}
"""


def training_texts(limit_bytes: int) -> Iterator[str]:
    """The package's paragraphs, then the standard library's top-level sources in name order, up to
    `limit_bytes`.
    """
    yield _PARAGRAPHS
    left = limit_bytes
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            return
        yield text


def train_tokenizer(vocab_size: int, text_limit_bytes: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, special tokens first (ids 0, 1, 2).

    Returns a `tokenizers.Tokenizer`.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size - len(MARK_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(text_limit_bytes), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARK_TOKENS])
    return tokenizer
