"""The memory of spans: buffers that are used again, and spans that show the pool's own memory.

On one host all workers use the pool's one copy of a page, and none makes another one to read it:

    show      each page is shown and compared with its digest, before anybody gets the span
    settle    once the next span was given out: were all bytes right until now?

The pool may take a page away and fill its place again while somebody reads it here: the model was removed,
or the page has moved to another node. Then `settle` finds that, and the load fails: nobody goes on with other
bytes. A caller that keeps tensors gets a copy of their span in the same place before `settle` checks it. So
no use of the pool's memory comes after the check.

Pages and rows outlive the node: a load goes on with what is shown when the node dies. A node that starts
again on the same memory goes on with the numbers of fillings (`Filling`), and one that starts on new memory
leaves the old to those who have it mapped.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import Bytes1D, aligned
from pdserve.kvpool.protocol.slot_table import Filling
from pdserve.kvpool.transports.private_memory import BLOCK_BYTES, Region, Stretch
from pdserve.kvpool.weights.manifest import Piece, digest_of
from pdserve.kvpool.weights.reading import PageReader

SPARE_BYTES: Final = 512 << 20  # of buffers kept to be used again
PlacedPiece: TypeAlias = tuple[int, Piece]
"""Where the piece begins in its file, and the piece."""


class Buffers:
    """Memory that is used again. Thread-safe; dropped with its owner."""

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._free: list[Bytes1D] = []  # ascending
        self._returned: deque[Bytes1D] = deque()  # on their way to `_free`
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Bytes1D:
        """uint8, shape [size_bytes]. It comes back when nothing refers to the array that is returned."""
        with self._lock:
            self._sort_in()
            fit = (i for i, block in enumerate(self._free) if size_bytes <= block.size <= 2 * size_bytes)
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


class _Shown(NamedTuple):
    piece: Piece
    place: Stretch
    filling: Filling


class LentSpan:
    """Memory for the bytes of a file from `start` on. Threads fill it; then one of them settles it."""

    def __init__(self, path: str, start: int, pieces: Sequence[PlacedPiece]) -> None:
        """Raises OSError."""
        self._path = path
        self._start = start
        last_place, last = pieces[-1]
        self._region = Region(last_place + last.stored - start)
        self._given: weakref.ref[Bytes1D] | None = None
        self._shown: list[_Shown] = []

    def data(self, size_bytes: int) -> Bytes1D:
        """The span's bytes, writable; once. Somebody uses the span as long as this array, or a view, is
        there.
        """
        given = self._region.array(0, size_bytes)
        self._given = weakref.ref(given)
        return given

    def place_of(self, one: PlacedPiece) -> Stretch:
        """Where the whole page of the piece belongs."""
        at, piece = one
        return Stretch(self._region, at - self._start, piece.stored)

    def take(self, one: PlacedPiece, filling: Filling) -> bool:
        """The page is shown now. False: its bytes are wrong, and it is to be read."""
        place = self.place_of(one)
        right = digest_of(_bytes_in(place)) == one[1].digest
        if right:
            self._shown.append(_Shown(one[1], place, filling))
        return right

    def settle(self, model: str) -> None:
        """Free the span, or make it the own of those who keep some of it. Raises WeightsError if it was not
        right to the end.
        """
        if is_kept := self._given is not None and self._given() is not None:
            try:
                self._region.own()
            except OSError as error:
                raise WeightsError(f"{model}: no memory to keep tensors in: {error.strerror}") from error
        self._check(model)
        if not is_kept:
            self._region.free()

    def _check(self, model: str) -> None:
        for piece, place, filling in self._shown:
            if filling.holds():
                continue
            if filling.was_refilled() or digest_of(_bytes_in(place)) != piece.digest:
                raise WeightsError(
                    f"{model}: {self._path}: page {piece.key.hex()[:16]} was taken away while it was loaded: "
                    "load it again; if the model was removed, push it first"
                )


def show_pages(reader: PageReader, wanted: Sequence[tuple[LentSpan | None, PlacedPiece]]) -> set[int]:
    """Show those that are in memory of this host and right. Returns their indices in `wanted`."""
    by_size: dict[int, list[tuple[int, LentSpan, PlacedPiece]]] = {}
    for i, (span, one) in enumerate(wanted):
        if span is not None:
            by_size.setdefault(one[1].stored, []).append((i, span, one))
    shown = set()
    for chosen in by_size.values():
        places = [span.place_of(one) for _, span, one in chosen]
        found = reader.show([one[1] for _, _, one in chosen], places)
        for (i, span, one), filling in zip(chosen, found, strict=True):
            if filling is not None and span.take(one, filling):
                shown.add(i)
    return shown


def can_lend(start: int, pieces: Sequence[PlacedPiece]) -> bool:
    """Whether the pages lie in memory as in the file: in whole blocks, and only the last one is padded."""
    if not pieces:
        return False
    whole = all(piece.length == piece.stored for _, piece in pieces[:-1])
    return whole and all(
        (at - start) % BLOCK_BYTES == piece.stored % BLOCK_BYTES == 0 for at, piece in pieces
    )


def _bytes_in(place: Stretch) -> Bytes1D:
    return place.region.array(place.start, place.size_bytes)
