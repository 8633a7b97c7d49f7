"""Each eviction policy against the plainest program that does the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.policies import make_policy
from pdserve.kvpool.policies import orders as lfu_module
from pdserve.kvpool.policies.base import Links
from pdserve.kvpool.policies.linked_list import NONE, Ghosts
from pdserve.kvpool.policies.orders import Ttl
from tests.support.suite.extended import examples

SLOTS = 12
TTL_S = 5.0


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


class Model:
    """Pages by slot, in the order of being committed; `order` says which goes first."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def insert(self, slot: int, k: int, now_s: float) -> None:
        self.slots.append(slot)

    def hit(self, slot: int) -> None:
        pass

    def evict(self, slot: int, k: int) -> None:
        self.remove(slot)

    def remove(self, slot: int) -> None:
        self.slots.remove(slot)

    def order(self) -> list[int]:
        return self.slots


class TtlModel(Model):
    """Sorted by the time that pages end at."""

    def __init__(self) -> None:
        super().__init__()
        self.inserted_s: dict[int, float] = {}

    def insert(self, slot: int, k: int, now_s: float) -> None:
        super().insert(slot, k, now_s)
        self.inserted_s[slot] = now_s

    def order(self) -> list[int]:
        return sorted(self.slots, key=lambda slot: self.inserted_s[slot])


class LruModel(Model):
    def hit(self, slot: int) -> None:
        self.slots.remove(slot)
        self.slots.append(slot)


class LfuModel(Model):
    """Counts, and the time of the last use; all counts are halved every so many uses."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: dict[int, tuple[int, int, int]] = {}  # slot: count, then what decides between equals
        self.uses = self.clock = 0

    def use(self, slot: int, count: int) -> None:
        self.clock += 1
        self.rank[slot] = (min(count, lfu_module.MAX_FREQUENCY), 0, self.clock)
        self.uses += 1
        if self.uses >= max(lfu_module.MIN_USES, lfu_module.WINDOW * len(self.slots)):
            self.uses = 0
            for place, held in enumerate(self.order()):
                # of counts that become equal the smaller one goes first, before any later use
                self.rank[held] = (self.rank[held][0] // 2, 0, place - len(self.slots) - (1 << 30))
            self.clock += 1

    def insert(self, slot: int, k: int, now_s: float) -> None:
        super().insert(slot, k, now_s)
        self.use(slot, 1)

    def hit(self, slot: int) -> None:
        self.use(slot, self.rank[slot][0] + 1)

    def remove(self, slot: int) -> None:
        super().remove(slot)
        del self.rank[slot]

    def order(self) -> list[int]:
        return sorted(self.slots, key=lambda slot: self.rank[slot])


class ArcModel(Model):
    """The paper's four lists, as lists."""

    def __init__(self) -> None:
        super().__init__()
        self.once: list[int] = []
        self.again: list[int] = []
        self.gone_once: list[int] = []  # keys
        self.gone_again: list[int] = []
        self.target = 0.0

    def trim(self, pages: int) -> None:
        while self.gone_once and len(self.once) + len(self.gone_once) > pages:
            self.gone_once.pop(0)
        total = len(self.once) + len(self.again)
        while self.gone_again and total + len(self.gone_once) + len(self.gone_again) > 2 * pages:
            self.gone_again.pop(0)

    def insert(self, slot: int, k: int, now_s: float) -> None:
        pages = len(self.once) + len(self.again) + 1
        b1, b2 = len(self.gone_once), len(self.gone_again)
        if k in self.gone_once:
            self.target = min(self.target + max(b2 / b1, 1), pages)
            self.gone_once.remove(k)
            self.again.append(slot)
        elif k in self.gone_again:
            self.target = max(self.target - max(b1 / b2, 1), 0)
            self.gone_again.remove(k)
            self.again.append(slot)
        else:
            self.once.append(slot)
        self.trim(pages)

    def hit(self, slot: int) -> None:
        self.remove_page(slot)
        self.again.append(slot)

    def remove_page(self, slot: int) -> None:
        (self.once if slot in self.once else self.again).remove(slot)

    def evict(self, slot: int, k: int) -> None:
        pages = len(self.once) + len(self.again)
        (self.gone_once if slot in self.once else self.gone_again).append(k)
        self.remove_page(slot)
        self.trim(pages)

    def remove(self, slot: int) -> None:
        self.remove_page(slot)
        self.trim(len(self.once) + len(self.again))

    def order(self) -> list[int]:
        once, again = list(self.once), list(self.again)
        found = []
        while once or again:
            from_once = once and (len(once) > self.target or not again)
            found.append((once if from_once else again).pop(0))
        return found


