"""The part of a slot table that a restart keeps: a vectorised scan that validates every row. Pure.

A row is kept when all of this holds: its state is COMMITTED, its guard matches, its namespace exists, its
slab has the class of its length, its position lies in the slab, and no newer row has the same key. A row that
is RESERVED, or in an impossible state, is quarantined: its writer may be alive and writing into the slot. Any
other row that is not FREE is dropped. The pages' bytes are not read: readers check them.

`restore` has a store take over these pages: vectorised, a million in a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.room import distinct, sorted_by
from pdserve.kvpool.core.store.slot_allocator import SLOT_ALIGN_BYTES
from pdserve.kvpool.protocol.slot_table import (
    COMMITTED,
    FREE,
    QUARANTINED,
    ROW_DTYPE,
    TableLayout,
    guards_of,
    row_words,
)

Int64s = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]

BLOCK_ROWS: Final = 4096  # scanned at a time: with all temporaries they fit the CPU's cache
_FACTS: Final = ("space", "length_bytes", "checksum", "sequence", "committed_s")
_KEY_DTYPE: Final = np.dtype(
    {"names": ["key"], "formats": ["V32"], "offsets": [0], "itemsize": ROW_DTYPE.itemsize}
)


@dataclass(frozen=True, slots=True)
class TableContents:
    """The rows kept, by ascending slot, as columns of one length; and the other rows."""

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
    of each namespace by the space in its rows. Rows of other spaces are void.
    """
    classes = _valid_classes(layout, slab_class)
    known = np.array(sorted(namespaces), dtype=np.uint64)
    number_of = np.array([namespaces[space] for space in known.tolist()], dtype=np.uint32)
    blocks = [
        _scan_block(layout, classes, known, rows[first : first + BLOCK_ROWS], first)
        for first in range(0, layout.rows, BLOCK_ROWS)
    ]
    keys = list(chain.from_iterable(block.keys for block in blocks))
    slots, dropped, quarantined, words = (
        np.concatenate([getattr(block, name) for block in blocks])
        for name in ("slots", "dropped", "quarantined", "words")
    )
    facts = {name: np.concatenate([block.facts[name] for block in blocks]) for name in _FACTS}
    older = _repeated(words, facts, keys)
    if len(older):
        dropped = np.concatenate([dropped, slots[older]])
        slots = np.delete(slots, older)
        facts = {name: np.delete(column, older) for name, column in facts.items()}
        gone = set(older.tolist())
        keys = [key for at, key in enumerate(keys) if at not in gone]
    return TableContents(
        slab_class=classes.tolist(),
        slots=slots,
        keys=keys,
        namespaces=number_of[np.searchsorted(known, facts["space"])],
        lengths=facts["length_bytes"],
        checksums=facts["checksum"],
        sequences=facts["sequence"],
        committed_s=facts["committed_s"],
        quarantined=quarantined.tolist(),
        quarantined_namespaces=[namespaces.get(space, 0) for space in rows["space"][quarantined].tolist()],
        dropped=dropped.tolist(),
    )


class _Block(NamedTuple):
    """A block of rows, and the columns of those to keep: copied while the block is in the CPU's cache."""

    slots: Int64s
    keys: list[bytes]
    words: npt.NDArray[np.uint64]
    """The first of each key."""
    facts: dict[str, npt.NDArray[Any]]
    """By column, `_FACTS`."""
    dropped: Int64s
    quarantined: Int64s


def _scan_block(
    layout: TableLayout, classes: Int64s, known: npt.NDArray[np.uint64], rows: Rows, first: int
) -> _Block:
    """`rows` begin at slot `first`; `known` are the spaces of existing namespaces."""
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
    good &= np.isin(rows["space"], known)
    unfinished = fits & ~committed & (state != FREE)
    return _Block(
        slots[good],
        rows.view(_KEY_DTYPE)["key"][good].tolist(),
        row_words(rows)[:, 0][good],
        {name: rows[name][good] for name in _FACTS},
        slots[(state != FREE) & ~good & ~unfinished],
        slots[unfinished],
    )


def _valid_classes(layout: TableLayout, slab_class: npt.NDArray[np.uint64]) -> Int64s:
    """The slab classes; 0 for impossible ones."""
    valid = (slab_class >= layout.min_slot_bytes) & (slab_class <= layout.slab_bytes)
    valid &= slab_class % np.uint64(SLOT_ALIGN_BYTES) == 0
    return np.where(valid, slab_class, 0).astype(np.int64)


