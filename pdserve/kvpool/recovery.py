"""What a slot table found at start still says: a vectorised scan that believes no row without proof. Pure.

A row is kept when all of it holds: it says COMMITTED, its guard matches, its namespace exists, its slab's
class is the class of its length, its position lies in the slab, and no newer row has the same key. A row that
says RESERVED (or something impossible) is quarantined: its writer may be alive and writing into the slot. Any
other row that is not free is dropped, alone. The pages' bytes are not read: readers check them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.slots import SLOT_ALIGN_BYTES
from pdserve.kvpool.table import COMMITTED, FREE, TableLayout, row_guard

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableContents:
    """The rows kept, oldest first (by sequence), as columns of one length; and what became of the others."""

    slab_class: list[int]
    slots: Int64s
    keys: list[bytes]
    namespaces: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]
    sequences: npt.NDArray[np.uint64]
    quarantined: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


def scan(
    layout: TableLayout,
    slab_class: npt.NDArray[np.uint64],
    rows: npt.NDArray[np.void],
    known_namespaces: Collection[int],
) -> TableContents:
    """Read `rows` of shape [layout.rows] and `slab_class` of shape [layout.slabs]."""
    taken = np.flatnonzero(rows["state"] != FREE)
    # column by column: the rows themselves are 96 bytes apart, and moving whole ones costs several times more
    state, namespace, length, sequence = (
        rows[name][taken] for name in ("state", "namespace", "length_bytes", "sequence")
    )
    classes = _valid_classes(layout, slab_class)
    slab = taken // layout.slots_per_slab
    slot_bytes = classes[slab]
    position = taken - slab * layout.slots_per_slab
    fits = (slot_bytes > 0) & (position < layout.slab_bytes // np.maximum(slot_bytes, 1))
    committed = state == COMMITTED
    bounded = np.minimum(length, np.uint64(layout.slab_bytes + 1)).astype(np.int64)
    rounded = -(-bounded // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    good = committed & fits & (bounded > 0)
    good &= np.maximum(rounded, layout.min_slot_bytes) == slot_bytes
    good &= np.isin(namespace, np.fromiter(known_namespaces, np.uint32, len(known_namespaces)))
    good &= (rows["guard"] == row_guard(rows))[taken]
    kept = np.flatnonzero(good)
    kept = kept[np.argsort(sequence[kept], kind="stable")]
    kept, older = _without_duplicates(rows["key"], namespace, taken, kept)
    slots = taken[kept]
    return TableContents(
        slab_class=classes.tolist(),
        slots=slots,
        keys=_keys(rows["key"][slots]),
        namespaces=namespace[kept],
        lengths=length[kept],
        checksums=rows["checksum"][slots],
        sequences=sequence[kept],
        quarantined=taken[~committed & fits].tolist(),
        dropped=np.concatenate([taken[committed & ~good], taken[~committed & ~fits], taken[older]]).tolist(),
    )


def _valid_classes(layout: TableLayout, slab_class: npt.NDArray[np.uint64]) -> Int64s:
    """The slab classes, 0 where one is impossible."""
    valid = (slab_class >= layout.min_slot_bytes) & (slab_class <= layout.slab_bytes)
    valid &= slab_class % np.uint64(SLOT_ALIGN_BYTES) == 0
    return np.where(valid, slab_class, 0).astype(np.int64)


def _without_duplicates(
    keys: npt.NDArray[np.uint64], namespace: npt.NDArray[np.uint32], taken: Int64s, kept: Int64s
) -> tuple[Int64s, Int64s]:
    """`kept` (oldest first) without those whose key a newer one has, and those. Sorting one word finds
    whether there can be any; almost always there is none.
    """
    words = np.sort(keys[taken[kept], 0])
    if not (words[1:] == words[:-1]).any():
        return kept, kept[:0]
    names = zip(namespace[kept].tolist(), _keys(keys[taken[kept]]), strict=True)
    newest = {name: place for place, name in enumerate(names)}
    keep = np.zeros(len(kept), dtype=bool)
    keep[list(newest.values())] = True
    return kept[keep], kept[~keep]


def _keys(words: npt.NDArray[np.uint64]) -> list[bytes]:
    """Key words of shape [n, 4] as bytes."""
    keys: Sequence[bytes] = np.ascontiguousarray(words).view("V32").ravel().tolist()
    return list(keys)
