"""A record as pages of the pool, and the records that a worker has at hand. Pure.

    page 0      magic, 8 bytes | number of tokens, u32 | 4 bytes | tokens, u32 each ...
    page 1 ...  tokens, u32 each ...

All numbers are little-endian. All pages have one size, since a reader must know it. The first page's key is
the record's.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

PAGE_BYTES: Final = 16 * 1024 - 16
"""A tag of 16 bytes may come behind (`pool.page_key`), and slots are 16 KiB at least."""
MAX_PAGES: Final = 16
_MAGIC: Final = b"pdturn\0\1"
_HEAD: Final = struct.Struct("<8sI4x")
FIRST_TOKENS: Final = (PAGE_BYTES - _HEAD.size) // 4
MAX_TOKENS: Final = FIRST_TOKENS + (MAX_PAGES - 1) * (PAGE_BYTES // 4)
"""An answer of more is not recorded."""

Page = npt.NDArray[np.uint8]


def page_keys(key: bytes, count: int) -> list[bytes]:
    """The keys of a record's first `count` pages, 32 bytes each."""
    return [
        key if number == 0 else hashlib.sha256(b"pdserve turn page" + key + bytes([number])).digest()
        for number in range(count)
    ]


def pages_of(tokens: int) -> int:
    """The number of pages of a record."""
    return -(-(_HEAD.size + 4 * tokens) // PAGE_BYTES)


def to_pages(ids: Sequence[int]) -> list[Page]:
    """Pages, each uint8, shape [PAGE_BYTES]. Raises ValueError for no tokens, or more than `MAX_TOKENS`."""
    if not 0 < len(ids) <= MAX_TOKENS:
        raise ValueError(f"a record has 1 to {MAX_TOKENS} tokens, not {len(ids)}")
    data = _HEAD.pack(_MAGIC, len(ids)) + np.asarray(ids, "<u4").tobytes()
    count = pages_of(len(ids))
    whole = np.zeros(count * PAGE_BYTES, np.uint8)
    whole[: len(data)] = np.frombuffer(data, np.uint8)
    return list(whole.reshape(count, PAGE_BYTES))


def page_count(first: Page) -> int:
    """The number of a record's pages by its first one; 0: it is no record."""
    magic, tokens = _HEAD.unpack_from(first.data)
    if magic != _MAGIC or not 0 < tokens <= MAX_TOKENS:
        return 0
    return pages_of(int(tokens))


def from_pages(pages: Sequence[Page]) -> list[int]:
    """The tokens. `pages`: as many as `page_count` says of the first."""
    _, tokens = _HEAD.unpack_from(pages[0].data)
    data = np.concatenate(pages)[_HEAD.size : _HEAD.size + 4 * tokens]
    return [int(token) for token in data.view("<u4")]


MEMORY_BYTES: Final = 64 * 1024 * 1024
"""Of a worker; other records are in the pool."""
ENTRY_BYTES: Final = 256
"""Of one record, beside its tokens."""


class Memory:
    """The records of this worker's own answers, and those that it has read: at most `capacity_bytes`. What
    was unused for the longest time goes first.
    """

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

    def clear(self) -> None:
        """Forget all."""
        self._records.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        if (old := self._records.pop(key, None)) is not None:
            self.size_bytes -= _size_bytes(old)


def _size_bytes(ids: array[int]) -> int:
    return ENTRY_BYTES + len(ids) * ids.itemsize
