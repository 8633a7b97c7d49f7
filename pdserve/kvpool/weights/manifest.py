"""What a revision consists of: its files, and the pages that their bytes are in. Pure.

    root        one page under a fixed key: digest, length and pages of the manifest
    manifest    Manifest in msgpack, cut into pages like a file
    content     pages named by the SHA-256 of their bytes, padding included

Everything here may come from somebody hostile: every name, number and sum is checked before it is used.
Paths are relative, below the model's directory, and each has one file. `Piece.digest` is XXH3-128: it is
computed at the speed of memory at each read. It finds faults; against intent there are page keys.

Pages have two sizes only, because a node gives each size slabs of its own. A run of a file is cut into pages
of PAGE_BYTES, and its rest into pages of REST_BYTES, the last one padded with zeros. A safetensors file is
cut at its tensors: its header is a run, each large tensor is one, and the small ones between two large ones
are one. So a tensor that a fine-tune leaves alone has the same pages in both models, wherever it lies in
their files. Any other file is one run.

The header of a safetensors file is 8 bytes of length, then JSON that says where each tensor lies. It may
come from the pool, so every number is checked. Source of the format: the README of huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

import msgspec
import numpy as np
import xxhash

from pdserve.errors import WeightsError
from pdserve.kvpool.native.copying import LEAST_HASHED_BYTES
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, Bytes1D
from pdserve.kvpool.weights.names import ModelName

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMENSIONS: Final = 16
ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""By name of the dtype."""


class TensorPlace(NamedTuple):
    """A tensor; its bytes are [start, end) of the data, which begins after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class BadHeader(ValueError):
    """A safetensors file that cannot be one. Its text says why."""


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Length of the JSON, from the file's first 8 bytes. Raises BadHeader."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise BadHeader(f"its header would have {length:,} bytes")
    return length


def parse_header(text: bytes, data_bytes: int) -> list[TensorPlace]:
    """The tensors in the order of their bytes. `data_bytes`: of the file after it. Raises BadHeader."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadHeader("its header is no JSON") from error
    if not isinstance(found, dict):
        raise BadHeader("its header is no object")
    found.pop("__metadata__", None)
    tensors = sorted((_place(name, said) for name, said in found.items()), key=lambda place: place[3:])
    end = 0
    for tensor in tensors:
        if tensor.start < end:
            raise BadHeader(f"tensor {tensor.name!r} overlaps another one")
        end = tensor.end
    if end > data_bytes:
        raise BadHeader(f"its tensors need {end:,} bytes, and it has {data_bytes:,}")
    return tensors


