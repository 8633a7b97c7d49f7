"""The records that a worker has at hand: those of its own answers, and those that it has read. Pure."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

MEMORY_BYTES: Final = 64 * 1024 * 1024
"""Of a worker; other records are in the pool."""
ENTRY_BYTES: Final = 256
"""Of one record, beside its tokens."""


class Memory:
    """At most `capacity_bytes`; what was unused for the longest time goes first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._records: OrderedDict[bytes, array[int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: bytes) -> Sequence[int] | None:
        """The tokens under a key."""
        found = self._records.get(key)
        if found is not None:
            self._records.move_to_end(key)
        return found

    def put(self, key: bytes, ids: Sequence[int]) -> None:
        """Keep these tokens. A record that is larger than all room is not kept."""
        kept = array("I", ids)
        self._drop(key)
        if _size_bytes(kept) > self._capacity_bytes:
            return
        self._records[key] = kept
        self.size_bytes += _size_bytes(kept)
        while self.size_bytes > self._capacity_bytes:
            self._drop(next(iter(self._records)))

    def _drop(self, key: bytes) -> None:
        if (old := self._records.pop(key, None)) is not None:
            self.size_bytes -= _size_bytes(old)


def _size_bytes(ids: array[int]) -> int:
    return ENTRY_BYTES + len(ids) * ids.itemsize
