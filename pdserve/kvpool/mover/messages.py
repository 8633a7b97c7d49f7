"""Messages between a scheduler and its page mover, as frames: length, number of the call, then msgpack. Pure.

The answer has the number of its call, so that a late one is never taken for another call's.

Both ends are of one installation, and the socket pair has no other user. A mover that starts after an
upgrade of the files on disk may be of another version: it refuses the `Start` message then.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

import msgspec

from pdserve.kvpool.mover.host_pages import HostPart

VERSION: Final = 5
HEADER: Final = struct.Struct("<IQ")  # length of the body, number of the call
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


class Start(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what the mover works with. Answered by `Started` or `Failed`."""

    version: int
    lanes: list[int]  # descriptors of further sockets; each carries one call at a time
    parts: dict[str, HostPart]
    pool: dict[str, Any]  # the PoolClientConfig, secrets included
    namespace: str
    geometry: dict[str, str]
    name: str
    ranks: str = ""  # the group of ranks that read replicated parts together; empty: this one reads alone


class Started(msgspec.Struct, frozen=True, tag=True):
    """The mover takes calls."""


class Exists(msgspec.Struct, frozen=True, tag=True):
    """`ChainClient.present`. Answered by `Done`; its mask has all pages of the first part, then the next."""

    keys: list[str]
    parts: list[str]


class Move(msgspec.Struct, frozen=True, tag=True):
    """`ChainClient.get` or `put`. Answered by `Done`; its `number` is `Moved.written`."""

    write: bool
    part: str
    keys: list[str]
    indices: bytes  # int64 [pages]: each page's first token in the part's host pool


class Clear(msgspec.Struct, frozen=True, tag=True):
    """`ChainClient.clear`. Answered by `Done` with the number of pages."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """`ChainClient.check`. Answered by `Checked`."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """`mask`: one byte for each page that was to be moved, or was asked for."""

    number: int
    mask: bytes = b""


class Checked(msgspec.Struct, frozen=True, tag=True):
    """For each node: empty, or why it does not serve us; `refused` are those that said so themselves."""

    errors: dict[str, str]
    refused: list[str]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The call failed inside the mover, or the mover cannot start."""

    text: str


Call: TypeAlias = Exists | Move | Clear | Check
Answer: TypeAlias = Started | Done | Checked | Failed

_encoder = msgspec.msgpack.Encoder()
_start = msgspec.msgpack.Decoder(Start)
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Start | Call | Answer, number: int = 0) -> bytes:
    """The frame of a call with this number, or of the answer to it."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body), number) + body


def decode_start(body: bytes | memoryview) -> Start:
    """The first message. Raises msgspec.ValidationError."""
    return _start.decode(body)


def decode_call(body: bytes | memoryview) -> Call:
    """A call. Raises msgspec.ValidationError."""
    call: Call = _calls.decode(body)
    return call


def decode_answer(body: bytes | memoryview) -> Answer:
    """An answer. Raises msgspec.ValidationError."""
    answer: Answer = _answers.decode(body)
    return answer
