"""A prompt cut at its stop tokens, and the keys of its segments. Pure.

    text      <|im_start|>user  Hi <|im_end|>  assistant  Hello <|im_end|>  user  Bye <|im_end|>  assistant
    segments  [ 0                 ]          [ 1               ]          [ 2       ]          [ 3 (open)  ]

A tokenizer never merges anything across a stop token, so the tokens of a segment can be replaced by others of
the same text. Nothing before or behind it changes.

A client that sends a call of a tool back has read its arguments and written them anew: with other spaces, and
members in another order. So objects of JSON in an answer count by what they say. The tokens that the model
generated take their place, as it wrote them.

The key of a segment is a hash of a scope and of all text up to the segment's end. So it stands for the whole
conversation: messages, tools and template arguments are in the text. The scope says whose it is: salt, extra
key, adapter and tokenizer. Who has another scope finds nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

MAX_OBJECTS: Final = 64
"""Tries to read an object in an answer: each may read all of its rest."""
_OBJECT: Final = re.compile(r'\{\s*"')
_objects: Final = json.JSONDecoder()
WRITTEN_LONGER: Final = 8
"""An answer may have so many times the tokens that the bytes of its text allow: it was written with more
spaces."""
MAX_SEGMENTS: Final = 4096
"""Of one prompt; the last ones count. A list of segments travels in a header, a bit for each."""
_PERSON: Final = b"pdserve turn 1"

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""The text of tokens, with special tokens, nothing cleaned up."""


class StopTokens:
    """The tokens at which a model ends its answer."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        """`texts`: as they stand in a prompt, by token id."""
        self.texts = dict(texts)
        longest_first = sorted(texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._ids = {text: token for token, text in texts.items()}

    def split_text(self, text: str) -> tuple[list[str], list[int]]:
        """The segments of a text, and the stop tokens between them."""
        segments, stops, start = [], [], 0
        for found in self._pattern.finditer(text) if self.texts else ():
            segments.append(text[start : found.start()])
            stops.append(self._ids[found.group()])
            start = found.end()
        return [*segments, text[start:]], stops

    def split_ids(self, ids: Sequence[int]) -> tuple[list[Sequence[int]], list[int]]:
        """The same of tokens."""
        segments, stops, start = [], [], 0
        for place, token in enumerate(ids):
            if token in self.texts:
                segments.append(ids[start:place])
                stops.append(token)
                start = place + 1
        return [*segments, ids[start:]], stops


def scope_of(tokenizer: str, adapter: str | None, extra_key: str | None, cache_salt: str | None) -> bytes:
    """Whose records they are, in 32 bytes."""
    said = json.dumps([tokenizer, adapter, extra_key, cache_salt or None])
    return hashlib.sha256(said.encode()).digest()


@dataclass(frozen=True)
class Prompt:
    """A prompt cut at its stop tokens: one more segment than stops, and the last one is open: the model goes
    on with it.
    """

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    stops: Sequence[int]
    keys: Sequence[bytes]
    """Of the segments but the open one, 32 bytes each."""
    tokens: StopTokens
    chain: Any
    """The hash up to the open segment's start."""

    def with_ids(self, others: Mapping[int, Sequence[int]]) -> list[int]:
        """The tokens of the prompt with other ones for some segments, by their numbers."""
        whole: list[int] = []
        for number, own in enumerate(self.ids):
            whole += others.get(number, own)
            if number < len(self.stops):
                whole.append(self.stops[number])
        return whole

    def candidates(self, answers: int) -> list[int]:
        """The segments that may end with one of the prompt's `answers`.

        An answer follows what the open segment has. Where a template puts more into the open segment (the
        user's message), all segments come into question.
        """
        most = len(self.keys)
        opening = self.texts[-1]
        alike = [number for number in range(most) if opening and self.texts[number].startswith(opening)]
        return alike if len(alike) == answers else list(range(most))

    def fits(self, number: int, ids: Sequence[int], decode: Decode, vocabulary: int) -> bool:
        """Whether these tokens make the segment's text, and nothing else; objects of JSON in an answer may be
        written in another way. So a false record changes nothing that a prompt says.
        """
        text = self.texts[number]
        is_answer = bool(self.texts[-1]) and text.startswith(self.texts[-1])
        most = len(text.encode("utf-8", "surrogatepass"))
        if not 0 < len(ids) <= (WRITTEN_LONGER * most if is_answer else most):
            return False
        if not all(0 <= token < vocabulary and token not in self.tokens.texts for token in ids):
            return False
        made = self._text_of(number, ids, decode)
        return made == text or (is_answer and made is not None and alike(made) == alike(text))

    def answered(self, ids: Sequence[int], decode: Decode) -> bytes | None:
        """The key of an answer's record. `ids`: the tokens of the open segment and of the answer, up to its
        stop token. None where they do not make the open segment's text and more.
        """
        text, opening = self._text_of(len(self.stops), ids, decode), self.texts[-1]
        if text is None or not text.startswith(opening) or len(text) == len(opening):
            return None
        chain = self.chain.copy()
        chain.update((alike(text) if opening else text).encode("utf-8", "surrogatepass"))
        digest: bytes = chain.digest()
        return digest

    def _text_of(self, number: int, ids: Sequence[int], decode: Decode) -> str | None:
        """Decoded behind its stop token: decoders treat the start of a text in a way of their own."""
        if number == 0:
            return decode(ids)
        stop = self.stops[number - 1]
        text, before = decode([stop, *ids]), self.tokens.texts[stop]
        return text[len(before) :] if text.startswith(before) else None


def cut(text: str, ids: Sequence[int], tokens: StopTokens, scope: bytes) -> Prompt | None:
    """A rendered prompt and its tokens, cut. None where they do not have the same stop tokens, or too many.
    `scope`: 32 bytes.
    """
    texts, stops = tokens.split_text(text)
    segments, same = tokens.split_ids(ids)
    if stops != same or len(texts) > MAX_SEGMENTS:
        return None
    chain = hashlib.blake2b(scope, digest_size=32, person=_PERSON)
    keys = []
    opening = texts[-1]
    for segment, stop in zip(texts, stops, strict=False):
        said = alike(segment) if opening and segment.startswith(opening) else segment
        chain.update(said.encode("utf-8", "surrogatepass"))
        keys.append(chain.copy().digest())
        chain.update(tokens.texts[stop].encode())
    return Prompt(texts, segments, stops, keys, tokens, chain)


def alike(text: str) -> str:
    """A text whose objects of JSON, if it has some, are written in one way."""
    written: list[str] = []
    at = start = 0
    for _ in range(MAX_OBJECTS):
        found = _OBJECT.search(text, start)
        if found is None:
            break
        try:
            value, end = _objects.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            start = found.end()
            continue
        written += text[at : found.start()], json.dumps(value, sort_keys=True, separators=(",", ":"))
        at = start = end
    return "".join([*written, text[at:]]) if written else text
