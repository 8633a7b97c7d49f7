"""Manifests of somebody hostile: nothing of them is believed."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import checksum_page
from pdserve.kvpool.weights import manifest as m
from pdserve.kvpool.weights.manifest import PAGE_BYTES, REST_BYTES, FileEntry, Manifest, Piece, Root, root_of
from pdserve.kvpool.weights.names import ModelName

MODEL = ModelName("demo", "1")


def piece(
    length: int = 10, stored: int = REST_BYTES, key: bytes = b"k" * 32, digest: bytes = b"d" * 16
) -> Piece:
    return Piece(key, digest, length, stored)


def of(*files: FileEntry, **fields: Any) -> Manifest:
    given = {"format": 1, "name": "demo", "revision": "1", "fingerprint": "ab12", "files": list(files)}
    return Manifest(**{**given, **fields})


def one(path: str = "config.json") -> FileEntry:
    return FileEntry(path, 10, [piece()])


def read(manifest: Manifest) -> Manifest:
    """As a reader gets it whose pool holds just this."""
    data = msgspec.msgpack.encode(manifest)
    return m.decode_manifest(data, root_of(data), MODEL)


def test_a_manifest_is_read_as_it_was_written() -> None:
    written = of(
        one(), FileEntry("a/b.bin", PAGE_BYTES + 5, [piece(PAGE_BYTES, PAGE_BYTES), piece(5)]), one("e")
    )
    data = m.encode_manifest(written)
    root = m.decode_root(m.encode_root(root_of(data)), MODEL)
    assert m.decode_manifest(data, root, MODEL) == written


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "./a",
        "a/.",
        "..",
        "",
        "a\0b",
        "a\nb",
        "a\\..\\b",
        "x" * 256,
        "/".join(["x"] * 600),
    ],
)
def test_a_path_that_could_lie_elsewhere_is_refused(path: str) -> None:
    for use in (read, m.encode_manifest):
        with pytest.raises(WeightsError, match="would lie elsewhere"):
            use(of(one(path)))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (of(), "0 files"),
        (of(*[one(f"f{i}") for i in range(m.MAX_FILES + 1)]), "10,001 files"),
        (of(one("a"), one("a")), "one name"),
        (of(one("a"), one("a/b")), "below another file"),
        (of(one("a/b/c"), one("a")), "below another file"),
        (of(FileEntry("a", 11, [piece()])), "another length"),
        (of(FileEntry("a", 1 << 60, [piece()])), "another length"),
        (of(FileEntry("a", -10, [piece(-10)])), "impossible size"),
        (of(FileEntry("a", 10, [piece(stored=10)])), "impossible size"),
        (of(FileEntry("a", REST_BYTES + 1, [piece(REST_BYTES + 1)])), "impossible size"),
        (of(FileEntry("a", 0, [piece(0)])), "impossible size"),
        (of(FileEntry("a", 10, [piece(key=b"short")])), "without a name"),
        (of(FileEntry("a", 10, [piece(digest=b"")])), "without a name"),
        (of(one(), name="other"), "is of other@1"),
        (of(one(), revision="2"), "is of demo@2"),
        (of(one(), format=2), "format is 2"),
        (of(one(), fingerprint="../../x"), "fingerprint"),
        (of(one(), fingerprint="a" * 65), "fingerprint"),
    ],
)
def test_impossible_manifests_are_refused(manifest: Manifest, problem: str) -> None:
    with pytest.raises(WeightsError, match=problem):
        read(manifest)


def test_a_manifest_with_other_bytes_than_its_digest_is_refused() -> None:
    data = msgspec.msgpack.encode(of(one()))
    with pytest.raises(WeightsError, match="does not match its digest"):
        m.decode_manifest(data[:-1] + b"\1", root_of(data), MODEL)


def test_bytes_that_are_no_manifest_are_refused() -> None:
    for data in (b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81" * 5000, msgspec.msgpack.encode({"a": 1})):
        root = Root(1, max(1, len(data)), hashlib.sha256(data).digest(), [])
        with pytest.raises(WeightsError, match="no manifest"):
            m.decode_manifest(data, root, MODEL)


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        (Root(2, 10, b"s" * 32, [piece()]), "upgrade"),
        (Root(1, 0, b"s" * 32, []), "impossible sizes"),
        (Root(1, m.MAX_MANIFEST_BYTES + 1, b"s" * 32, [piece()]), "impossible sizes"),
        (Root(1, 10, b"s", [piece()]), "impossible sizes"),
        (Root(1, 11, b"s" * 32, [piece()]), "another length"),
    ],
)
def test_impossible_first_pages_are_refused(root: Root, problem: str) -> None:
    with pytest.raises(WeightsError, match=problem):
        m.decode_root(m.encode_root(root), MODEL)


@given(st.binary(max_size=200))
def test_any_first_page_is_read_or_refused(data: bytes) -> None:
    page = data.ljust(m.ROOT_BYTES, b"\0")
    try:
        root = m.decode_root(page, MODEL)
    except WeightsError:
        return
    assert 0 < root.manifest_bytes <= m.MAX_MANIFEST_BYTES


def test_the_largest_manifest_fits_its_first_page() -> None:
    whole, rest = divmod(m.MAX_MANIFEST_BYTES - 1, PAGE_BYTES)
    pieces = [piece(PAGE_BYTES, PAGE_BYTES)] * whole
    rests, last = divmod(rest, REST_BYTES)
    pieces += [piece(REST_BYTES)] * rests + [piece(last)]
    root = Root(1, m.MAX_MANIFEST_BYTES - 1, b"s" * 32, pieces)
    assert m.decode_root(m.encode_root(root), MODEL) == root


@pytest.mark.parametrize("size", [1, 240, 241, 4096])
def test_a_page_is_judged_by_its_bytes_or_by_the_checksum_that_they_were_found_to_have(size: int) -> None:
    page = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    other = page ^ 1
    record = m.piece_of(page, m.Cut(0, size, size))
    for found, is_good in ((page, True), (other, False)):
        assert m.is_right(record, found) == is_good
        assert m.is_right(record, found, checksum_page([found])) == is_good
