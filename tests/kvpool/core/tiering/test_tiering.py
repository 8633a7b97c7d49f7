"""Pages that go down to tiers and come up again, scenario by scenario."""

from __future__ import annotations

import pytest

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.durable_answers import SAVE_TIMEOUT_S
from pdserve.kvpool.core.tiering.tier_index import LATE_LOADS, TierSpec
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings, ReplaceNamespace
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    READ_FAILED,
    REFUSED,
    STORED,
    WRITE_FAILED,
    TierPage,
)
from tests.support.kvpool.node_model import KIB, answers, commit, key, statuses
from tests.support.kvpool.tier_rig import FAR, SSD, Rig


def test_cold_pages_are_stored_and_then_evicted_for_nothing() -> None:
    rig = Rig()
    rig.sink(1, 2, 3)
    assert rig.node.exists(rig.c, rig.ns, 1, 2, 3, 4) == [1, 1, 1, 0]
    assert rig.put(2) == [m.PRESENT]
    [tier] = rig.node.status().tiers
    assert tier.counters["stored"] >= 3
    [told] = rig.node.status().namespaces
    assert told.tier_pages == tier.pages >= 3
    assert told.tier_bytes == tier.pages * 4 * KIB


def test_what_no_page_fits_into_is_not_free_to_a_tier() -> None:
    """A page of 12 KiB leaves a quarter of each slab of 16 KiB: memory is full though so much is free."""
    rig = Rig(watermark=0.8)
    rig.put(1, 2, length=12 * KIB)
    assert rig.writes[0] == []
    rig.put(3, 4, length=12 * KIB)
    assert rig.node.status().free_bytes == 16 * KIB
    rig.drain()
    rig.put(5, length=12 * KIB)
    assert rig.node.exists(rig.c, rig.ns, 1, 2, 3, 4, 5) == [1] * 5


def test_pages_evicted_before_they_could_be_stored_are_counted() -> None:
    rig = Rig(store_pages=2)
    rig.put(*range(16))
    rig.commits()
    assert rig.put(*range(16, 24)) == [m.GRANTED] * 8, "a slow tier slows no writer"
    assert rig.counter("evicted_unwritten") == 8
    [store] = rig.writes[0]
    assert isinstance(store, ev.StorePages)
    assert len(store.pages) == 2
    rig.drain()


def test_a_get_is_answered_after_the_page_came_up() -> None:
    rig = Rig()
    rig.sink(1, 2)
    rig.put(3)
    assert rig.ask(1, 3, 2, 99) == []
    actions = rig.load()
    assert rig.replies(actions) == [[m.HIT, m.HIT, m.HIT, m.MISS]]
    assert [sorted(got.below) for got in answers(actions, rig.c) if isinstance(got, m.Got)] == [[0, 2]]
    actions = rig.node.send(rig.c, m.Get(rig.node.next_id(), rig.ns, [key(1)], [4 * KIB]))
    assert rig.replies(actions) == [[m.HIT]]
    assert [got.below for got in answers(actions, rig.c) if isinstance(got, m.Got)] == [[]]
    assert rig.counter("promoted") == 2


def test_what_a_tier_that_hangs_cannot_give_is_not_said_to_be_there_and_can_be_stored_again() -> None:
    rig = Rig(promotion_timeout_s=1.0)
    rig.sink(1, 2)
    assert rig.ask(1) == []
    wait = m.Wait(rig.node.next_id(), rig.ns, [key(1)], 5.0)
    assert rig.replies(rig.node.pass_time(1.1)) == [[m.MISS]]
    assert rig.node.exists(rig.c, rig.ns, 1, 2) == [0, 1]
    assert answers(rig.node.send(rig.c, wait), rig.c) == [], "it is waited for"
    again = rig.node.reserve(rig.c, rig.ns, 1)
    assert statuses(again) == [m.GRANTED]
    rig.contents[again[0].slot] = (rig.space, key(1))
    told = answers(rig.node.send(rig.c, commit(rig.node.next_id(), *again)), rig.c)
    assert told[0] == m.Present(wait.id, b"\x01")
    assert rig.ask(1) == [[m.HIT]]
    rig.load()  # the tier is back: what it read goes to nobody
    assert rig.ask(1) == [[m.HIT]]
    rig.drain()
    assert rig.node.exists(rig.c, rig.ns, 1) == [1]


