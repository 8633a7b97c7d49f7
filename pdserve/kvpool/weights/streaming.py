"""The tensors of a revision, read ahead of their use, straight from pages into the memory they stay in.

A span is a stretch of a file that begins with a page and with a tensor: one large tensor, or some small ones.
Its pages have their places in one memory. Pages of nodes of this host are shown there (lent.py); pages of
other nodes are read into it. Threads read up to WINDOW_BYTES ahead, in batches over all nodes, while the
caller uses what came before.

The bound is on bytes that were not given out. What the caller keeps is his: a loader may keep all tensors.
A buffer that nobody uses any more is used again, because fresh memory costs as much as the copy into it.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.weights.lent import LentSpan, can_lend
from pdserve.kvpool.weights.manifest import FileEntry, Manifest, Piece
from pdserve.kvpool.weights.reading import PageReader
from pdserve.kvpool.weights.tensors import (
    LENGTH_BYTES,
    BadHeader,
    TensorPlace,
    header_bytes,
    parse_header,
)

BATCH_BYTES: Final = 32 << 20
WINDOW_BYTES: Final = 256 << 20
THREADS: Final = 4
SPARE_BYTES: Final = 512 << 20  # of buffers kept to be used again
INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"


class Span(NamedTuple):
    """The bytes [start, end) of a file, and the tensors in them; `pieces` with their places in the file."""

    path: str
    start: int
    end: int
    pieces: list[tuple[int, Piece]]
    tensors: list[TensorPlace]
    data_start: int


class Filled(NamedTuple):
    """A span's bytes: uint8, shape [end - start]. The memory is used again when `data` is not any more.
    `lent`: it shows pages of the pool.
    """

    span: Span
    data: Bytes1D
    lent: LentSpan | None = None

    def offset(self, tensor: TensorPlace) -> int:
        """Where the tensor's bytes begin in `data`."""
        return self.span.data_start + tensor.start - self.span.start


