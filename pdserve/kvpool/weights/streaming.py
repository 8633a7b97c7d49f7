"""The tensors of a revision, read ahead of their use, straight from pages into the memory they stay in.

A span is a stretch of a file that begins with a page and with a tensor: one large tensor, or some small ones.
Its pages have their places in one memory. Threads read up to a window ahead, in batches over all nodes, while
the caller uses what came before.

The window is a bound on bytes that were not given out. What the caller keeps is his: a loader may keep all
tensors. It is small where pages are copied from memory of this host: then a byte is in the processor's cache
from its copy to its use. Networks and disks need more under way.

Memory is used again: fresh memory costs as much as the copy into it.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import Bytes1D, aligned
from pdserve.kvpool.weights.manifest import (
    LENGTH_BYTES,
    BadHeader,
    FileEntry,
    Manifest,
    Piece,
    TensorPlace,
    header_bytes,
    parse_header,
)
from pdserve.kvpool.weights.store import PageReader

SPARE_BYTES: Final = 512 << 20  # of buffers kept to be used again


class Buffers:
    """Memory that is used again. Thread-safe; dropped with its owner. Who keeps a part keeps its block, so no
    block is more than four times as long as what is taken of it.
    """

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._free: list[Bytes1D] = []  # ascending
        self._returned: deque[Bytes1D] = deque()  # on their way to `_free`
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Bytes1D:
        """uint8, shape [size_bytes]. It comes back when nothing refers to the array that is returned."""
        with self._lock:
            self._sort_in()
            fit = (i for i, block in enumerate(self._free) if size_bytes <= block.size <= 4 * size_bytes)
            block = self._free.pop(chosen) if (chosen := next(fit, -1)) >= 0 else None
        if block is None:
            block = aligned(size_bytes)
        given = block[:size_bytes]
        weakref.finalize(given, self._give_back, block).atexit = False
        return given

    def _give_back(self, block: Bytes1D) -> None:
        """A finalizer: it may run anywhere, also in a thread that holds the lock, and must wait for nothing.
        Where the lock is held, the next `take` sorts the block in.
        """
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if sum(one.size for one in self._free) + block.size <= self._spare_bytes:
                self._free.append(block)
        self._free.sort(key=len)


BATCH_BYTES: Final = 32 << 20
WINDOW_BYTES: Final = 256 << 20
NEAR_BATCH_BYTES: Final = 16 << 20  # of memory of this host
NEAR_WINDOW_BYTES: Final = 24 << 20
THREADS: Final = min(4, max(2, len(os.sched_getaffinity(0))))  # more are in each other's way
INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"


PlacedPiece: TypeAlias = tuple[int, Piece]
"""Where the piece begins in its file, and the piece."""


class Span(NamedTuple):
    """The bytes [start, end) of a file, and the tensors in them; `pieces` with their places in the file."""

    path: str
    start: int
    end: int
    pieces: list[PlacedPiece]
    tensors: list[TensorPlace]
    data_start: int


class Filled(NamedTuple):
    """A span's bytes: uint8, shape [end - start]. The memory is used again when `data` is not any more."""

    span: Span
    data: Bytes1D

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


def raise_first(reader: PageReader, files: Iterable[FileEntry]) -> None:
    """Have the first pages loaded from tiers: some seconds pass before a worker reads them."""
    pieces = [piece for file in files for piece in file.pieces]
    ends = accumulate(piece.stored for piece in pieces)
    reader.raise_pages([piece for piece, end in zip(pieces, ends, strict=True) if end <= WINDOW_BYTES])


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
    data = aligned(ends)
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


@dataclass
class _Begun:
    """A span that is being read, in these parts."""

    filled: Filled
    parts: list[Future[None]] = field(default_factory=list)


Wanted: TypeAlias = tuple[_Begun, PlacedPiece]


def read_ahead(
    reader: PageReader, spans: Iterable[Span], window_bytes: int = 0, threads: int = THREADS
) -> Iterator[Filled]:
    """The spans with their bytes, in order. At most `window_bytes` (0: by where the pages come from), and one
    span, are read ahead. Raises WeightsError.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix="pdserve-weights")
    work = _ReadAhead(reader, executor, threads)
    try:
        for span in spans:
            work.begin(span)
            near_bytes = NEAR_WINDOW_BYTES if reader.is_near else WINDOW_BYTES
            while work.under_way_bytes > (window_bytes or near_bytes):
                yield work.next()
        while work.begun:
            yield work.next()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


class _ReadAhead:
    """The spans that were begun and were not given out."""

    def __init__(self, reader: PageReader, executor: Executor, threads: int) -> None:
        self._reader = reader
        self._executor = executor
        self._threads = threads
        self._buffers = Buffers()
        self._batch: list[Wanted] = []
        self._batch_bytes = 0
        self.begun: deque[_Begun] = deque()
        self.under_way_bytes = 0

    def begin(self, span: Span) -> None:
        """Small spans of a file are read together: a batch is a question for each size of its pages."""
        if self._batch and self._batch[0][0].filled.span.path != span.path:
            self._submit()
        one = _Begun(Filled(span, self._buffers.take(span.end - span.start)))
        batch_bytes = NEAR_BATCH_BYTES if self._reader.is_near else BATCH_BYTES
        for piece in span.pieces:
            if self._batch_bytes + piece[1].stored > batch_bytes:
                self._submit()
            self._batch.append((one, piece))
            self._batch_bytes += piece[1].stored
        self.begun.append(one)
        self.under_way_bytes += one.filled.data.size

    def next(self) -> Filled:
        """The first span, once all of it is there. Raises what a page of it, or one read with it, raised."""
        reading = {part for one in self.begun for part in one.parts if not part.done()}
        first = self.begun.popleft()
        # a short batch is better than a thread that waits while the caller uses what it has
        if len(reading) < self._threads or any(one is first for one, _ in self._batch):
            self._submit()
        for part in first.parts:
            part.result()  # every step of a part has a deadline
        self.under_way_bytes -= first.filled.data.size
        return first.filled

    def _submit(self) -> None:
        if self._batch:
            if self._reader.from_tiers:  # then a disk is never idle while pages are compared and used
                self._reader.raise_pages([piece for _, (_, piece) in self._batch])
            part = self._executor.submit(_fill, self._reader, self._batch)
            for one in {id(one): one for one, _ in self._batch}.values():
                one.parts.append(part)
        self._batch, self._batch_bytes = [], 0


def batches(pieces: Sequence[PlacedPiece]) -> Iterator[list[PlacedPiece]]:
    """In parts of BATCH_BYTES, or one piece."""
    batch: list[PlacedPiece] = []
    size = 0
    for place, piece in pieces:
        if batch and size + piece.stored > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((place, piece))
        size += piece.stored
    if batch:
        yield batch


def _fill(reader: PageReader, batch: Sequence[Wanted]) -> None:
    """Read the pages of spans of one file. Raises WeightsError."""
    into = [one.filled.data[at - one.filled.span.start :][: piece.length] for one, (at, piece) in batch]
    reader.read(batch[0][0].filled.span.path, [piece for _, (_, piece) in batch], into)