def _place(name: str, said: Any) -> TensorPlace:
    if not isinstance(said, dict):
        raise BadHeader(f"tensor {name!r} is no object")
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadHeader(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not (_counts(shape) and len(shape) <= MAX_DIMENSIONS and _counts(offsets) and len(offsets) == 2):
        raise BadHeader(f"tensor {name!r} has an impossible shape or place")
    start, end = offsets
    if end - start != prod(shape) * ITEM_BYTES[dtype]:
        raise BadHeader(f"tensor {name!r} has not as many bytes as its shape")
    return TensorPlace(name, dtype, tuple(shape), start, end)


def _counts(said: Any) -> TypeGuard[list[int]]:
    """A list of sizes that 64 bits hold."""
    return isinstance(said, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in said)


FORMAT: Final = 1
PAGE_BYTES: Final = 4 << 20
REST_BYTES: Final = 256 << 10
LARGE_TENSOR_BYTES: Final = 1 << 20
ROOT_BYTES: Final = REST_BYTES
MAX_MANIFEST_BYTES: Final = 64 << 20  # of a model of 4 TB
MAX_FILES: Final = 10_000
MAX_PATH_CHARS: Final = 1024
KEY_BYTES: Final = 32
DIGEST_BYTES: Final = 16
_LENGTH_BYTES: Final = 4
T = TypeVar("T")


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A page of content. `length` bytes of it are the file's, the others up to `stored` are zeros."""

    key: bytes
    digest: bytes
    length: int
    stored: int


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file: `path` below the model's directory, with `/`. Its bytes are those of its pieces in order."""

    path: str
    size_bytes: int
    pieces: list[Piece]


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """A revision; the same for the same files, whoever pushes them.

    `fingerprint`: `pages.model_fingerprint` of the directory; empty if it has none.
    """

    format: int
    name: str
    revision: str
    fingerprint: str
    files: list[FileEntry]

    @property
    def model(self) -> ModelName:
        return ModelName(self.name, self.revision)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    def pieces(self) -> Iterable[Piece]:
        """Of all files."""
        return (piece for file in self.files for piece in file.pieces)

    def find(self, path: str) -> FileEntry | None:
        return next((file for file in self.files if file.path == path), None)


class Root(msgspec.Struct, frozen=True, array_like=True):
    """The first page of a revision."""

    format: int
    manifest_bytes: int
    manifest_sha256: bytes
    pieces: list[Piece]


def piece_key(stored: bytes | memoryview) -> bytes:
    """The name of a page with these bytes."""
    return hashlib.sha256(stored).digest()


def fixed_key(what: str) -> bytes:
    """The key of a page that is found without a manifest."""
    return hashlib.sha256(b"pdserve weights " + what.encode()).digest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises WeightsError for one that no reader would take."""
    problem = _problem(manifest, manifest.model)
    data = msgspec.msgpack.encode(manifest)
    if not problem and len(data) > MAX_MANIFEST_BYTES:
        problem = f"its list of pages has more than {MAX_MANIFEST_BYTES >> 20} MiB"
    if problem:
        raise WeightsError(f"{manifest.model}: {problem}")
    return data


def decode_manifest(data: bytes | memoryview, root: Root, model: ModelName) -> Manifest:
    """Raises WeightsError."""
    if hashlib.sha256(data).digest() != root.manifest_sha256:
        raise WeightsError(f"{model}: its manifest does not match its digest: push it again")
    manifest = _decoded(data, Manifest, model)
    if problem := _problem(manifest, model):
        raise WeightsError(f"{model}: its manifest is refused: {problem}")
    return manifest


def encode_root(root: Root) -> bytes:
    """A page of ROOT_BYTES."""
    data = msgspec.msgpack.encode(root)
    assert len(data) + _LENGTH_BYTES <= ROOT_BYTES  # 64 MiB of manifest have 31 pages at most
    return (len(data).to_bytes(_LENGTH_BYTES, "little") + data).ljust(ROOT_BYTES, b"\0")


def decode_root(page: bytes, model: ModelName) -> Root:
    """Raises WeightsError."""
    length = int.from_bytes(page[:_LENGTH_BYTES], "little")
    root = _decoded(page[_LENGTH_BYTES : _LENGTH_BYTES + length], Root, model)
    if root.format != FORMAT:
        raise WeightsError(f"{model}: its format is {root.format}, this version reads {FORMAT}: upgrade it")
    sizes = 0 < root.manifest_bytes <= MAX_MANIFEST_BYTES and len(root.manifest_sha256) == KEY_BYTES
    if not sizes or (problem := _bad_pieces(root.pieces, root.manifest_bytes)):
        raise WeightsError(f"{model}: its first page is refused: {problem if sizes else 'impossible sizes'}")
    return root


def _decoded(data: bytes | memoryview, kind: type[T], model: ModelName) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{model}: what the pool has of it is no manifest: {error}") from error


def _problem(manifest: Manifest, model: ModelName) -> str:
    """Why nobody should read by this manifest; empty where all is well."""
    if manifest.format != FORMAT:
        return f"its format is {manifest.format}, this version reads {FORMAT}"
    if manifest.model != model:
        return f"it is of {manifest.model}"
    if len(manifest.fingerprint) > 64 or (not manifest.fingerprint.isalnum() and manifest.fingerprint):
        return "its fingerprint is impossible"
    if not 0 < len(manifest.files) <= MAX_FILES:
        return f"it has {len(manifest.files):,} files, 1 to {MAX_FILES:,} are possible"
    for file in manifest.files:
        if not is_inner_path(file.path):
            return f"its file {file.path[:MAX_PATH_CHARS]!r} would lie elsewhere"
        if problem := _bad_pieces(file.pieces, file.size_bytes):
            return f"its file {file.path!r} has {problem}"
    return _clash([file.path for file in manifest.files])


def is_inner_path(path: str) -> bool:
    """Whether this is a plain relative path that stays below its directory, whatever is done with it."""
    parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH_CHARS
        and path.isprintable()
        and "\\" not in path
        and all(part and part not in (".", "..") and len(part.encode()) <= 255 for part in parts)
    )


def _clash(paths: Sequence[str]) -> str:
    """Two files of one name, or a file that another one needs as a directory."""
    names = set(paths)
    if len(names) != len(paths):
        return "two of its files have one name"
    for path in paths:
        if any(str(parent) in names for parent in PurePosixPath(path).parents):
            return f"its file {path!r} lies below another file"
    return ""


def _bad_pieces(pieces: Sequence[Piece], size_bytes: int) -> str:
    for piece in pieces:
        if len(piece.key) != KEY_BYTES or len(piece.digest) != DIGEST_BYTES:
            return "a page without a name"
        if piece.stored not in (PAGE_BYTES, REST_BYTES) or not 0 < piece.length <= piece.stored:
            return "a page of an impossible size"
    if sum(piece.length for piece in pieces) != size_bytes:
        return "pages of another length than itself"
    return ""


class Cut(NamedTuple):
    """The bytes [start, start + length) of a file, stored in a page of `stored` bytes."""

    start: int
    length: int
    stored: int


def run_starts(data_start: int, tensors: Sequence[TensorPlace]) -> list[int]:
    """Where the runs of a safetensors file begin. `tensors`: in the order of the file."""
    starts, after_large = [0, data_start], True
    for tensor in tensors:
        is_large = tensor.end - tensor.start >= LARGE_TENSOR_BYTES
        if is_large or after_large:
            starts.append(data_start + tensor.start)
        after_large = is_large
    return sorted(set(starts))


def cuts(file_bytes: int, starts: Sequence[int] = (0,)) -> Iterator[Cut]:
    """The pages of a file whose runs begin at `starts` (ascending, from 0 on)."""
    for start, end in pairwise([*(start for start in starts if start < file_bytes), file_bytes]):
        while start < end:
            left = end - start
            stored = PAGE_BYTES if left >= PAGE_BYTES else REST_BYTES
            yield Cut(start, min(left, stored), stored)
            start += stored


def padded(data: memoryview | bytes, stored: int) -> Bytes1D:
    """The page that holds `data`: uint8, shape [stored], zeros behind the data."""
    if len(data) == stored:
        return np.frombuffer(data, np.uint8)
    page = np.zeros(stored, np.uint8)
    page[: len(data)] = np.frombuffer(data, np.uint8)
    return page


def piece_of(page: Bytes1D, cut: Cut) -> Piece:
    """The record of a page. `page`: as of `padded`."""
    return Piece(piece_key(page.data), digest_of(page), cut.length, cut.stored)


def is_right(piece: Piece, page: Bytes1D, checksum: int = NO_CHECKSUM) -> bool:
    """Whether the bytes of a page are those of the piece. `checksum`: what they were found to have as a page
    of the pool, on their way here, which saves a second pass over them: XXH3-64 is the lower half of
    XXH3-128, but for short inputs.
    """
    if checksum == NO_CHECKSUM or page.size < LEAST_HASHED_BYTES:
        return digest_of(page) == piece.digest
    return checksum == (int.from_bytes(piece.digest[DIGEST_BYTES // 2 :], "big") or 1)


def digest_of(page: Bytes1D) -> bytes:
    """What a read of the page is compared with. The GIL is released meanwhile."""
    return bytes(xxhash.xxh3_128_digest(page.data))


def is_named(data: Bytes1D, piece: Piece) -> bool:
    """Whether the page of these bytes has the piece's name: SHA-256, for files that decide what runs."""
    digest = hashlib.sha256(data.data)
    digest.update(bytes(piece.stored - piece.length))
    return digest.digest() == piece.key


def cut_bytes(data: bytes) -> Iterator[tuple[Piece, Bytes1D]]:
    """A text in memory as pages."""
    view = memoryview(data)
    for cut in cuts(len(data)):
        page = padded(view[cut.start : cut.start + cut.length], cut.stored)
        yield piece_of(page, cut), page


def root_of(manifest: bytes) -> Root:
    """The first page's record for an encoded manifest."""
    pieces = [piece for piece, _ in cut_bytes(manifest)]
    return Root(FORMAT, len(manifest), hashlib.sha256(manifest).digest(), pieces)
