"""Spans that show the pool's own memory: on one host all workers use one copy, and none is made to read it.

    fill      each page is shown and compared with its digest, before anybody gets the span
    settle    once the next span was given out: were all bytes right until now?

The pool may take a page away and fill its place again while somebody reads it here: the model was removed,
or the page has moved to another node. Then `settle` finds other bytes, and the load fails: nobody goes on
with them. A caller that keeps tensors gets a copy of their span in the same place, which `settle` checks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdserve.errors import WeightsError
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.private_memory import BLOCK_BYTES, Region, StillThere, Stretch
from pdserve.kvpool.weights.manifest import Piece
from pdserve.kvpool.weights.pieces import digest_of
from pdserve.kvpool.weights.reading import PageReader

PlacedPiece = tuple[int, Piece]
"""Where the piece begins in its file, and the piece."""


class _Shown(NamedTuple):
    piece: Piece
    place: Stretch
    still_there: StillThere


class LentSpan:
    """Memory for the bytes of a file from `start` on. Its threads fill it; then one thread settles it."""

    def __init__(self, path: str, start: int, pieces: Sequence[PlacedPiece]) -> None:
        """Raises OSError."""
        self._path = path
        self._start = start
        last_place, last = pieces[-1]
        self._region = Region(last_place + last.stored - start)
        self._shown: list[_Shown] = []

    def data(self, size_bytes: int) -> Bytes1D:
        """The span's bytes, writable. Somebody uses the span as long as this array, or a view, is there."""
        return self._region.array(0, size_bytes)

    def fill(self, reader: PageReader, pieces: Sequence[PlacedPiece]) -> list[PlacedPiece]:
        """Show those that are in memory of this host and right. Returns the others, to be read."""
        left: list[PlacedPiece] = []
        for stored in sorted({piece.stored for _, piece in pieces}):
            chosen = [one for one in pieces if one[1].stored == stored]
            places = [Stretch(self._region, at - self._start, stored) for at, _ in chosen]
            found = reader.show([piece for _, piece in chosen], places)
            for one, place, still_there in zip(chosen, places, found, strict=True):
                if still_there is not None and digest_of(_bytes_in(place)) == one[1].digest:
                    self._shown.append(_Shown(one[1], place, still_there))
                else:
                    left.append(one)
        return left

    def settle(self, model: str) -> None:
        """Free the span, or make it the own of those who keep some of it. Raises WeightsError if it was not
        right to the end.
        """
        self._check(model)
        if self._region.free():
            return
        try:
            self._region.own()
        except OSError as error:
            raise WeightsError(f"{model}: no memory to keep tensors in: {error.strerror}") from error
        self._check(model)

    def _check(self, model: str) -> None:
        for piece, place, still_there in self._shown:
            if not still_there() and digest_of(_bytes_in(place)) != piece.digest:
                raise WeightsError(
                    f"{model}: {self._path}: page {piece.key.hex()[:16]} was taken away while it was loaded: "
                    "load it again; if the model was removed, push it first"
                )


def can_lend(start: int, pieces: Sequence[PlacedPiece]) -> bool:
    """Whether the pages lie in memory as in the file: in whole blocks, and only the last one is padded."""
    if not pieces:
        return False
    whole = all(piece.length == piece.stored for _, piece in pieces[:-1])
    return whole and all((at - start) % BLOCK_BYTES == piece.stored % BLOCK_BYTES == 0 for at, piece in pieces)


def _bytes_in(place: Stretch) -> Bytes1D:
    return place.region.array(place.start, place.size_bytes)
