"""What a scripted worker says, and which pages it needs for that. Pure.

Words are tokens. A page is `PAGE_WORDS` words of a conversation, and its key is a hash of all words up to its
end, as SGLang's is. An answer's words follow from its prompt, so every worker gives the same answer, and can
go on with one that another began.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

PAGE_WORDS: Final = 16
PAGE_BYTES: Final = 64 * 1024
VOCABULARY: Final = 50_000


def words_of(body: dict[str, Any]) -> list[str]:
    """Of a prompt."""
    return str(body["prompt"]).split()


def page_keys(words: Sequence[str]) -> list[bytes]:
    """Of the full pages, 32 bytes each."""
    digest = hashlib.blake2b(digest_size=32)
    keys = []
    for end in range(PAGE_WORDS, len(words) + 1, PAGE_WORDS):
        digest.update(" ".join(words[end - PAGE_WORDS : end]).encode() + b"\0")
        keys.append(digest.copy().digest())
    return keys


def answer_tokens(words: Sequence[str], count: int) -> list[int]:
    """Those of the whole answer to a prompt."""
    seed = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
    drawn = hashlib.shake_128(seed).digest(4 * count)
    return [int.from_bytes(drawn[at : at + 4], "little") % VOCABULARY for at in range(0, 4 * count, 4)]


def text_of(token: int) -> str:
    return f"w{token} "
