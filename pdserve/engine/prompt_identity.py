"""Fingerprints of what turns a client's body into tokens: workers that differ in them make other pages of the
same prompt, and share none. Pure.
"""

from __future__ import annotations

from typing import Any, Final

import xxhash

SAMPLE: Final = (
    "The quick brown fox, 1234567890 times; Zwölf Boxkämpfer jagen Viktor.\n\tdef f(x): return x**2  # 😀 "
    "日本語のテキスト русский текст النص العربي <|im_start|>user<|im_end|></s>"
)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """By what it makes of a sample, and by its vocabulary; empty where there is none."""
    if tokenizer is None:
        return ""
    said = [*tokenizer.encode(SAMPLE), len(tokenizer)]
    return str(xxhash.xxh3_64_hexdigest(repr(said).encode()))


def chat_template_fingerprint(tokenizer: Any, named: str | None) -> str:
    """Of the model's own template, and of the one that SGLang was told to use (`--chat-template`)."""
    own = getattr(tokenizer, "chat_template", None)
    return str(xxhash.xxh3_64_hexdigest(repr((own, named)).encode())) if own or named else "none"
