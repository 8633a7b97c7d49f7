"""What a slot table found at start still says: a vectorised scan that believes no row without proof. Pure.

A row is kept when all of it holds: it says COMMITTED, its guard matches, its namespace exists, its slab's
class is the class of its length, its position lies in the slab, and no newer row has the same key. A row that
says RESERVED (or something impossible) is quarantined: its writer may be alive and writing into the slot. Any
other row that is not free is dropped, alone. The pages' bytes are not read: readers check them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.slots import SLOT_ALIGN_BYTES
from pdserve.kvpool.table import COMMITTED, FREE, ROW_DTYPE, TableLayout, guards_of, row_words

Int64s = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]

BLOCK_ROWS: Final = 4096  # scanned at a time: with all temporaries they fit the CPU's cache
_KEY_DTYPE: Final = np.dtype(
    {"names": ["key"], "formats": ["V32"], "offsets": [0], "itemsize": ROW_DTYPE.itemsize}
)


@dataclass(frozen=True, slots=True)
class TableContents:
    """The rows kept, by ascending slot, as columns of one length; and what became of the others."""

    slab_class: list[int]
    slots: Int64s
    keys: list[bytes]
    namespaces: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    sequences: npt.NDArray[np.uint64]
    committed_s: npt.NDArray[np.float64]
    quarantined: list[int] = field(default_factory=list)
    quarantined_namespaces: list[int] = field(default_factory=list)  # of each; 0 where unknown
    dropped: list[int] = field(default_factory=list)


def scan(
    layout: TableLayout,
    slab_class: npt.NDArray[np.uint64],
    rows: Rows,
    namespaces: Mapping[int, int],
) -> TableContents:
    """Read `rows` of shape [layout.rows] and `slab_class` of shape [layout.slabs]. `namespaces`: the number
    of the namespace by the number that its rows carry (its space); other rows belong to nobody.
    """
    classes = _valid_classes(layout, slab_class)
    known = np.array(sorted(namespaces), dtype=np.uint32)
    number_of = np.array([namespaces[space] for space in known.tolist()], dtype=np.uint32)
    blocks = [
        _scan_block(layout, classes, rows[first : first + BLOCK_ROWS], first)
        for first in range(0, layout.rows, BLOCK_ROWS)
    ]
    good, dropped, quarantined = (np.concatenate(found) for found in zip(*blocks, strict=True))
    owned = np.isin(rows["namespace"][good], known)
    slots, older = _without_duplicates(rows, good[owned])
    return TableContents(
        slab_class=classes.tolist(),
        slots=slots,
        keys=_keys(rows, slots),
        namespaces=number_of[np.searchsorted(known, rows["namespace"][slots])],
        lengths=rows["length_bytes"][slots],
        checksums=rows["checksum"][slots],
        sequences=rows["sequence"][slots],
        committed_s=rows["committed_s"][slots],
        quarantined=quarantined.tolist(),
        quarantined_namespaces=[
            namespaces.get(space, 0) for space in rows["namespace"][quarantined].tolist()
        ],
        dropped=[*dropped.tolist(), *good[~owned].tolist(), *older.tolist()],
    )


def _scan_block(
    layout: TableLayout, classes: Int64s, rows: Rows, first: int
) -> tuple[Int64s, Int64s, Int64s]:
    """The slots to keep, whoever's they are, to drop, to quarantine among `rows`, which begin at slot
    `first`.
    """
    state = rows["state"].copy()
    slots = np.arange(first, first + len(rows))
    slab = slots // layout.slots_per_slab
    slot_bytes = classes[slab]
    fits = slots - slab * layout.slots_per_slab < (layout.slab_bytes // np.maximum(classes, 1))[slab]
    fits &= slot_bytes > 0
    committed = state == COMMITTED
    length = np.minimum(rows["length_bytes"], np.uint64(layout.slab_bytes + 1)).astype(np.int64)
    rounded = (length + (SLOT_ALIGN_BYTES - 1)) // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES
    good = committed & fits & (length > 0)
    good &= np.maximum(rounded, layout.min_slot_bytes) == slot_bytes
    good &= rows["guard"] == guards_of(row_words(rows))
    unfinished = fits & ~committed & (state != FREE)
    bad = (state != FREE) & ~good & ~unfinished
    return slots[good], slots[bad], slots[unfinished]


def _valid_classes(layout: TableLayout, slab_class: npt.NDArray[np.uint64]) -> Int64s:
    """The slab classes, 0 where one is impossible."""
    valid = (slab_class >= layout.min_slot_bytes) & (slab_class <= layout.slab_bytes)
    valid &= slab_class % np.uint64(SLOT_ALIGN_BYTES) == 0
    return np.where(valid, slab_class, 0).astype(np.int64)


def _without_duplicates(rows: Rows, slots: Int64s) -> tuple[Int64s, Int64s]:
    """`slots` without those whose key a newer one has, and those. Sorting one word of the keys finds whether
    there can be any; almost always there is none.
    """
    words = np.sort(row_words(rows)[:, 0][slots])
    if not (words[1:] == words[:-1]).any():
        return slots, slots[:0]
    by_age = slots[np.argsort(rows["sequence"][slots], kind="stable")]
    names = zip(rows["namespace"][by_age].tolist(), _keys(rows, by_age), strict=True)
    newest = dict(zip(names, by_age.tolist(), strict=True))
    kept = np.sort(np.fromiter(newest.values(), np.int64, len(newest)))
    return kept, np.setdiff1d(slots, kept, assume_unique=True)


def _keys(rows: Rows, slots: Int64s) -> list[bytes]:
    """The keys of these slots."""
    keys: list[bytes] = rows.view(_KEY_DTYPE)["key"][slots].tolist()
    return keys
