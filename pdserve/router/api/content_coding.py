"""Request bodies in a content coding (RFC 9110, 8.4): gzip, deflate, zstd, or several of them. Pure.

A body is decoded as it comes, in pieces of bounded size, and no layer of it may become larger than a body may
be. So a few kilobytes that stand for gigabytes are refused (413) when the bound is reached, and no more than
the bound was ever held. Memory of a decoder is bounded too: zstd's window may have 8 MiB (RFC 9659).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Final

from pdserve.errors import RequestError

PIECE_BYTES: Final = 64 * 1024
"""Decoded at a time."""
MAX_CODINGS: Final = 4
MAX_MEMBERS: Final = 256
"""Compressed files that stand one behind the other, as `cat a.gz b.gz` makes them. Each costs a decoder."""
_ZSTD_INPUT_BYTES: Final = 256
"""Given to zstd at a time: it has no bound for its output, and makes up to 128 KiB of 4 bytes."""
_ZSTD_WINDOW_BYTES: Final = 8 * 1024 * 1024
_HAS_ZSTD: Final = find_spec("zstandard") is not None
"""The extra `zstd` of pyproject.toml, without which a body so coded is refused as one of any other coding."""


class CodedBody:
    """One body while it is decoded."""

    def __init__(self, codings: Iterable[bytes], limit_bytes: int) -> None:
        """`codings`: values of the header `Content-Encoding`. Raises RequestError (415)."""
        names = [name.strip().lower() for value in codings for name in value.split(b",")]
        names = [name for name in names if name not in (b"", b"identity")]
        if len(names) > MAX_CODINGS:
            raise RequestError(415, f"The request body has more than {MAX_CODINGS} content codings.")
        self._layers = [_Layer(name, limit_bytes) for name in reversed(names)]

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The decoded pieces of what has come. Raises RequestError: 413, or 400 for what is not so coded."""
        pieces: Iterable[bytes] = (data,)
        for layer in self._layers:
            pieces = layer.decode(pieces)
        yield from pieces

    def end(self) -> None:
        """The body is complete. Raises RequestError (400) if its last piece is missing."""
        for layer in self._layers:
            layer.end()


class _Layer:
    """One coding of a body."""

    def __init__(self, name: bytes, limit_bytes: int) -> None:
        made = _DECODERS.get(name)
        if made is None:
            said = name[:40].decode("ascii", "replace")
            raise RequestError(
                415,
                f"The content encoding '{said}' is not supported; send the body plain, or as {TAKEN}.",
                code="unsupported_content_encoding",
            )
        self._name = name.decode("ascii")
        self._make = made
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes
        self._coder: Any = None
        """Of the member that is being decoded; None between two of them."""
        self._members = 0
        self._begin = b""
        """Too little to know by which decoder: fewer than two bytes."""

    def decode(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            data = self._begin + piece
            self._begin = b""
            while data:
                if self._coder is None:
                    if len(data) < 2:
                        self._begin = data
                        break
                    self._members += 1
                    if self._members > MAX_MEMBERS:
                        raise RequestError(400, f"The {self._name} body has more than {MAX_MEMBERS} members.")
                    self._coder = self._make(data)
                for decoded in self._decoded(data):
                    self._left_bytes -= len(decoded)
                    if self._left_bytes < 0:
                        message = f"The request body is larger than {self._limit_bytes} bytes when decoded."
                        raise RequestError(413, message, code="body_too_large")
                    yield decoded
                data = b""
                if self._coder.eof:
                    data, self._coder = self._coder.unused_data, None

    def _decoded(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Raises RequestError (400)."""
        coder = self._coder
        while True:
            try:
                decoded = coder.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise RequestError(400, f"The request body is not valid {self._name}.") from None
            if decoded:
                yield decoded
            data = coder.unconsumed_tail
            if coder.eof or not (data or len(decoded) == PIECE_BYTES):  # some may wait inside the decoder
                return

    def end(self) -> None:
        if self._coder is not None or self._begin or not self._members:
            raise RequestError(400, f"The {self._name} body breaks off before its end.")


class _Zstd:
    """One frame of zstd, decoded as zlib's objects do it."""

    def __init__(self) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        self._coder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        self.unused_data = b""
        self.unconsumed_tail: bytes | memoryview = b""

    @property
    def eof(self) -> bool:
        return bool(self._coder.eof)

    def decompress(self, data: bytes | memoryview, _: int) -> bytes:
        given = memoryview(data)[:_ZSTD_INPUT_BYTES]
        try:
            decoded: bytes = self._coder.decompress(given)
        except self._error as error:
            raise zlib.error(str(error)) from None
        self.unconsumed_tail = memoryview(data)[len(given) :]
        if self.eof:
            self.unused_data = self._coder.unused_data + bytes(self.unconsumed_tail)
        return decoded


def _gzip(_: bytes) -> Any:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def _deflate(begin: bytes) -> Any:
    """With zlib's head, as RFC 9110 says, or without it, as some clients send it."""
    has_head = begin[0] & 0x0F == 8 and (begin[0] << 8 | begin[1]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_head else -zlib.MAX_WBITS)


def _zstd(_: bytes) -> Any:
    return _Zstd()


_DECODERS: Final[dict[bytes, Callable[[bytes], Any]]] = {
    b"gzip": _gzip,
    b"x-gzip": _gzip,
    b"deflate": _deflate,
    **({b"zstd": _zstd} if _HAS_ZSTD else {}),
}
TAKEN: Final = "gzip, deflate, zstd" if _HAS_ZSTD else "gzip, deflate"
"""What a body may be coded with, as `Accept-Encoding` says it."""
