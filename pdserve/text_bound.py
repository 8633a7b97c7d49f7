"""How few tokens a text can have, told from its length alone. Pure.

A worker finds the bound from its tokenizer (`engine/token_bytes.py`). The router and the worker refuse by it
what cannot fit, without tokenizing.
"""

from __future__ import annotations

import msgspec


class TextBound(msgspec.Struct, frozen=True):
    """No token of a model stands for more text than this."""

    longest_token_bytes: int
    """UTF-8 bytes of the longest token. 0: there is no bound."""
    text_shrink: int = 1
    """How many times shorter the tokenizer's normalizer can make characters outside ASCII."""

    def __bool__(self) -> bool:
        return self.longest_token_bytes > 0 and self.text_shrink > 0

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least. 0 where there is no bound."""
        if not self:
            return 0
        size_bytes = len(text)
        if not text.isascii():
            ascii_bytes = len(text.encode("ascii", "ignore"))
            others_bytes = len(text.encode("utf-8", "replace")) - ascii_bytes
            size_bytes = ascii_bytes + -(-others_bytes // self.text_shrink)
        return -(-size_bytes // self.longest_token_bytes)

    def can_exceed(self, json_bytes: int, tokens: int) -> bool:
        """Whether a text of so many bytes as JSON, which is no shorter, may be told to have `tokens`."""
        return bool(self) and json_bytes > (tokens - 1) * self.longest_token_bytes


NO_BOUND = TextBound(0)
