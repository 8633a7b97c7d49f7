"""Messages to bytes and back: frames, and the bounds that every request keeps. Pure.

A frame is a little-endian u32 length, then one message in msgpack (messages.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from pdserve.errors import FrameError, PoolRefused, RequestRefused
from pdserve.kvpool.protocol.base import Message
from pdserve.kvpool.protocol.base import NodeAddress as NodeAddress
from pdserve.kvpool.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_PAGES,
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

R = TypeVar("R", bound=Message)


_encoder = msgspec.msgpack.Encoder()


_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


HEADER_BYTES = 4


def encode_frame(message: Request | Reply) -> bytes:
    """The message as one frame. Raises FrameError if it would exceed MAX_FRAME_BYTES, or has a number or a
    text that msgpack cannot carry.
    """
    try:
        body = _encoder.encode(message)
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError) as error:
        raise FrameError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(body)} bytes exceeds the frame limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


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
    """What the types of its fields do not say."""
    match message:
        case Get() | Reserve():
            _check_pages(message, message.keys, pages_a_message(sum(message.segment_bytes)))
        case Release():
            _check_alike(message, message.slots, message.sequences)
        case Commit():
            ages_s = message.ages_s or message.slots
            _check_alike(message, message.slots, message.sequences, message.checksums, ages_s)
            _check_pages(message, message.slots, MAX_PAGES)
        case Abort():
            _check_alike(message, message.slots, message.sequences)
            _check_pages(message, message.slots, MAX_PAGES)
        case Discard():
            _check_alike(message, message.keys, message.sequences or message.keys)
            _check_pages(message, message.keys, MAX_PAGES)


def _check_alike(message: Request, *columns: Sequence[object]) -> None:
    if len(set(map(len, columns))) > 1:
        raise FrameError(f"{type(message).__name__}: its lists differ in length")


def _check_pages(message: Request, pages: Sequence[object], allowed: int) -> None:
    if len(pages) > allowed:
        what = type(message).__name__
        raise FrameError(f"{what} of {len(pages)} pages in one message, {allowed} of this size are allowed")


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
        whole = 0 < len(data) - HEADER_BYTES <= self.max_frame_bytes and not self._buffer
        if whole and int.from_bytes(data[:HEADER_BYTES], "little") == len(data) - HEADER_BYTES:
            yield data[HEADER_BYTES:]  # as most come: none of it has to be kept
            return
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