def test_a_late_page_that_another_tier_has_too_is_read_from_there() -> None:
    rig = Rig(SSD, FAR, promotion_timeout_s=1.0)
    rig.sink(1)
    page = rig.disks[0][rig.space, key(1)]
    rig.disks[1][page.space, page.key] = page
    rig.node.do(ev.PagesFound(1, (page,), 0))
    assert rig.ask(1) == []
    rig.node.pass_time(1.1)
    assert rig.node.exists(rig.c, rig.ns, 1) == [1]
    assert rig.ask(1) == []
    assert [load.tier for load in rig.loads] == [0, 1]
    assert rig.replies(rig.load(1)) == [[m.HIT]]
    rig.load(0)


def test_a_tier_that_is_late_again_and_again_has_nothing_until_it_answers() -> None:
    rig = Rig(promotion_timeout_s=1.0)
    there = list(range(LATE_LOADS + 3))
    rig.sink(*there)
    for k in there[:LATE_LOADS]:
        assert rig.ask(k) == []
    rig.node.pass_time(1.1)
    [tier] = rig.node.status().tiers
    assert (tier.writable, tier.counters["stalls"]) == (False, 1)
    assert rig.node.exists(rig.c, rig.ns, *there) == [0] * len(there)
    assert rig.ask(there[-1]) == [[m.MISS]], "at once"
    assert rig.put(there[-1]) == [m.GRANTED]
    rig.load()
    assert rig.node.exists(rig.c, rig.ns, *there[LATE_LOADS:]) == [1] * len(there[LATE_LOADS:])
    [tier] = rig.node.status().tiers
    assert tier.writable


def test_a_tier_whose_late_loads_leave_no_room_for_others_has_nothing_until_it_answers() -> None:
    rig = Rig(promotion_timeout_s=1.0, load_bytes=8 * KIB)
    rig.sink(1, 2, 3)
    assert rig.ask(1, 2) == []
    rig.node.pass_time(1.1)
    assert rig.ask(3) == [[m.MISS]]
    assert rig.node.exists(rig.c, rig.ns, 3) == [0]
    assert rig.put(3) == [m.GRANTED]


def test_a_page_that_one_read_waited_for_in_vain_delays_no_other() -> None:
    rig = Rig(promotion_timeout_s=1.0)
    rig.sink(1, 2)
    other = rig.node.connect()
    assert rig.ask(1) == []
    rig.node.pass_time(0.6)
    assert rig.ask(1, 1, c=other) == []
    assert rig.replies(rig.node.pass_time(0.6)) == [[m.MISS]]
    assert rig.ask(1) == [[m.MISS]]
    assert rig.ask(2) == []  # that one may be in time
    rig.node.disconnect(other)
    waiting = [load.waiting for load in rig.node.state.tiers._promotions._loads.values()]
    assert [len(gets) for gets in waiting] == [0, 1]
    rig.load()
    assert rig.replies(rig.load()) == [[m.HIT]]
    assert rig.ask(1) == [[m.HIT]]


@pytest.mark.parametrize("status", [CORRUPT, READ_FAILED])
def test_a_corrupt_page_is_a_miss_and_forgotten(status: int) -> None:
    rig = Rig()
    rig.sink(1)
    rig.ask(1)
    assert rig.replies(rig.load(status=status)) == [[m.MISS]]
    assert rig.node.exists(rig.c, rig.ns, 1) == [0]
    rig.drain()
    assert (rig.space, key(1)) not in rig.disks[0]
    assert rig.put(1) == [m.GRANTED]


def test_memory_full_of_pinned_pages_makes_a_get_miss() -> None:
    rig = Rig()
    rig.sink(1)
    held = [k for k in range(1000, 1020) if rig.node.state.store.find(rig.ns, key(k)) >= 0]
    assert rig.ask(*held) == [[m.HIT] * 16]
    assert rig.ask(1) == [[m.MISS]]
    assert rig.counter("promotions_refused") == 1


VOIDING = {
    "clear": lambda rig: m.Clear(77, rig.ns),
    "drop": lambda rig: m.DropNamespace(77, "ns"),
    "replace": lambda rig: ReplaceNamespace(77, "ns", "new"),
}


@pytest.mark.parametrize("how", sorted(VOIDING))
def test_pages_are_said_to_be_gone_once_the_list_that_says_so_is_durable(how: str) -> None:
    rig = Rig(SSD, FAR)
    rig.sink(1, 2)
    before = len(rig.saves)
    assert answers(rig.node.send(rig.c, VOIDING[how](rig)), rig.c) == []
    assert len(rig.saves) > before
    rig.drain()
    assert answers(rig.node.actions, rig.c) == []
    [done] = answers(rig.save(), rig.c)
    assert isinstance(done, m.Done)
    assert done.id == 77
    assert done.count >= 2
    assert rig.node.pass_time(SAVE_TIMEOUT_S) == []


