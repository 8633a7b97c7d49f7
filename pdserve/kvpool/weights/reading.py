"""Reading pages of weights: right ones, or an error that names what is lacking. No page is read unchecked."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from pdserve.errors import WeightsError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, Bytes1D
from pdserve.kvpool.weights.manifest import Piece, is_right

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
PAUSE_S: Final = 0.5  # between attempts: a node that was lost has an heir soon


class PageReader:
    """Reads pages of one model. Thread-safe. `model`: for errors."""

    def __init__(self, client: PoolClient, model: str) -> None:
        self._client = client
        self.model = model

    @property
    def from_tiers(self) -> bool:
        """Whether some page so far was in a tier only."""
        return self._client.counters.pages_ssd > 0

    @property
    def is_near(self) -> bool:
        """Whether pages are copied from memory of this host, as far as is known."""
        return self._client.is_near and not self.from_tiers

    def raise_pages(self, pieces: Sequence[Piece]) -> None:
        """Have pages loaded from tiers that are wanted soon."""
        self._client.raise_pages([piece.key for piece in pieces])

    def read(self, path: str, pieces: Sequence[Piece], into: Sequence[Bytes1D]) -> None:
        """Fill `into`, for each piece uint8 of shape [piece.length], writable.

        Raises WeightsError that names the file `path`, a page that is lost or damaged, and the nodes that do
        not answer. Then the contents of `into` are undefined, and nothing writes into them any more.
        """
        left = list(range(len(pieces)))
        damaged: list[int] = []
        problem, corrupt_before = "", self._client.counters.pages_corrupt
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_S)
                checked = self._client.check()
                problem = "".join(f"; {error}" for error in checked.values() if error is not None)
            left, damaged = self._read_some(left, pieces, into)
            if not left:
                return
        if damaged:
            # read wrong each time: it goes, so that the next push writes it
            self._client.remove([pieces[i].key for i in damaged])
        elif self._client.counters.pages_corrupt > corrupt_before:
            damaged = left  # the client has dropped it already
        if damaged:
            raise self._error(path, pieces, damaged, "damaged (its bytes do not match its digest)")
        raise self._error(path, pieces, left, f"not in the pool{problem}")

    def _read_some(
        self, places: Sequence[int], pieces: Sequence[Piece], into: Sequence[Bytes1D]
    ) -> tuple[list[int], list[int]]:
        """One attempt; (the places that were not read, those of them whose bytes were wrong)."""
        left: list[int] = []
        damaged: list[int] = []
        for stored in sorted({pieces[i].stored for i in places}):
            chosen = [i for i in places if pieces[i].stored == stored]
            pages = [_page_for(pieces[i], into[i]) for i in chosen]
            checksums = [NO_CHECKSUM] * len(chosen)
            keys = [pieces[i].key for i in chosen]
            found = self._client.get(keys, [[page] for page in pages], checksums=checksums)
            for i, page, there, checksum in zip(chosen, pages, found, checksums, strict=True):
                if not there:
                    left.append(i)
                elif not is_right(pieces[i], page, checksum):
                    left.append(i)
                    damaged.append(i)
                elif page is not into[i]:
                    into[i][:] = page[: pieces[i].length]
        return sorted(left), damaged

    def _error(self, path: str, pieces: Sequence[Piece], places: Sequence[int], what: str) -> WeightsError:
        key = pieces[places[0]].key.hex()[:16]
        page = f"page {key}" if len(places) == 1 else f"page {key} and {len(places) - 1} more"
        return WeightsError(
            f"{self.model}: {path}: {page} {'is' if len(places) == 1 else 'are'} {what}: push {self.model} "
            "again from its directory; only what is lacking is written"
        )


def _page_for(piece: Piece, into: Bytes1D) -> Bytes1D:
    """Where the whole page is read to: the place itself, where nothing of it is padding."""
    return into if piece.length == piece.stored else np.empty(piece.stored, np.uint8)