MODELS: dict[str, Callable[[], Model]] = {
    "arc": ArcModel,
    "fifo": Model,
    "lfu": LfuModel,
    "lru": LruModel,
    "ttl": TtlModel,
}


def came_of_first(model: Model) -> float:
    assert isinstance(model, TtlModel)
    return model.inserted_s[model.order()[0]]


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_the_order_of_eviction_is_the_models(name: str, data: st.DataObject) -> None:
    """A small cache in use: pages come and are read, the best victim goes when all slots are taken (or
    another one, where the best are pinned), and now and then a page is dropped.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lfu_module, "MIN_USES", 20)
        policy = make_policy(name, Links(SLOTS), ttl_s=TTL_S if name == "ttl" else None)
        model = MODELS[name]()
        slot_of: dict[int, int] = {}
        free = list(range(SLOTS))
        steps = st.tuples(st.sampled_from("uuuuuuuuud"), st.integers(0, 25), st.integers(0, 9))
        for now_s, (step, k, skip) in enumerate(data.draw(st.lists(steps, max_size=150))):
            if step == "d" and k in slot_of:
                slot = slot_of.pop(k)
                policy.on_remove(slot)
                model.remove(slot)
                free.append(slot)
            elif k in slot_of:
                policy.on_hit(slot_of[k], now_s)
                model.hit(slot_of[k])
            elif step == "u":
                if not free:
                    slot = list(policy.victims())[skip % 3 if skip < 3 else 0]
                    [gone] = [held for held, at in slot_of.items() if at == slot]
                    policy.on_evict(slot, key(gone))
                    model.evict(slot, gone)
                    del slot_of[gone]
                    free.append(slot)
                slot_of[k] = free.pop()
                # a page from another node may be older than what is here, for those it makes a difference to
                came_s = now_s - 0.37 * skip if name == "ttl" else now_s
                policy.on_insert(slot_of[k], key(k), came_s)
                model.insert(slot_of[k], k, came_s)
                if isinstance(policy, Ttl):
                    assert policy.next_end_s == came_of_first(model) + TTL_S
            assert list(policy.victims()) == model.order()


def test_ghosts_of_keys_that_begin_alike_do_not_make_one_long_chain() -> None:
    ghosts = Ghosts(1024)
    owner, forgotten = ghosts.new_owner(), ghosts.new_list()
    for n in range(1024):
        ghosts.add(owner, bytes(8) + n.to_bytes(24, "little"), 0, forgotten)
    longest = 0
    for ghost in ghosts._heads:
        length = 0
        while ghost != NONE:
            ghost, length = ghosts._next[ghost], length + 1
        longest = max(longest, length)
    assert longest < 20


def test_ttl_pages_end_in_order_and_a_read_does_not_renew_them() -> None:
    policy = Ttl(Links(SLOTS), TTL_S)
    for slot, now_s in ((3, 0.0), (1, 1.0), (2, 1.0)):
        policy.on_insert(slot, key(slot), now_s)
    policy.on_hit(3, 4.0)
    assert (list(policy.ended(4.9)), policy.next_end_s) == ([], 5.0)
    assert list(policy.ended(5.0)) == [3]
    assert list(policy.ended(6.0)) == [3, 1, 2]
    assert (policy.has_ended(1, 5.9), policy.has_ended(1, 6.0)) == (False, True)
    policy.on_remove(3)
    assert policy.next_end_s == 6.0