def _repeated(
    words: npt.NDArray[np.uint64], facts: Mapping[str, npt.NDArray[Any]], keys: Sequence[bytes]
) -> Int64s:
    """The places of pages whose key a newer page has. A sort by one word of the keys shows whether there can
    be any; almost always there is none.
    """
    ordered = np.sort(words)
    if not (ordered[1:] == ordered[:-1]).any():
        return np.zeros(0, np.int64)
    spaces = facts["space"].tolist()
    by_age = np.argsort(facts["sequence"], kind="stable").tolist()
    newest = {(spaces[at], keys[at]): at for at in by_age}
    kept = np.fromiter(newest.values(), np.int64, len(newest))
    return np.setdiff1d(np.arange(len(keys)), kept, assume_unique=True)


_NOBODY = 0  # the namespace of a quarantined slot is unknown


def restore(store: PageStore, contents: TableContents, now_s: float) -> None:
    """Fill an empty store. Quarantined slots have no key."""
    taken = np.sort(np.concatenate([contents.slots, np.array(contents.quarantined, dtype=np.int64)]))
    store.slots.restore(contents.slab_class, taken)
    store.residue.restore(contents.slots, contents.namespaces)
    facts, slots = store.facts, contents.slots
    by_age = sorted_by(contents.sequences, slots)
    np.frombuffer(facts.namespace, np.uint32)[slots] = contents.namespaces
    np.frombuffer(facts.namespace, np.uint32)[contents.quarantined] = contents.quarantined_namespaces
    np.frombuffer(facts.length_bytes, np.uint32)[slots] = contents.lengths
    np.frombuffer(facts.checksum, np.uint64)[slots] = contents.checksums
    np.frombuffer(facts.sequence, np.uint64)[slots] = contents.sequences
    np.frombuffer(facts.committed_s)[slots] = _not_later(contents.committed_s, now_s)
    np.frombuffer(facts.last_use, np.uint64)[by_age] = np.arange(1, len(slots) + 1)
    np.frombuffer(store.states, np.uint8)[slots] = COMMITTED
    np.frombuffer(store.states, np.uint8)[contents.quarantined] = QUARANTINED
    store.uses = len(slots)
    store.slab_use.restore(by_age // store.slots.slots_per_slab)
    _restore_keys(store, contents, by_age)
    quarantined_bytes = 0
    for slot, namespace in zip(contents.quarantined, contents.quarantined_namespaces, strict=True):
        slot_bytes = store.slots.slot_bytes(slot)
        quarantined_bytes += slot_bytes
        if namespace != _NOBODY:
            store.index.namespace(namespace).slot_bytes += slot_bytes
    used = store.slots.allocated_bytes - quarantined_bytes
    store.bytes_in_state[:] = [
        store.slots.capacity_bytes - used - quarantined_bytes,
        *(0, used, 0),  # RESERVED, COMMITTED, DOOMED
        quarantined_bytes,
        0,
    ]
    if len(slots):
        store.next_sequence = max(store.next_sequence, int(contents.sequences.max()) + 1)


def _restore_keys(store: PageStore, contents: TableContents, by_age: npt.NDArray[np.int64]) -> None:
    """Index, orders and sums of each namespace. `by_age`: all slots, oldest page first."""
    slots = contents.slots.tolist()
    _place(store.facts.key, contents.slots, contents.keys)
    classes = np.frombuffer(store.slots.slab_class, np.uint64)
    slot_bytes = classes[contents.slots // store.slots.slots_per_slab]
    owners = np.frombuffer(store.facts.namespace, np.uint32)[by_age]
    for namespace in distinct(contents.namespaces):
        mine = contents.namespaces == namespace
        pages = store.index.namespace(namespace)
        named = zip(contents.keys, slots, strict=True)
        pages.committed = dict(named if mine.all() else compress(named, mine.tolist()))
        if pages.kin is not None:
            for key, slot in pages.committed.items():
                pages.kin.add(key, slot)
        pages.page_bytes = int(contents.lengths[mine].sum())
        pages.slot_bytes = int(slot_bytes[mine].sum())
        store.reorder(pages, by_age[owners == namespace])


def _not_later(committed_s: npt.NDArray[np.float64], now_s: float) -> npt.NDArray[np.float64]:
    """Times of commit. A time later than now, or NaN, is of another boot: it becomes now."""
    return np.where(committed_s <= now_s, committed_s, now_s)


def _place(column: list[bytes | None], slots: npt.NDArray[np.int64], keys: list[bytes]) -> None:
    """`column[slot] = key` for each, in runs of neighbouring slots: most slots are neighbours."""
    firsts = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()
    for first, end in pairwise([*firsts, len(slots)]):
        slot = int(slots[first])
        column[slot : slot + end - first] = keys[first:end]
