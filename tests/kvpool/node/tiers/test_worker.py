"""The threads of one tier, over real files."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.node.tiers.worker import SPILL_BYTES, SPILL_PIECE_BYTES, TierWorker
from pdserve.kvpool.tiers.base import (
    READ_FAILED,
    WRITE_FAILED,
    PageMemory,
    PageName,
    PutResult,
    ReadResult,
    TierPage,
    TierSettings,
)
from tests.support.kvpool.tier_tools import KIB, MemoryTier, memory, name, page

WAIT_S = 20.0
E = TypeVar("E")


class Disk(MemoryTier):
    """A disk that can be full, and one that can break."""

    full = False
    broken = False
    short = False  # it answers for one page less than it was asked for
    puts = 0

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        self.puts += 1
        if self.full:
            return PutResult([WRITE_FAILED] * len(pages), "full")
        done = super().put(pages, data)
        return PutResult(done.statuses[:-1]) if self.short else done

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        if self.broken:
            raise RuntimeError("broken")
        found = super().read(names, into)
        return found[:-1] if self.short else found


class Pair:
    """A tier that holds pages 0 to 9, and a worker at work for the one below it. Time stands still."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.events: queue.Queue[ev.Event] = queue.Queue()
        self.above, self.below = (
            Disk(TierSettings("n0", path / name, 4 << 20, {}, lambda names: None)) for name in ("a", "b")
        )
        self.above.put(*zip(*map(page, range(10)), strict=True))
        self.top, self.worker = (
            TierWorker("n0", number, "disk", tier, memory(1), post, lambda: self.now_s)
            for number, tier, post in ((0, self.above, lambda event: None), (1, self.below, self.events.put))
        )
        self.top.below = self.worker
        self.worker.start([1], 1)
        while not self.found().last:
            pass

    def found(self) -> ev.PagesFound:
        event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, ev.PagesFound)
        return event

    def leave(self, n: int) -> None:
        self.top.leaving([name(n)])

    def close(self) -> None:
        self.worker.stop(time.monotonic() + WAIT_S)
        self.above.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_a_lower_tier_that_could_not_write_takes_pages_again_after_a_pause(pair: Pair) -> None:
    pair.below.full = True
    pair.leave(1)
    assert (pair.found().failed, pair.below.puts) == (1, 1)
    assert not pair.worker.take_in(8 * KIB)
    pair.now_s = 1.0
    pair.leave(2)
    assert (pair.found().failed, pair.below.puts) == (1, 2)
    pair.below.full = False
    pair.now_s = 3.0
    pair.leave(3)
    assert [one.key for one in pair.found().pages] == [name(3).key]
    pair.leave(4)
    assert [one.key for one in pair.found().pages] == [name(4).key]


def test_a_lower_tier_that_cannot_write_is_tried_with_one_batch_at_a_time(pair: Pair) -> None:
    pair.below.full = True
    pair.leave(1)
    assert pair.found().failed
    pair.now_s = 1.0
    assert pair.worker.take_in(8 * KIB)
    assert not pair.worker.take_in(8 * KIB)


def test_pages_that_could_not_be_read_take_no_room_on_their_way_down(pair: Pair) -> None:
    pair.above.broken = True
    for _ in range(SPILL_BYTES // SPILL_PIECE_BYTES + 1):
        with pytest.raises(RuntimeError):
            pair.top.leaving([name(1, SPILL_PIECE_BYTES)])
        assert pair.found().pages == ()
    pair.above.broken = False
    pair.leave(1)
    assert [one.key for one in pair.found().pages] == [name(1).key]


def test_a_page_that_came_from_above_before_it_was_erased_is_reported_as_gone_after_that(pair: Pair) -> None:
    pair.leave(3)
    pair.worker.erase(ev.ErasePages(7, 1, (name(3).key,)))
    assert [one.key for one in pair.found().pages] == [name(3).key]
    gone, erased = (pair.events.get(timeout=WAIT_S) for _ in range(2))
    assert gone == ev.PagesGone(1, (name(3, 0),), 0)
    assert erased == ev.PagesErased(7)


def test_a_tier_that_answers_for_another_number_of_pages_has_failed_for_those_of_that_call(
    pair: Pair,
) -> None:
    """A plug-in's mistake: the node would take answers for those of other pages."""
    pages = tuple(ev.SlotPage(slot, 0, page(20 + slot)[0]) for slot in (0, 1))
    pair.below.short = True
    pair.worker.store(ev.StorePages(1, pages))
    stored = pair.events.get(timeout=WAIT_S)
    assert isinstance(stored, ev.PagesStored)
    assert (stored.slots, stored.statuses) == ((0, 1), (WRITE_FAILED, WRITE_FAILED))
    pair.worker.load(ev.LoadPages(1, pages))
    loaded = pair.events.get(timeout=WAIT_S)
    assert isinstance(loaded, ev.PagesLoaded)
    assert (loaded.slots, loaded.statuses) == ((0, 1), (READ_FAILED, READ_FAILED))
    assert len(loaded.checksums) == 2
