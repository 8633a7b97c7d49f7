"""Recounts a store, and asserts that every page and every byte is counted once. Slow: for tests. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pdserve.kvpool.core.store.index import Facts, NamespacePages
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.slot_table import COMMITTED, DOOMED, FREE, RESERVED, SWEEPING


def check(store: PageStore) -> None:
    """Raises AssertionError."""
    taken = [slot for slot, state in enumerate(store.states) if state != FREE]
    store.slots.check(taken)
    swept = _swept(store)
    counted = [0] * 6
    by_namespace: Counter[int] = Counter()
    for slot in taken:
        slot_bytes = store.slots.slot_bytes(slot)
        counted[store.states[slot]] += slot_bytes
        if slot not in swept:
            by_namespace[store.facts.namespace[slot]] += slot_bytes
    counted[FREE] = store.slots.capacity_bytes - sum(counted)
    assert counted == store.bytes_in_state
    assert store.slots.allocated_bytes == sum(counted[1:])
    assert counted[FREE] >= 0
    assert sorted(swept) == store.slots_in_state(SWEEPING)
    _check_index(store, taken)
    for slot in store.held:
        assert store.states[slot] in (COMMITTED, DOOMED)
    for slot in store.aside:
        assert slot in store.held
        assert store.states[slot] == COMMITTED
    assert all(slot in store.held for slot in taken if store.states[slot] == DOOMED)
    to_wipe = [slot for slot, wanted in enumerate(store.to_wipe) if wanted]
    assert len(to_wipe) == store.wiping
    assert all(store.states[slot] not in (FREE, COMMITTED) for slot in to_wipe)
    store.slab_use.check()
    for pages in store.index:
        assert pages.slot_bytes == by_namespace[pages.number]
        _check_orders(store, pages)
        _check_kin(store, pages)
    kept = [store.slots.slab_of(slot) for slot in _kept(store)]
    assert list(store.kept) == [kept.count(slab) for slab in range(store.slots.slabs)]


def _kept(store: PageStore) -> Iterator[int]:
    for pages in store.index:
        yield from pages.committed.values() if pages.is_kept else ()


def _swept(store: PageStore) -> set[int]:
    """All SWEEPING slots; each is in one sweep."""
    swept: set[int] = set()
    for sweep in store.sweeps:
        assert sweep.slot_of
        ordered = [slot for order in sweep.orders.values() for slot in order.victims()]
        assert sorted(ordered) == sorted(sweep.slot_of.values())
        for key, slot in sweep.slot_of.items():
            assert store.states[slot] == SWEEPING
            assert store.facts.key[slot] == key
            assert slot not in swept
            swept.add(slot)
    return swept


def _check_index(store: PageStore, taken: list[int]) -> None:
    indexed = dict(_indexed(store))
    pages = [slot for slot in taken if store.states[slot] in (RESERVED, COMMITTED)]
    assert sorted(indexed) == pages
    for slot, (state, namespace, key) in indexed.items():
        assert (store.states[slot], store.facts.namespace[slot]) == (state, namespace)
        assert store.facts.key[slot] == key


def _check_orders(store: PageStore, pages: NamespacePages) -> None:
    committed = sorted(pages.committed.values())
    ordered = [slot for order in pages.orders.values() for slot in order.victims()]
    assert sorted([*ordered, *store.aside.intersection(committed)]) == committed
    for slot_bytes, order in pages.orders.items():
        assert all(store.slots.slot_bytes(slot) == slot_bytes for slot in order.victims())
    if pages.expiry is not None:
        assert sorted(pages.expiry.victims()) == committed
        ends_s = [_end_s(store.facts, slot, pages.expiry.ttl_s) for slot in pages.expiry.victims()]
        assert ends_s == sorted(ends_s)


def _check_kin(store: PageStore, pages: NamespacePages) -> None:
    """Fewer parts of each page than `MAX_KIN` are taken for granted."""
    if pages.kin is not None:
        assert len(pages.kin) == len(pages.committed)
        assert all(slot in pages.kin.of(key) for key, slot in pages.committed.items())


def _end_s(facts: Facts, slot: int, ttl_s: float) -> float:
    return facts.committed_s[slot] + ttl_s


def _indexed(store: PageStore) -> Iterator[tuple[int, tuple[int, int, bytes]]]:
    for pages in store.index:
        assert not pages.committed.keys() & pages.writing.keys()
        assert pages.page_bytes == sum(store.facts.length_bytes[slot] for slot in pages.committed.values())
        for state, slots in ((COMMITTED, pages.committed), (RESERVED, pages.writing)):
            for key, slot in slots.items():
                yield slot, (state, pages.number, key)
