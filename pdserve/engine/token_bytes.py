"""The longest piece of text that one token of a tokenizer can stand for.

A text of B bytes then has at least B / longest tokens. This holds only where a tokenizer keeps all of its
text. So the bound is read from the tokenizer's own description, and only for what is known to keep it:

    model           BPE, whose vocabulary has each single byte: nothing becomes "unknown", or is dropped
    pre-tokenizer   splits that remove nothing
    normalizer      none, or one whose replacements are no shorter; NFC and NFKC make characters outside ASCII
                    shorter, at most by `NORMAL_FORM_SHRINK`
    added tokens    none that swallows the white space around it

All others have no bound. Samples are tokenized too: where one has fewer tokens than the bound says, there is
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from pdserve.text_bound import NO_BOUND, TextBound

NORMAL_FORM_SHRINK: Final = 4
"""A character has at most 4 bytes. tests/engine/test_token_bytes.py tries all characters."""
_KEEPING: Final = frozenset(("ByteLevel", "Digits", "Metaspace"))
_BYTES: Final = 256
_SAMPLE_CHARS: Final = 2048
_SAMPLES: Final = (
    *(" ", "\n", "a", "\0", "=", "-", "e\u0301", "\u212a", "\u2581", "\ue000"),
    *("\U0001109a", "\U0001f600", "\U00010380"),
)


def text_bound(tokenizer: Any) -> TextBound:
    """The bound of a Hugging Face tokenizer, read from its description and tried on samples."""
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return NO_BOUND
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    bound = described_bound(described)
    samples = [sample * (_SAMPLE_CHARS // len(sample)) for sample in (*_SAMPLES, _longest_added(described))]
    for sample in samples:
        if len(tokenizer.encode(sample, add_special_tokens=False)) < bound.fewest_tokens(sample):
            return NO_BOUND
    return bound


def described_bound(tokenizer: dict[str, Any]) -> TextBound:
    """The bound of what `tokenizer.json` describes."""
    model = tokenizer["model"]
    splits, normal = _flat(tokenizer["pre_tokenizer"]), _flat(tokenizer["normalizer"])
    if model["type"] != "BPE" or not all(map(_keeps, splits)):
        return NO_BOUND
    if any(added["lstrip"] or added["rstrip"] for added in tokenizer["added_tokens"]):
        return NO_BOUND
    shrink = 1
    for step in normal:
        if step["type"] in ("NFC", "NFKC"):
            shrink *= NORMAL_FORM_SHRINK
        elif not _lengthens(step):
            return NO_BOUND
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*splits, *normal))
    vocabulary = model["vocab"]
    if is_byte_level:
        covers_bytes = all(character in vocabulary for character in _byte_characters())
        longest = max(map(len, vocabulary))
    else:
        covers_bytes = bool(model.get("byte_fallback")) and all(
            f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTES)
        )
        longest = max(len(token.encode()) for token in vocabulary)
    if not covers_bytes:
        return NO_BOUND
    return TextBound(max(longest, len(_longest_added(tokenizer).encode())), shrink)


def _flat(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a sequence of sequences."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = next(step[name] for name in ("normalizers", "pretokenizers") if name in step)
    return [each for part in inner for each in _flat(part)]


def _keeps(split: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer's parts are together all of the text."""
    return split["type"] in _KEEPING or (split["type"] == "Split" and split["behavior"] != "Removed")


def _lengthens(step: dict[str, Any]) -> bool:
    """Whether a normalizer's result is no shorter than the text."""
    if step["type"] == "Replace":
        said = step["pattern"].get("String")
        return bool(said) and len(step["content"].encode()) >= len(said.encode())
    return step["type"] in ("Prepend", "ByteLevel")


def _longest_added(tokenizer: dict[str, Any]) -> str:
    return max((str(added["content"]) for added in tokenizer["added_tokens"]), key=_utf8_bytes, default=" ")


def _utf8_bytes(text: str) -> int:
    return len(text.encode())


def _byte_characters() -> Iterator[str]:
    """The characters that stand for the 256 bytes in byte-level vocabularies (GPT-2)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    yield from map(chr, sorted(shown))
    yield from (chr(0x100 + i) for i in range(_BYTES - len(shown)))