@pytest.mark.parametrize("why", ["failed", "late"])
@pytest.mark.parametrize("how", sorted(VOIDING))
def test_what_could_not_be_made_durable_is_an_error_until_it_is(how: str, why: str) -> None:
    rig = Rig(SSD, FAR)
    rig.sink(1)
    request = VOIDING[how](rig)
    for _ in range(2):
        assert answers(rig.node.send(rig.c, request), rig.c) == []
        if why == "failed":
            [fault] = answers(rig.save("the disk is full"), rig.c)
        else:
            assert rig.node.state.next_deadline_s <= rig.node.now_s + SAVE_TIMEOUT_S
            [fault] = answers(rig.node.pass_time(SAVE_TIMEOUT_S), rig.c)
        assert isinstance(fault, m.Fault)
        assert (fault.id, fault.code) == (77, "not_durable")
        assert ("the disk is full" if why == "failed" else "did not answer") in fault.message
    attempts = len(rig.saves)
    assert answers(rig.node.send(rig.c, request), rig.c) == []
    assert len(rig.saves) > attempts or why == "late", "asking again tries again"
    [done] = answers(rig.save(), rig.c)
    assert isinstance(done, m.Done)
    if how == "drop":
        assert isinstance(answers(rig.node.send(rig.c, request), rig.c)[0], m.Done), "it is durable by now"


def test_a_tier_that_cannot_write_is_left_alone_for_a_while() -> None:
    rig = Rig(TierSpec("ssd:/a", "ssd", 1 << 30, write="all"))
    rig.put(1)
    rig.write(status=WRITE_FAILED)
    rig.put(2, 3)
    assert rig.writes == [[]]
    [tier] = rig.node.status().tiers
    assert (tier.writable, tier.counters["store_failed"]) == (False, 1)
    assert rig.node.state.next_deadline_s <= rig.node.now_s + 1.0
    rig.node.pass_time(1.0)
    rig.write(status=WRITE_FAILED)
    rig.put(4)
    rig.node.pass_time(1.0)
    assert rig.writes == [[]], "twice as long"
    rig.node.pass_time(1.0)
    rig.drain()
    [tier] = rig.node.status().tiers
    assert tier.writable


@pytest.mark.parametrize("second", [WRITE_FAILED, STORED])
def test_stores_that_fail_together_are_one_failure_and_one_that_succeeds_ends_the_pause(second: int) -> None:
    rig = Rig(TierSpec("ssd:/a", "ssd", 1 << 30, write="all"))
    rig.put(1)
    rig.put(2)
    rig.write(status=WRITE_FAILED)
    rig.write(status=second)
    if second == WRITE_FAILED:
        rig.node.pass_time(1.0)
    rig.drain()
    assert {k for _, k in rig.disks[0]} == {key(1), key(2)}


def test_a_tier_that_cannot_be_written_for_days_is_tried_every_minute() -> None:
    rig = Rig(TierSpec("ssd:/a", "ssd", 1 << 30, write="all"))
    rig.put(1)
    for _ in range(1500):
        rig.write(status=WRITE_FAILED)
        rig.node.pass_time(60.0)
    rig.drain()
    [tier] = rig.node.status().tiers
    assert (tier.writable, tier.pages) == (True, 1)


def test_a_tier_that_cannot_write_what_comes_down_to_it_says_so_until_it_can() -> None:
    rig = Rig(SSD, FAR)
    page = TierPage(rig.space, key(1), 4 * KIB, 0, rig.node.state.store.next_sequence)
    rig.node.do(ev.PagesFound(1, (), 0, failed=3))
    [above, below] = rig.node.status().tiers
    assert (above.writable, below.writable, below.counters["store_failed"]) == (True, False, 3)
    rig.node.do(ev.PagesFound(1, (page,), 0))
    [_, below] = rig.node.status().tiers
    assert (below.writable, below.pages, below.counters["store_failed"]) == (True, 1, 3)


def test_a_page_that_no_tier_takes_is_offered_once() -> None:
    rig = Rig(TierSpec("ssd:/a", "ssd", 1 << 30, write="all"))
    rig.put(1, length=8 * KIB)
    rig.write(status=REFUSED)
    rig.put(2, length=12 * KIB)
    rig.commits()
    assert rig.writes == [[]]
    rig.put(3)
    assert len(rig.writes[0]) == 1


def test_media_decide_where_a_page_goes() -> None:
    rig = Rig()
    wanted = NamespaceSettings()
    tiering = rig.node.state.tiers._demotions
    tiering._settings = lambda namespace: wanted
    wanted = NamespaceSettings(media="dram")
    rig.put(1)
    rig.commits()
    assert rig.writes == [[]]
    wanted = NamespaceSettings(media="ssd")
    rig.put(2)
    rig.write()
    assert rig.node.state.store.find(rig.ns, key(2)) < 0, "the copy in memory goes first"
    assert rig.node.exists(rig.c, rig.ns, 2) == [1]
    wanted = NamespaceSettings(tier_quota_bytes=4 * KIB)
    rig.put(3)
    rig.commits()
    assert rig.writes == [[]], "the quota is used up"


