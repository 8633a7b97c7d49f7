"""Fingerprints of the tokenizer and the chat template. Pure.

Workers that differ in them make other pages of the same prompt, and share none.
"""

from __future__ import annotations

from typing import Any, Final

import xxhash

SAMPLE: Final = (
    "The quick brown fox, 1234567890 times; Zwölf Boxkämpfer jagen Viktor.\n\tdef f(x): return x**2  # 😀 "
    "日本語のテキスト русский текст النص العربي <|im_start|>user<|im_end|></s>"
)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of the tokens of a sample and the size of the vocabulary; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    said = [*tokenizer.encode(SAMPLE), len(tokenizer)]
    return str(xxhash.xxh3_64_hexdigest(repr(said).encode()))


def chat_template_fingerprint(tokenizer: Any, named: str | None) -> str:
    """Of the model's own template, and of the one that SGLang was told to use (`--chat-template`)."""
    own = getattr(tokenizer, "chat_template", None)
    return str(xxhash.xxh3_64_hexdigest(repr((own, named)).encode())) if own or named else "none"
