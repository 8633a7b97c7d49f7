"""Writing a revision: digests of all files first, then the plan, the pages that are lacking, and the end.

    files -> manifest       each file is read once, its pages get their names
    plan                    from here on a removal of other revisions leaves these pages alone
    pages                   those that the pool lacks; each is compared with its digest before it is written
    end                     once the pool has all of them, the revision is whole

Whoever pushes the same files again does what is left to do. So a push that was interrupted, and a revision
that lost pages with a node, are made whole by the same command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pdserve.errors import StartupError, WeightsError
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.weights.manifest import (
    FORMAT,
    LENGTH_BYTES,
    BadHeader,
    Cut,
    FileEntry,
    Manifest,
    Piece,
    Root,
    cuts,
    digest_of,
    encode_manifest,
    header_bytes,
    is_inner_path,
    padded,
    parse_header,
    piece_of,
    root_of,
    run_starts,
)
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.store import Revision, WeightStore, await_written, missing_of
from pdserve.kvpool.weights.streaming import SUFFIX
from pdserve.pages import model_fingerprint

BATCH_BYTES: Final = 64 << 20
ATTEMPTS: Final = 3
PAUSE_S: Final = 0.5
Progress = Callable[[int, int], None]
"""Called with the bytes that were handled, and all bytes of this step."""


@dataclass(frozen=True)
class Pushed:
    """What a push did. Bytes and pages are of the content; a page that is used twice counts once."""

    manifest: Manifest
    pages: int
    written_pages: int
    written_bytes: int
    was_there: bool
    """The revision was whole before."""
    warning: str = ""


def push(
    store: WeightStore,
    directory: Path,
    model: ModelName,
    *,
    weight: float | None = None,
    copies: int | None = None,
    progress: Progress = lambda done, size: None,
) -> Pushed:
    """Store the files of `directory`. `weight`, `copies`: as `WeightStore.protect`. Raises WeightsError,
    PoolError.
    """
    manifest = read_directory(directory, model, progress)
    with store.revision(model) as revision:
        root, was_there, warning = _plan(store, revision, manifest, weight, copies)
        written_pages = written_bytes = 0
        pieces = {piece.key: piece for piece in manifest.pieces()}
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S)
            lacking = set(missing_of(store.content, list(pieces)))
            if not lacking:
                break
            written = _write(store, directory, manifest, lacking, progress)
            await_written(store.content, list(written))
            written_pages += len(written)
            written_bytes += sum(pieces[key].stored for key in written)
        if lacking := set(missing_of(store.content, list(pieces))):
            raise _incomplete(store, model, pieces, lacking)
        if revision.first("plan") is None:
            raise WeightsError(f"{model} was removed while it was pushed: push it again if it is wanted")
        revision.write_first("whole", root)
    return Pushed(manifest, len(pieces), written_pages, written_bytes, was_there, warning)


def read_directory(directory: Path, model: ModelName, progress: Progress) -> Manifest:
    """The manifest of a directory's files. Raises WeightsError."""
    paths = list(_paths(directory))
    if not paths:
        raise WeightsError(
            f"{directory} has no files: give a model's directory, as of `huggingface-cli download`"
        )
    try:
        size = sum((directory / path).stat().st_size for path in paths)
        files, done = [], 0
        for path in paths:
            files.append(_entry(directory, path, lambda more, before=done: progress(before + more, size)))  # type: ignore[misc]
            done += files[-1].size_bytes
        fingerprint = model_fingerprint(directory)
    except StartupError:
        fingerprint = ""  # no model of its own, as an adapter
    except OSError as error:
        raise WeightsError(
            f"{error.filename or directory} cannot be read: {error.strerror or error}"
        ) from error
    return Manifest(FORMAT, model.name, model.revision, fingerprint, files)


