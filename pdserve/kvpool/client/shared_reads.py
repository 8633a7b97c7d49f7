"""Reads that clients of one host share: each page comes over the network once, the others copy it.

Ranks that hold the same bytes read the same pages at the same time (mover/ranks/). A client takes what
another one reads, and reads the rest itself. It says what it reads, so that others can take that.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Protocol

from pdserve.kvpool.client import operations
from pdserve.kvpool.client.connection_pool import OpenConnection
from pdserve.kvpool.client.operations import PagesRead, Proof, Tally
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.protocol.page_tag import PageTags


class SharedReads(Protocol):
    """The other clients of this host. No call raises."""

    def take(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[Proof | None]:
        """Copy pages that another client reads or has just read into the buffers, and check the copies.

        Returns the proof of each copied page, and None for those that this client must read. Waits while
        another client reads them, so long that at least half of the time until `deadline_s` is left.
        """
        ...

    def begin(self, keys: Sequence[bytes]) -> None:
        """This client begins to read these pages."""
        ...

    def end(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], proofs: Sequence[Proof | None]
    ) -> None:
        """The pages are in these buffers now. None: this one is not."""
        ...


def read_shared(
    opened: OpenConnection,
    keys: list[bytes],
    pages: list[PageBuffers],
    deadline_s: float,
    tally: Tally,
    tags: PageTags | None,
    share: SharedReads,
) -> PagesRead:
    """As `operations.read`, without the pages that another client of this host reads. Raises PoolError."""
    proofs = [
        proof if proof is not None and _is_right(tags, key, page, proof) else None
        for key, page, proof in zip(keys, pages, share.take(keys, pages, deadline_s), strict=True)
    ]
    left = [i for i, proof in enumerate(proofs) if proof is None]
    by_us = [False] * len(keys)
    if left:
        own_keys, own_pages = [keys[i] for i in left], [pages[i] for i in left]
        own: list[Proof | None] = [None] * len(left)
        share.begin(own_keys)
        try:
            read = operations.read(opened, own_keys, own_pages, deadline_s, tally, tags)
            own = read.proofs
        finally:
            share.end(own_keys, own_pages, own)
        for i, proof in zip(left, read.proofs, strict=True):
            proofs[i], by_us[i] = proof, True
    return PagesRead(proofs, by_us)


def _is_right(tags: PageTags | None, key: bytes, page: PageBuffers, proof: Proof) -> bool:
    """Whether the copy has the tag that the page key gives. Without a page key its checksum was enough."""
    return tags is None or hmac.compare_digest(tags.tag(key, page), proof.trailer)
