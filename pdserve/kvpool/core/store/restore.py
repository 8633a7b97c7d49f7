"""A store takes over the pages that table_scan.py found: vectorised, a million in a second. Pure."""

from __future__ import annotations

from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.table_scan import TableContents
from pdserve.kvpool.core.store.victims import distinct, sorted_by
from pdserve.kvpool.protocol.slot_table import COMMITTED, QUARANTINED

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