def _paths(directory: Path) -> Iterator[str]:
    """Files to push, relative, in order: all but hidden ones. Links are followed, for the hub's cache."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is no directory")
    for where, folders, names in os.walk(directory, followlinks=True):
        folder = Path(where)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = (folder / name).relative_to(directory).as_posix()
            if name.startswith(".") or not (folder / name).is_file():
                continue
            if not is_inner_path(path):
                raise WeightsError(f"{directory}: the file name {path!r} cannot be stored: rename it")
            yield path


def _entry(directory: Path, path: str, progress: Callable[[int], None]) -> FileEntry:
    """Raises OSError, WeightsError for a file that changes."""
    pieces, done = [], 0
    size = (directory / path).stat().st_size
    for cut, page in _pages(directory / path, size):
        pieces.append(piece_of(page, cut))
        done += cut.length
        progress(done)
    return FileEntry(path, size, pieces)


def _pages(path: Path, size: int) -> Iterator[tuple[Cut, Bytes1D]]:
    with path.open("rb") as file:
        starts = _starts(path, size)
        for cut in cuts(size, starts):
            yield cut, _read(file, path, cut)


def _read(file: BinaryIO, path: Path, cut: Cut) -> Bytes1D:
    file.seek(cut.start)
    data = file.read(cut.length)
    if len(data) != cut.length:
        raise WeightsError(f"{path} changes while it is pushed: push it again when it is complete")
    return padded(data, cut.stored)


def _starts(path: Path, size: int) -> Sequence[int]:
    """The runs of the file (manifest.py)."""
    if path.suffix != SUFFIX:
        return [0]
    try:
        with path.open("rb") as file:
            length = header_bytes(file.read(LENGTH_BYTES), size)
            data_start = LENGTH_BYTES + length
            return run_starts(data_start, parse_header(file.read(length), size - data_start))
    except BadHeader as error:
        raise WeightsError(f"{path} is no safetensors file: {error}") from error


def _plan(
    store: WeightStore, revision: Revision, manifest: Manifest, weight: float | None, copies: int | None
) -> tuple[Root, bool, str]:
    """Write what comes before the pages. Returns the first page, whether the revision is whole already, and
    why its pages may be evicted (empty if they may not). Raises WeightsError for a revision of other files.
    """
    model = manifest.model
    store.open()
    revision.open()
    problem = store.protect(model, weight, copies)
    data = encode_manifest(manifest)
    root = root_of(data)
    whole, begun = revision.first("whole"), revision.first("plan")
    if any(known not in (None, root) for known in (whole, begun)):
        state = "is in the pool" if whole else "was begun"
        raise WeightsError(
            f"{model} {state} with other files, and a revision never changes: push these under another one, "
            f"or remove it first (pdserve weights rm {model})"
        )
    revision.write_manifest(data, root)  # what is there already is not written
    revision.write_first("plan", root)
    return root, whole is not None, problem


def _write(
    store: WeightStore, directory: Path, manifest: Manifest, lacking: set[bytes], progress: Progress
) -> list[bytes]:
    """Write these pages; the keys of those that the pool took. Raises WeightsError."""
    size = sum({piece.key: piece.stored for piece in manifest.pieces() if piece.key in lacking}.values())
    written: list[bytes] = []
    batch: list[tuple[Piece, Bytes1D]] = []
    done = batch_bytes = 0
    for piece, page in _content(directory, manifest, set(lacking)):
        batch.append((piece, page))
        done += piece.stored
        batch_bytes += piece.stored
        if batch_bytes >= BATCH_BYTES:
            written += _put(store, batch)
            batch, batch_bytes = [], 0
        progress(done, size)
    return written + _put(store, batch)


def _content(directory: Path, manifest: Manifest, wanted: set[bytes]) -> Iterator[tuple[Piece, Bytes1D]]:
    """The wanted pages, read again, each once. Raises WeightsError where a file is another now."""
    for entry in manifest.files:
        path, place = directory / entry.path, 0
        try:
            with path.open("rb") as file:
                for piece in entry.pieces:
                    if piece.key in wanted:
                        wanted.discard(piece.key)
                        page = _read(file, path, Cut(place, piece.length, piece.stored))
                        if digest_of(page) != piece.digest:
                            raise WeightsError(
                                f"{path} changes while it is pushed: push it again when it is complete"
                            )
                        yield piece, page
                    place += piece.length
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error


def _put(store: WeightStore, batch: Sequence[tuple[Piece, Bytes1D]]) -> list[bytes]:
    written: list[bytes] = []
    for stored in {piece.stored for piece, _ in batch}:
        keys = [piece.key for piece, _ in batch if piece.stored == stored]
        pages = [[page] for piece, page in batch if piece.stored == stored]
        done = store.content.put(keys, pages)
        written += [key for key, there in zip(keys, done, strict=True) if there]
    return written


def _incomplete(
    store: WeightStore, model: ModelName, pieces: dict[bytes, Piece], lacking: set[bytes]
) -> WeightsError:
    size = sum(pieces[key].stored for key in lacking)
    why = "nodes did not answer in time"
    if store.content.counters.pages_refused:
        why = "the pool is full: remove a model (pdserve weights ls), or give its nodes more capacity_bytes"
    problems = [str(error) for error in store.content.check().values() if error is not None]
    said = "; ".join([why, *problems])
    return WeightsError(
        f"{model} is not whole: {len(lacking):,} pages ({size / 1e6:,.0f} MB) were not stored: {said}; push "
        "it again then, and only these are written"
    )
