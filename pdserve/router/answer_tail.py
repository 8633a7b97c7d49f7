"""What the end of a worker's answer says of tokens, read without parsing the answer.

SGLang puts `usage` (OpenAI's routes) or `meta_info` (`/generate`) at the end of a whole answer and into the
last events of a stream, the latter where the client asks with `stream_options.include_usage`; the places that
cached tokens came from where it asks with `return_cached_tokens_details`. A quote within a JSON string is
escaped, so text of an answer cannot be taken for these fields.
"""

from __future__ import annotations

import re

import msgspec

TAIL_BYTES = 4096
BYTES_PER_EVENT = 300
"""A stream's event of one token has 200 to 330 bytes; the estimate where an answer does not say."""

_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d{1,9})\b')
_DETAILS = re.compile(rb'"cached_tokens_details":\s*(\{[^{}]*\})')


class CachedDetails(msgspec.Struct, frozen=True):
    """SGLang's `cached_tokens_details`: prompt tokens found cached, by place."""

    device: int = 0
    host: int = 0
    storage: int = 0


class AnswerTail(msgspec.Struct, frozen=True):
    """What an answer says; None where it does not."""

    completion_tokens: int | None = None
    cached: CachedDetails | None = None


_details_decoder = msgspec.json.Decoder(CachedDetails)


def read_tail(tail: bytes) -> AnswerTail:
    """The last word on tokens in the last bytes of an answer."""
    tail = tail[-TAIL_BYTES:]
    completion, details = _COMPLETION.findall(tail), _DETAILS.findall(tail)
    try:
        cached = _details_decoder.decode(details[-1]) if details else None
    except msgspec.DecodeError:
        cached = None
    return AnswerTail(int(completion[-1]) if completion else None, cached)
