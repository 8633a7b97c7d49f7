"""Which pages a node had and removed, when and why: for the question why a read was a miss. Pure.

A table of fixed size, one place for each fingerprint; a newer page takes the place of an older one. So what
it knows may be forgotten, and costs O(1) time and 17 bytes a place. A restart of the node forgets all.

Clients choose keys. So a fingerprint is Python's hash, which has a secret of the process: no client can aim
at a place, or make a key that is taken for another.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

MIN_PLACES: Final = 1 << 10
MAX_PLACES: Final = 1 << 20
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
_MASK: Final = (1 << 64) - 1


class Removal(NamedTuple):
    """`reason`: a place in index.REASONS. `removed_s`: a time of the node's clock."""

    reason: int
    removed_s: float


class RemovedPages:
    """The newest removal of each of the pages that were removed last, about as many as there are slots."""

    def __init__(self, slots: int) -> None:
        places = min(MAX_PLACES, max(MIN_PLACES, 1 << max(0, slots - 1).bit_length()))
        self._mask = places - 1
        self._fingerprint = array("Q", bytes(8 * places))
        self._reason = bytearray(places)
        self._removed_s = array("d", bytes(8 * places))

    def note(self, namespace: int, key: bytes, reason: int, now_s: float) -> None:
        """The page is removed now."""
        fingerprint = _fingerprint(namespace, key)
        place = fingerprint & self._mask
        self._fingerprint[place] = fingerprint
        self._reason[place] = reason
        self._removed_s[place] = now_s

    def find(self, namespace: int, key: bytes) -> Removal | None:
        """When the page was removed last, and why; None: never, or so long ago that it is forgotten."""
        fingerprint = _fingerprint(namespace, key)
        place = fingerprint & self._mask
        if self._fingerprint[place] != fingerprint:
            return None
        return Removal(self._reason[place], self._removed_s[place])


def _fingerprint(namespace: int, key: bytes) -> int:
    # 0 is an empty place
    return (hash(key) ^ (namespace + 1) * _SPREAD) & _MASK or 1
