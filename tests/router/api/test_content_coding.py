"""Bodies in a content coding: what is decoded, and what is refused before it takes memory or time."""

from __future__ import annotations

import gzip
import importlib.util
import runpy
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard

from pdserve.errors import RequestError
from pdserve.router.api import content_coding
from pdserve.router.api.content_coding import MAX_CODINGS, MAX_MEMBERS, PIECE_BYTES, CodedBody

BODY = b'{"messages": [{"role": "user", "content": "%b"}]}' % (b"some words \xc3\xa9 " * 20_000)
LIMIT = 1024 * 1024


def raw_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-15)
    return coder.compress(data) + coder.flush()


CODERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"zstd": zstandard.ZstdCompressor().compress,
}


def decoded(data: bytes, *codings: bytes, limit: int = LIMIT, step: int = 10_000) -> bytes:
    """What a body stands for that comes in steps."""
    body = CodedBody(codings, limit)
    parts = [part for at in range(0, len(data), step) for part in body.feed(data[at : at + step])]
    body.end()
    return b"".join(parts)


@pytest.mark.parametrize("step", [1, 7, 1000, 10**9])
@pytest.mark.parametrize(
    ("codings", "data"),
    [
        ((b"gzip",), gzip.compress(BODY)),
        ((b"X-GZip",), gzip.compress(BODY)),
        ((b"deflate",), zlib.compress(BODY)),
        ((b"deflate",), raw_deflate(BODY)),
        ((b"ZSTD",), CODERS[b"zstd"](BODY)),
        ((b"identity",), BODY),
        ((b"",), BODY),
        ((b"gzip, zstd",), CODERS[b"zstd"](gzip.compress(BODY))),
        ((b"identity, gzip", b"deflate"), zlib.compress(gzip.compress(BODY))),
        ((b"gzip",), gzip.compress(BODY[:100]) + gzip.compress(BODY[100:])),
        ((b"zstd",), CODERS[b"zstd"](BODY[:100]) + CODERS[b"zstd"](BODY[100:])),
        ((b"gzip",), gzip.compress(b"")),
    ],
    ids=map(str, range(12)),  # bytes would name them: compressed ones hold the time
)
def test_a_body_comes_out_as_it_was_however_it_arrives(
    codings: tuple[bytes, ...], data: bytes, step: int
) -> None:
    assert decoded(data, *codings, step=step) in (BODY, b"")


def refusal(status: int, data: bytes, *codings: bytes) -> str:
    with pytest.raises(RequestError) as error:
        decoded(data, *codings)
    assert error.value.status == status
    return str(error.value)


@pytest.mark.parametrize("coding", [b"br", b"compress", b"snappy-ish", b"gzip, br", b"\xff"])
def test_an_unknown_coding_is_refused_by_its_name(coding: bytes) -> None:
    said = refusal(415, BODY, coding)
    assert coding.decode("ascii", "replace").rpartition(" ")[2] in said
    assert "gzip" in said


def test_more_codings_than_anybody_uses_are_refused() -> None:
    assert str(MAX_CODINGS) in refusal(415, BODY, b",".join([b"gzip"] * (MAX_CODINGS + 1)))


@pytest.mark.parametrize("coding", CODERS)
def test_what_is_cut_short_or_is_something_else_is_the_clients_fault(coding: bytes) -> None:
    whole = CODERS[coding](BODY)
    for data in (whole[:-5], whole[:1], b"", BODY, whole + b"more", whole + b"m"):
        assert coding.decode() in refusal(400, data, coding)


@pytest.mark.parametrize("coding", CODERS)
def test_a_bomb_is_refused_early_and_never_held(coding: bytes) -> None:
    bomb = CODERS[coding](b" " * (64 * LIMIT))
    body = CodedBody([coding], LIMIT)
    given: list[int] = []

    def take() -> None:
        for at in range(0, len(bomb), PIECE_BYTES):
            given.extend(len(part) for part in body.feed(bomb[at : at + PIECE_BYTES]))

    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as error:
            take()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.value.status == 413
    assert sum(given) <= LIMIT
    assert peak < 20 * LIMIT  # zstd makes up to 8 MiB of 256 bytes, and joins them


def test_a_bomb_inside_a_bomb_is_refused_at_the_layer_that_is_too_large() -> None:
    empty = zlib.compressobj(wbits=-15)
    blocks = b"".join(empty.compress(b"") + empty.flush(zlib.Z_FULL_FLUSH) for _ in range(LIMIT // 4))
    inner = blocks + empty.flush()  # more bytes than a body may have, which stand for none
    assert len(inner) > LIMIT
    assert "larger than" in refusal(413, gzip.compress(inner), b"deflate, gzip")
    assert refusal(413, gzip.compress(gzip.compress(b" " * 10 * LIMIT)), b"gzip, gzip")


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
def test_a_body_of_very_many_small_members_is_refused(coding: bytes) -> None:
    assert str(MAX_MEMBERS) in refusal(400, CODERS[coding](b"") * (MAX_MEMBERS + 1), coding)


def test_a_window_beyond_eight_mebibytes_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=26, enable_ldm=True)
    coder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = coder.compress(BODY) + coder.flush()
    assert "zstd" in refusal(400, data, b"zstd")


def test_where_its_library_is_not_installed_zstd_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = runpy.run_path(content_coding.__file__)["CodedBody"]
    with pytest.raises(
        RequestError, match="'zstd' is not supported; send the body plain, or as gzip, deflate"
    ):
        without([b"zstd"], LIMIT)
    assert b"".join(without([b"gzip"], LIMIT).feed(gzip.compress(b"{}"))) == b"{}"