def test_stores_under_way_count_for_a_namespaces_quota() -> None:
    rig = Rig(TierSpec("ssd", "ssd", 1 << 30, write="all"))
    rig.node.state.tiers._demotions._settings = lambda namespace: NamespaceSettings(tier_quota_bytes=4 * KIB)
    rig.put(1, 2)
    [[store]] = rig.writes
    assert isinstance(store, ev.StorePages)
    assert len(store.pages) == 1
    rig.write(status=WRITE_FAILED)
    rig.node.pass_time(1.0)
    rig.drain()
    assert len(rig.disks[0]) == 1, "what failed does not count"


def test_pages_found_at_a_start_come_up_and_end_waits() -> None:
    rig = Rig()
    request = m.Wait(5, rig.ns, [key(1)], 10.0)
    assert answers(rig.node.send(rig.c, request), rig.c) == []
    page = TierPage(rig.space, key(1), 4 * KIB, 7, 0)
    rig.disks[0][rig.space, key(1)] = page
    assert answers(rig.node.do(ev.PagesFound(0, (page,), 0)), rig.c) == [m.Present(5, b"\1")]
    rig.ask(1)
    assert rig.replies(rig.load()) == [[m.HIT]]


def test_other_nodes_can_ask_for_pages_in_tiers() -> None:
    rig = Rig(SSD, FAR)
    tiers = rig.node.state.tiers
    rig.sink(1, 2)
    page = rig.disks[0][rig.space, key(1)]
    rig.node.do(ev.PagesFound(1, (page,), 0))
    assert tiers.ready
    assert tiers.namespaces() == [rig.ns]
    assert {key(1), key(2)} <= set(tiers.keys(rig.ns))
    assert len(tiers.keys(rig.ns)) == len(set(tiers.keys(rig.ns)))
    assert (tiers.length(rig.ns, key(1)), tiers.length(rig.ns, key(99))) == (4 * KIB, 0)
    out: list[ev.Action] = []
    tiers.forget(rig.ns, [key(1)], out)
    rig.follow(out)
    rig.drain()
    assert rig.node.exists(rig.c, rig.ns, 1, 2) == [0, 1]
    assert (rig.space, key(1)) not in rig.disks[0]


def hint(rig: Rig, *keys: int) -> bytes:
    request = m.Exists(rig.node.next_id(), rig.ns, [key(k) for k in keys], move=m.UP)
    return rig.node.ask(rig.c, request, m.Present).mask


def test_a_hint_brings_pages_up_before_anybody_reads_them() -> None:
    rig = Rig()
    rig.sink(1, 2)
    assert hint(rig, 1, 2, 3) == b"\1\1\0"
    assert hint(rig, 1, 2) == b"\1\1"
    [load] = rig.loads
    assert [one.page.key for one in load.pages] == [key(1), key(2)], "once each"
    rig.load()
    assert rig.ask(1, 2) == [[m.HIT, m.HIT]]
    assert rig.counter("promoted") == 2


def test_hints_leave_most_of_what_may_be_under_way_to_reads() -> None:
    rig = Rig(load_bytes=8 * 4 * KIB)
    rig.sink(*range(1, 9))
    hint(rig, *range(1, 9))
    assert [one.page.key for load in rig.loads for one in load.pages] == [key(1), key(2)]
    assert rig.ask(*range(3, 9)) == []
    assert sum(len(load.pages) for load in rig.loads) == 8
    while rig.loads:
        rig.load()
    hint(rig, 1)
    assert not rig.loads


def test_places_are_told_to_those_who_ask_by_the_kind_of_the_tier() -> None:
    rig = Rig(SSD, TierSpec("object:/secret", "object", 1 << 30))
    rig.put(*range(12))
    rig.drain()
    rig.put(*range(20, 32))  # of 16 in memory the first go
    names = [key(k) for k in (0, 31, 99)]
    told = rig.node.ask(rig.c, m.Exists(9, rig.ns, names, places=True), m.Present)
    assert (list(told.places), told.tiers) == ([2, m.IN_MEMORY, m.NOWHERE], ["ssd", "object"])
    assert told.mask == b"\1\1\0"
    plain = rig.node.ask(rig.c, m.Exists(9, rig.ns, names), m.Present)
    assert (plain.places, plain.tiers) == (b"", [])