def weight_files(reader: PageReader, manifest: Manifest) -> list[FileEntry]:
    """The safetensors files of the model: those of its index, where it has one. Raises WeightsError."""
    files = [file for file in manifest.files if file.path.endswith(SUFFIX) and "/" not in file.path]
    if (index := manifest.find(INDEX)) is not None:
        try:
            wanted = set(json.loads(read_bytes(reader, index))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{manifest.model}: {INDEX} is no index of tensors") from error
        files = [file for file in files if file.path in wanted]
    if not files:
        raise WeightsError(f"{manifest.model} has no *{SUFFIX} files: only these are loaded from a pool")
    return files


def stream(reader: PageReader, manifest: Manifest, files: Iterable[FileEntry]) -> Iterator[Filled]:
    """The spans of these files, in order. Raises WeightsError. Close it to stop reading."""
    spans = (span for file in files for span in spans_of(reader, manifest, file))
    return read_ahead(reader, spans)


def read_bytes(reader: PageReader, file: FileEntry, size_bytes: int | None = None) -> bytes:
    """The first `size_bytes` of a file, or all of it. Raises WeightsError."""
    size = file.size_bytes if size_bytes is None else min(size_bytes, file.size_bytes)
    pieces, ends = [], 0
    for piece in file.pieces:
        if ends >= size:
            break
        pieces.append(piece)
        ends += piece.length
    data = np.empty(ends, np.uint8)
    into, start = [], 0
    for piece in pieces:
        into.append(data[start : start + piece.length])
        start += piece.length
    reader.read(file.path, pieces, into)
    return data[:size].tobytes()


def spans_of(reader: PageReader, manifest: Manifest, file: FileEntry) -> list[Span]:
    """Reads the file's header. Raises WeightsError."""
    try:
        length = header_bytes(read_bytes(reader, file, LENGTH_BYTES), file.size_bytes)
        data_start = LENGTH_BYTES + length
        text = read_bytes(reader, file, data_start)[LENGTH_BYTES:]
        tensors = parse_header(text, file.size_bytes - data_start)
    except BadHeader as error:
        raise WeightsError(f"{manifest.model}: {file.path} is no safetensors file: {error}") from error
    places = [0, *accumulate(piece.length for piece in file.pieces)]
    return cut_spans(file, places, tensors, data_start)


def cut_spans(
    file: FileEntry, places: Sequence[int], tensors: Sequence[TensorPlace], data_start: int
) -> list[Span]:
    """`places`: where the file's pieces begin, and the file's end. `tensors`: in the order of the file."""
    begins = set(places)
    at = data_start + tensors[0].start if tensors else file.size_bytes
    starts = [max(place for place in places if place <= at)]
    for tensor in tensors:
        at = data_start + tensor.start
        # a tensor without bytes may stand where the one before it ends
        if at in begins and at > starts[-1] and tensor.end > tensor.start:
            starts.append(at)
    spans = [
        Span(file.path, start, end, [], [], data_start)
        for start, end in zip(starts, [*starts[1:], file.size_bytes], strict=True)
    ]
    span = 0
    for tensor in tensors:
        while span + 1 < len(spans) and data_start + tensor.start >= starts[span + 1]:
            span += 1
        spans[span].tensors.append(tensor)
    span = 0
    for start, piece in zip(places, file.pieces, strict=False):
        while span + 1 < len(spans) and start >= starts[span + 1]:
            span += 1
        if start >= starts[span]:
            spans[span].pieces.append((start, piece))
    return [one for one in spans if one.tensors]


class Buffers:
    """Memory that is used again. Thread-safe; dropped with its owner."""

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._free: list[Bytes1D] = []  # ascending
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Bytes1D:
        """uint8, shape [size_bytes]. It comes back when nothing refers to the array that is returned."""
        with self._lock:
            fit = (i for i, block in enumerate(self._free) if size_bytes <= block.size <= 2 * size_bytes)
            block = self._free.pop(chosen) if (chosen := next(fit, -1)) >= 0 else None
        if block is None:
            block = np.empty(size_bytes, np.uint8)
        given = block[:size_bytes]
        weakref.finalize(given, self._give_back, block).atexit = False
        return given

    def _give_back(self, block: Bytes1D) -> None:
        with self._lock:
            if sum(one.size for one in self._free) + block.size <= self._spare_bytes:
                self._free.append(block)
                self._free.sort(key=len)


@dataclass
class _Begun:
    """A span that is being read."""

    filled: Filled
    parts: list[Future[None]]


def read_ahead(
    reader: PageReader, spans: Iterable[Span], window_bytes: int = WINDOW_BYTES, threads: int = THREADS
) -> Iterator[Filled]:
    """The spans with their bytes, in order. At most `window_bytes`, and one span, are read ahead.

    Raises WeightsError, also after the last span and when it is closed, if a span given out was not right
    to the end. Its last two spans are settled then.
    """
    buffers, begun, given = Buffers(), deque[_Begun](), deque[LentSpan]()
    under_way = 0
    executor = ThreadPoolExecutor(threads, thread_name_prefix="pdserve-weights")
    try:
        for span in spans:
            filled = _memory_for(reader, span, buffers)
            parts = [executor.submit(_fill, reader, filled, batch) for batch in batches(span.pieces)]
            begun.append(_Begun(filled, parts))
            under_way += filled.data.size
            del filled
            while under_way > window_bytes:
                under_way -= begun[0].filled.data.size
                yield _done(begun, given)
                _settle(given, reader.model, 1)
        while begun:
            yield _done(begun, given)
            _settle(given, reader.model, 1)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        _settle(given, reader.model, 0)


def _memory_for(reader: PageReader, span: Span, buffers: Buffers) -> Filled:
    size_bytes = span.end - span.start
    if reader.shows_pages and can_lend(span.start, span.pieces):
        lent = LentSpan(span.path, span.start, span.pieces)
        return Filled(span, lent.data(size_bytes), lent)
    return Filled(span, buffers.take(size_bytes))


def _settle(given: deque[LentSpan], model: str, later: int) -> None:
    """All but the last `later`: the caller's loop still has the one before it asks for the next."""
    while len(given) > later:
        given.popleft().settle(model)


def batches(pieces: Sequence[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    """In parts of BATCH_BYTES, or one piece."""
    batch: list[tuple[int, Piece]] = []
    size = 0
    for place, piece in pieces:
        if batch and size + piece.stored > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((place, piece))
        size += piece.stored
    if batch:
        yield batch


def _fill(reader: PageReader, filled: Filled, batch: Sequence[tuple[int, Piece]]) -> None:
    span, data, lent = filled
    if lent is not None:
        batch = lent.fill(reader, batch)
    into = [data[place - span.start : place - span.start + piece.length] for place, piece in batch]
    reader.read(span.path, [piece for _, piece in batch], into)


def _done(begun: deque[_Begun], given: deque[LentSpan]) -> Filled:
    """The first span, once all of it is there. Raises what a part of it raised."""
    first = begun.popleft()
    for part in first.parts:
        part.result()  # every step of a part has a deadline
    if first.filled.lent is not None:
        given.append(first.filled.lent)
    return first.filled
