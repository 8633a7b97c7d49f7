"""Parts of a page are evicted together: no part stays that nobody can use any more."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.core.events import PagesFound, StorePages
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import HIT
from pdserve.pages import KIN_BYTES, page_hashes, part_suffix, pool_key
from tests.support.kvpool.node_model import KIB, Node, commit
from tests.support.kvpool.table_model import LAYOUT, Table, following_table

WINDOWS = {"kv": 0, "swa": 2, "indexer": 0}
RANKS = (b"tp0/2", b"tp1/2")
LENGTHS = {"kv": 16 * KIB, "swa": 8 * KIB, "indexer": 4 * KIB}
DIGESTS = page_hashes(range(400), 4)
PARTS = "indexer:0,swa:2"


def keys_of(page: int, part: str) -> list[bytes]:
    """At both ranks."""
    return [pool_key(DIGESTS[page], part_suffix(rank, part, WINDOWS)) for rank in RANKS]


def all_keys(page: int) -> list[bytes]:
    return [key for part in WINDOWS for key in keys_of(page, part)]


class Parts:
    """A node with pages of three parts at two ranks; `evicted`: keys of a step."""

    def __init__(self, node: Node | None = None, **options: int) -> None:
        self.node = node or Node(**options)
        self.c = self.node.connect()
        self.ns = self.node.open(self.c, parts=PARTS)
        self.store = self.node.state.store
        self.evicted: list[bytes] = []
        self.store.on_evict = lambda slot: self.evicted.append(self.store.key_of(slot))

    @property
    def committed(self) -> dict[bytes, int]:
        return self.store.index.namespace(self.ns).committed

    def put(self, keys: Iterable[bytes], length: int) -> None:
        request = m.Reserve(self.node.next_id(), self.ns, list(keys), [length])
        grants = self.node.ask(self.c, request, m.Reserved).grants
        granted = [grant for grant in grants if grant.status == m.GRANTED]
        self.node.ask(self.c, commit(self.node.next_id(), *granted), m.Committed)

    def put_page(self, page: int, parts: Iterable[str] = ("swa", "indexer", "kv")) -> None:
        for part in parts:
            self.put(keys_of(page, part), LENGTHS[part])

    def get(self, keys: list[bytes], length: int, *, release: bool = True) -> None:
        request = m.Get(self.node.next_id(), self.ns, keys, [length])
        pins = [pin for pin in self.node.ask(self.c, request, m.Got).pins if pin.status == HIT]
        if release:
            self.node.release(self.c, *pins)

    def has(self, page: int, part: str) -> list[bool]:
        return [key in self.committed for key in keys_of(page, part)]


def test_a_window_takes_the_window_of_the_other_ranks_and_no_kv() -> None:
    parts = Parts(slabs=3, slab_bytes=32 * KIB)
    parts.put_page(0)
    parts.get(keys_of(0, "kv"), LENGTHS["kv"])
    parts.put([keys_of(1, "swa")[0]], LENGTHS["swa"])
    parts.put(keys_of(2, "swa"), LENGTHS["swa"])
    assert parts.has(0, "swa") == [False, False]
    assert parts.has(0, "kv") == parts.has(0, "indexer") == [True, True]


def test_a_page_that_a_tier_has_takes_nothing_with_it() -> None:
    parts = Parts(slabs=4, slab_bytes=32 * KIB)
    parts.put_page(0)
    parts.store.in_tier = lambda namespace, key: (namespace, key) == (parts.ns, keys_of(0, "kv")[0])
    slots = [parts.committed[key] for key in keys_of(0, "kv")]
    assert parts.store.kin_of(slots[:1]) == []
    assert sorted(parts.store.kin_of(slots[1:])) == sorted(
        parts.committed[key] for key in all_keys(0) if key != keys_of(0, "kv")[1]
    )


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "arc"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), quota=st.booleans())
def test_no_part_stays_that_nobody_can_use(policy: str, seed: int, quota: bool) -> None:
    """After each step, of what was evicted in it nothing is left but what the step itself wrote."""
    dice = random.Random(seed)
    parts = Parts(slabs=6, slab_bytes=32 * KIB)
    limit = 100 * KIB if quota else None
    parts.store.configure_namespace(parts.ns, policy=policy, quota_bytes=limit)
    for _ in range(60):
        page, part = dice.randrange(8), dice.choice(list(WINDOWS))
        keys = keys_of(page, part)[: dice.choice([1, 2, 2])]
        parts.evicted.clear()
        if dice.random() < 0.6:
            parts.put(keys, LENGTHS[part])
        else:
            parts.get(keys, LENGTHS[part], release=dice.random() < 0.9)
            keys = []
        for gone in parts.evicted:
            left = [one for one in parts.committed if one[:KIN_BYTES] == gone[:KIN_BYTES] and one not in keys]
            group = gone[KIN_BYTES]
            assert [one for one in left if not group or one[KIN_BYTES] == group] == []
        if dice.random() < 0.1:
            parts.node.pass_time(60)  # leases end
        parts.node.state.check()


def test_kin_is_known_again_after_a_restart() -> None:
    table = Table()
    parts = Parts(following_table(table))
    parts.put_page(0)
    slots = SlotAllocator(LAYOUT.arena_bytes, LAYOUT.slab_bytes, LAYOUT.min_slot_bytes)
    store = PageStore(slots, 10_000)
    state = NodeState("n0", 2, store, Limits(), 0.0, Namespaces.load(table.namespaces))
    state.restore(table.scan(), 0.0)
    state.check()
    kv = store.find(parts.ns, keys_of(0, "kv")[0])
    assert len(store.kin_of([kv])) == 5


def test_a_page_sinks_into_a_tier_with_its_parts() -> None:
    tier = TierSpec("ssd:/a", "ssd", 1 << 30)
    limits = TieringLimits(watermark=0.0, store_pages=6)
    parts = Parts(Node(slabs=64, slab_bytes=32 * KIB, tiers=[tier], tiering=limits))
    for page in (0, 1):
        parts.put_page(page, ["kv", "swa", "indexer"])
    [stored] = [one for one in parts.node.do(PagesFound(0, (), 0, last=True)) if isinstance(one, StorePages)]
    assert {one.page.key for one in stored.pages} == set(all_keys(0))
