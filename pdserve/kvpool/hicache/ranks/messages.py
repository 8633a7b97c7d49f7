"""What the leader of a group of ranks says to its followers, one datagram each. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from pdserve.kvpool.hicache.ranks.host_pages import HostPages

VERSION: Final = 1
MAX_BYTES: Final = 128 * 1024  # of a message; below what a Unix socket takes at once
MAX_KEYS: Final = 512  # in a message
MAX_REGIONS: Final = 64  # of the leader's memory; the kernel passes 253 descriptors at once


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where in the leader's host pool a page lies, and what its bytes must give."""

    part: str
    page: int
    checksum: int  # of the page and its trailer
    trailer: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The first message, which carries the descriptors of the leader's memory."""

    version: int
    parts: dict[str, HostPages]
    """Shared parts. In place of a region's descriptor stands its place among those of the message."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The leader reads these pages."""

    keys: list[bytes]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """It has read them. None: it has not got this one, or its writer made no checksum."""

    keys: list[bytes]
    places: list[Place | None]


News: TypeAlias = Begun | Ended

_encoder = msgspec.msgpack.Encoder()
_welcome = msgspec.msgpack.Decoder(Welcome)
_news = msgspec.msgpack.Decoder(News)


def encode(message: Welcome | News) -> bytes:
    """The datagram."""
    return _encoder.encode(message)


def decode_welcome(data: bytes) -> Welcome:
    """The first message. Raises msgspec.ValidationError."""
    return _welcome.decode(data)


def decode_news(data: bytes) -> News:
    """A later message. Raises msgspec.ValidationError."""
    news: News = _news.decode(data)
    return news
