"""Messages to bytes and back: frames, and the bounds that every request keeps. Pure.

A frame is a little-endian u32 length, then one message in msgpack (messages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec

from pdserve.errors import FrameError, PoolRefused, RequestRefused
from pdserve.kvpool.protocol.base import KEY_BYTES, Message
from pdserve.kvpool.protocol.base import NodeAddress as NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    ListPages,
)
from pdserve.kvpool.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_KEYS,
    MAX_PAGES,
    MAX_SEGMENTS,
    Abort,
    Commit,
    Discard,
    Fault,
    Get,
    Release,
    Reply,
    Request,
    Reserve,
    pages_a_message,
)
from pdserve.security.log_text import printable

NAMES: Final = ("name", "old", "new", "node")
MAX_NAME_CHARS: Final = 1024  # of a name in a request: those of namespaces have 512 at most
R = TypeVar("R", bound=Message)


_encoder = msgspec.msgpack.Encoder()


_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


HEADER_BYTES = 4


def encode_frame(message: Request | Reply) -> bytes:
    """The message as one frame. Raises FrameError if it would exceed MAX_FRAME_BYTES, or has a number or a
    text that msgpack cannot carry.
    """
    buffer = bytearray(HEADER_BYTES)
    try:
        _encoder.encode_into(message, buffer, HEADER_BYTES)
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError) as error:
        raise FrameError(f"{type(message).__name__} cannot be encoded: {error}") from error
    body_bytes = len(buffer) - HEADER_BYTES
    if body_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"message of {body_bytes} bytes exceeds the frame limit of {MAX_FRAME_BYTES}")
    buffer[:HEADER_BYTES] = body_bytes.to_bytes(HEADER_BYTES, "little")
    return bytes(buffer)


def decode_request(body: bytes | memoryview) -> Request:
    """Raises FrameError if the bytes are no request of this protocol, or break one of its bounds."""
    try:
        message = _request_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"not a pool request: {error}") from error
    _check_bounds(message)
    return message


def decode_reply(body: bytes | memoryview) -> Reply:
    """Raises FrameError if the bytes are no reply of this protocol, or name an impossible place."""
    try:
        return _reply_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(f"not a pool reply: {error}") from error


def expected(reply: Reply, kind: type[R], node: str) -> R:
    """The reply, if it is of this kind. Raises PoolRefused with the answer of `node` otherwise."""
    if isinstance(reply, kind):
        return reply
    raise refused(reply, node)


def refused(reply: Reply, node: str) -> PoolRefused:
    """The error for a reply that is not of the expected kind."""
    text = f"pool node {node}: {refusal(reply)}"
    return RequestRefused(text, reply.code) if isinstance(reply, Fault) else PoolRefused(text)


def refusal(reply: Reply) -> str:
    """For people: why a reply is not of the expected kind."""
    return printable(reply.message) if isinstance(reply, Fault) else f"unexpected {type(reply).__name__}"


def _check_bounds(message: Request) -> None:
    request_id: int = getattr(message, "id", 0)
    if request_id < 0:
        raise FrameError(f"a request's id of {request_id}, it must not be negative")
    for field in NAMES:
        if len(getattr(message, field, "")) > MAX_NAME_CHARS:
            raise FrameError(f"a {field} longer than {MAX_NAME_CHARS} characters")
    keys: list[bytes] = getattr(message, "keys", [])
    if len(keys) > MAX_KEYS:
        raise FrameError(f"{len(keys)} keys in one message, at most {MAX_KEYS} are allowed")
    slots: list[int] = getattr(message, "slots", [])
    if len(slots) > MAX_KEYS:
        raise FrameError(f"{len(slots)} slots in one message, at most {MAX_KEYS} are allowed")
    lengths = set(map(len, keys))
    if lengths - {KEY_BYTES}:
        raise FrameError(f"a key of {(lengths - {KEY_BYTES}).pop()} bytes, keys have {KEY_BYTES}")
    if isinstance(message, Reserve | Get):
        segments = message.segment_bytes
        if not 1 <= len(segments) <= MAX_SEGMENTS or min(segments) <= 0:
            raise FrameError(f"segment_bytes must be 1 to {MAX_SEGMENTS} positive lengths")
        _check_pages(message, len(keys), pages_a_message(sum(segments)))
    elif isinstance(message, Commit):
        if not len(message.slots) == len(message.sequences) == len(message.checksums):
            raise FrameError("commit: slots, sequences and checksums differ in length")
        _check_pages(message, len(slots), MAX_PAGES)
        if message.ages_s and len(message.ages_s) != len(message.slots):
            raise FrameError("commit: slots and ages differ in length")
    elif isinstance(message, Abort | Release):
        if len(message.slots) != len(message.sequences):
            raise FrameError("abort or release: slots and sequences differ in length")
        if isinstance(message, Abort):
            _check_pages(message, len(slots), MAX_PAGES)
    elif isinstance(message, ListPages):
        if not 1 <= message.limit <= MAX_KEYS:
            raise FrameError(f"a limit of {message.limit}, allowed are 1 to {MAX_KEYS}")
    elif isinstance(message, Discard):
        if len(message.sequences) not in (0, len(message.keys)):
            raise FrameError("discard: keys and sequences differ in length")
        _check_pages(message, len(keys), MAX_PAGES)


def _check_pages(message: Request, pages: int, allowed: int) -> None:
    if pages > allowed:
        what = type(message).__name__
        raise FrameError(f"{what} of {pages} pages in one message, {allowed} of this size are allowed")


class FrameBuffer:
    """Cuts a byte stream into frame bodies. Holds at most one incomplete frame."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self.max_frame_bytes = max_frame_bytes
        """Longest body of the next frame."""

    @property
    def held_bytes(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes from the stream; yield each complete frame body. Raises FrameError on an impossible
        length: the peer speaks another protocol.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            body_bytes = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if not 1 <= body_bytes <= self.max_frame_bytes:
                raise FrameError(
                    f"frame of {body_bytes} bytes, allowed are 1 to {self.max_frame_bytes}: "
                    "the peer does not speak the pdserve pool protocol"
                )
            end = HEADER_BYTES + body_bytes
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield body
