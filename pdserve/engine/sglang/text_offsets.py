"""`logprobs.text_offset` of `/v1/completions`: where in a choice's text each token begins. SGLang says -1.

An offset counts characters of `choices[].text`, the prompt's included where the client has it echoed. Tokens
of a split character have the offset of that character; tokens that the text does not show (special tokens)
that of what follows. Offsets are counted from the bytes of the tokens, for the text of a step may lack what
is held back, a part of a character or of a stop string.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Set
from typing import Any, Final

_MARK: Final = "__pdserve_text_offsets__"
_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE: Final = "\u2581"
_CONTINUES: Final = range(0x80, 0xC0)
"""Bytes of UTF-8 that do not begin a character."""


class Located(tuple[Any, ...]):
    """SGLang's (log-probability, token id, text of the token), which knows its place in the text."""

    offset: int
    after: int  # characters that this token and those before it begin


def locate(meta: dict[str, Any], tokenizer: Any, special_ids: Set[int], *, is_echoed: bool) -> None:
    """Give the tokens of one answer their offsets, in place: `meta` is its `meta_info`, whose lists SGLang
    keeps from step to step, so that each token is looked at once. `special_ids`: tokens that the text
    does not show. `is_echoed`: the text begins with the prompt.
    """
    begun = 0
    for name in ("input_token_logprobs", "output_token_logprobs")[0 if is_echoed else 1 :]:
        tokens = meta.get(name)
        if not tokens:
            continue
        first = len(tokens)
        while first and not isinstance(tokens[first - 1], Located):
            first -= 1
        begun = tokens[first - 1].after if first else begun
        for i in range(first, len(tokens)):
            tokens[i] = located = Located(tokens[i])
            shown = b"" if located[1] in special_ids else _bytes_of(tokenizer, located[1], located[2])
            located.offset = begun - 1 if begun and shown and shown[0] in _CONTINUES else begun
            begun += sum(byte not in _CONTINUES for byte in shown)
            located.after = begun
        begun = tokens[-1].after


def _bytes_of(tokenizer: Any, token_id: int, text: str | None) -> bytes:
    """What a token adds to the text."""
    from sglang.srt.entrypoints.openai.utils import token_id_to_bytes

    if (raw := token_id_to_bytes(tokenizer, token_id)) is not None:
        return bytes(raw)
    piece = tokenizer.convert_ids_to_tokens(token_id) or text or ""
    if said := _BYTE.fullmatch(piece):
        return bytes([int(said[1], 16)])
    return str(piece).replace(_SENTENCEPIECE_SPACE, " ").encode()


def install() -> None:
    """Have SGLang's completions say what `locate` has found; again is a no-op."""
    from sglang.srt.entrypoints.openai import serving_completions

    original = serving_completions.to_openai_style_logprobs
    if not getattr(original, _MARK, False):
        serving_completions.to_openai_style_logprobs = saying(original)


def saying(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`convert`, SGLang's `to_openai_style_logprobs`, and then the offsets."""

    @functools.wraps(convert)
    def converted(*, input_token_logprobs: Any = None, output_token_logprobs: Any = None, **more: Any) -> Any:
        said = convert(
            input_token_logprobs=input_token_logprobs, output_token_logprobs=output_token_logprobs, **more
        )
        tokens = [*(input_token_logprobs or ()), *(output_token_logprobs or ())]
        if all(isinstance(one, Located) for one in tokens):
            said.text_offset = [one.offset for one in tokens]
        return said

    setattr(converted, _MARK, True)
    return converted
