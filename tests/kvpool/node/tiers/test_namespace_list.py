"""The thread that writes the list of namespaces."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.kvpool.core.events import Event, NamespacesSaved
from pdserve.kvpool.node.tiers.node_tiers import NamespaceListWriter
from pdserve.kvpool.tiers.base import TierSettings
from tests.support.kvpool.tier_tools import MemoryTier

WAIT_S = 20.0


class Disk(MemoryTier):
    """`gate`: may be closed; each call waits for it. `failures`: so many calls fail."""

    def __init__(self, path: Path) -> None:
        super().__init__(TierSettings("n0", path, 1 << 20, {}, lambda names: None))
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.failures = 0
        self.calls: list[str | None] = []

    def save_namespaces(self, text: str | None) -> str:
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        self.calls.append(text)
        self.failures -= 1
        return "no space" if self.failures >= 0 else super().save_namespaces(text)


class Rig:
    def __init__(self, path: Path) -> None:
        self.disks = [Disk(path / str(n)) for n in range(3)]
        self.events: queue.Queue[Event] = queue.Queue()
        self.writer = NamespaceListWriter("n0", self.disks, self.events.put, lambda: self.now_s)
        self.now_s = 0.0

    def next(self) -> tuple[int, str]:
        event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, NamespacesSaved)
        return event.revision, event.problem

    def close(self) -> None:
        for disk in self.disks:
            disk.gate.set()
        assert self.writer.stop(time.monotonic() + WAIT_S)
        for disk in self.disks:
            disk.close()

    def kept(self) -> Sequence[str | None]:
        return [disk.namespaces() for disk in self.disks]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_the_first_tier_keeps_the_list_and_those_of_the_others_are_removed(rig: Rig) -> None:
    for disk in rig.disks:
        disk.save_namespaces("old")
    rig.writer.start("one", 1)
    assert rig.next() == (1, "")
    assert rig.kept() == ["one", None, None]
    rig.writer.save("two", 2)
    assert rig.next() == (2, "")
    assert rig.kept() == ["two", None, None]
    assert [disk.calls for disk in rig.disks] == [["old", "one", "two"], ["old", None], ["old", None]]


def test_of_lists_that_wait_only_the_newest_is_written(rig: Rig) -> None:
    rig.disks[0].gate.clear()
    rig.writer.start("one", 1)
    assert rig.disks[0].entered.acquire(timeout=WAIT_S)
    for revision, text in ((2, "two"), (3, "three"), (4, "four")):
        rig.writer.save(text, revision)
    rig.disks[0].gate.set()
    assert [rig.next(), rig.next()] == [(1, ""), (4, "")]
    assert rig.disks[0].calls == ["one", "four"]


@pytest.mark.parametrize("disk", [0, 2])
def test_a_list_that_could_not_be_written_is_written_later(rig: Rig, disk: int) -> None:
    """The same where an old list of another tier could not be removed."""
    rig.disks[disk].failures = 2
    rig.writer.start("one", 1)
    assert rig.next() == (1, "no space")
    rig.writer.save("two", 2)
    assert rig.next() == (2, "no space"), "a new one is tried at once"
    rig.writer.save("three", 3)
    assert rig.next() == (3, "")
    assert rig.kept() == ["three", None, None]


def test_after_a_pause_it_is_tried_again_unasked(rig: Rig) -> None:
    rig.disks[0].failures = 1
    times = iter([0.0])
    rig.writer._clock = lambda: next(times, 1e9)  # the pause is over as soon as it begins
    rig.writer.start("one", 1)
    assert [rig.next(), rig.next()] == [(1, "no space"), (1, "")]
    assert rig.kept()[0] == "one"
