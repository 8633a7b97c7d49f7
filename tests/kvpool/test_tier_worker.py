"""The threads of one tier, over real files."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from pdserve.kvpool.events import Event, PagesFound, PagesStored, SlotPage, StorePages
from pdserve.kvpool.tiers.base import STORED, WRITE_FAILED, TierSettings
from pdserve.kvpool.tiers.directory import DirectoryTier
from pdserve.kvpool.tiers.registry import open_tier
from pdserve.kvpool.tiers.worker import TierWorker

from .tier_tools import KIB, page

WAIT_S = 20.0
E = TypeVar("E")


class Rig:
    def __init__(self, kind: str, path: Path) -> None:
        self.path = path
        self.events: queue.Queue[Event] = queue.Queue()
        options = {"segment_bytes": 256 * KIB} if kind == "ssd" else {}
        tier = open_tier(kind, TierSettings("n0", path, 4 << 20, options, lambda names: None))
        self.tier = tier
        self.page, memory = page(1)
        self.worker = TierWorker("n0", 0, kind, tier, memory, self.events.put)

    def start(self, known: list[int], namespaces: str) -> None:
        self.worker.start(known, namespaces, 1)
        while not getattr(self.event(PagesFound), "last", False):
            pass

    def store(self) -> tuple[int, ...]:
        self.worker.store(StorePages(0, (SlotPage(0, 0, self.page),)))
        return self.event(PagesStored).statuses

    def event(self, kind: type[E]) -> E:
        found = self.events.get(timeout=WAIT_S)
        assert isinstance(found, kind)
        return found


@pytest.fixture(params=["ssd", "directory"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path / "tier")
    yield made
    made.worker.stop(time.monotonic() + WAIT_S)


def test_a_tier_takes_no_pages_while_it_cannot_keep_the_list_of_namespaces(rig: Rig) -> None:
    (rig.path / "namespaces.new").mkdir()  # nothing can be written under this name
    rig.start([1], "the list")
    assert rig.store() == (WRITE_FAILED,)
    assert rig.tier.namespaces() is None
    (rig.path / "namespaces.new").rmdir()
    assert rig.store() == (STORED,)
    assert rig.tier.namespaces() == "the list"


def test_a_folder_that_cannot_be_discarded_keeps_the_list_from_being_saved(tmp_path: Path) -> None:
    rig = Rig("directory", tmp_path / "tier")
    assert isinstance(rig.tier, DirectoryTier)
    (rig.path / "pages" / "2").mkdir(parents=True)
    (rig.path / "trash").write_text("no folder")
    rig.start([1], "2 is another")
    assert rig.store() == (WRITE_FAILED,)
    assert rig.tier.namespaces() is None
    (rig.path / "trash").unlink()
    assert rig.store() == (STORED,)
    assert rig.tier.namespaces() == "2 is another"
    assert not (rig.path / "pages" / "2").exists()
    rig.worker.stop(time.monotonic() + WAIT_S)
