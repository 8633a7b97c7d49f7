"""Tiers of format version 1: their pages are kept where they counted then, and are upgraded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.namespaces.takeover import take_over
from pdserve.kvpool.tiers.base import GONE, LOADED, NumberedTier, Tier, TierSettings
from pdserve.kvpool.tiers.directory import DirectoryTier
from pdserve.kvpool.tiers.ssd.tier import SegmentTier
from tests.support.kvpool.tier_tools import KIB, contents, key, memory, name, page
from tests.support.kvpool.version_1 import LENGTH_BYTES, PAGES, VOID_PAGES, write_version_1

EVERY = {n for pages in PAGES.values() for n in pages} | VOID_PAGES


class Node:
    """What a node does with one tier at its starts."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.incarnation = 0
        self.tier: Tier | None = None

    def start(self, memory_list: str = "") -> None:
        """`memory_list`: the list beside the memory; empty after a reboot."""
        self.incarnation += 1
        options = {"segment_bytes": 64 * KIB} if self.kind == "ssd" else {}
        kind = SegmentTier if self.kind == "ssd" else DirectoryTier
        self.tier = tier = kind(TierSettings("n0", self.path, KIB * KIB, options, lambda names: None))
        fresh = Namespaces(self.incarnation)
        found = Namespaces.load(memory_list, self.incarnation) if memory_list else fresh
        taken = take_over(found, [tier.namespaces()])
        self.namespaces = taken.namespaces
        [numbers] = taken.numbers
        if numbers is not None:
            assert isinstance(tier, NumberedTier)
            assert tier.adopt_numbers(numbers) == ""
        self.found = {
            (one.space, n)
            for batch in tier.scan(self.namespaces.tier_spaces)
            for one in batch
            for n in EVERY
            if one.key == key(n)
        }

    def save(self) -> None:
        assert self.tier is not None
        assert self.tier.save_namespaces(self.namespaces.dump()) == ""

    def stop(self) -> None:
        if self.tier is not None:
            self.tier.close()

    def settle(self) -> None:
        assert self.tier is not None
        while self.tier.maintain():
            pass

    def pages_of(self, *numbers: int) -> set[tuple[int, int]]:
        return {(self.namespaces[number].tier_space, n) for number in numbers for n in PAGES[number]}

    def check(self, *numbers: int) -> None:
        """Exactly the pages of these namespaces are found, and read as they were written."""
        assert self.tier is not None
        assert self.found == self.pages_of(*numbers)
        for number in PAGES:
            for n in EVERY:
                into = memory(LENGTH_BYTES)
                space = self.namespaces[number].tier_space
                [result] = self.tier.read([name(n, LENGTH_BYTES, space)], [into])
                assert result.status == (LOADED if (space, n) in self.found else GONE)
                if result.page is not None:
                    assert (result.page.space, result.page.key) == (space, key(n))
                    assert (into[:LENGTH_BYTES] == contents(n, LENGTH_BYTES)).all()


@pytest.fixture(params=["ssd", "directory"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    made = Node(request.param, tmp_path / "tier")
    write_version_1(request.param, made.path)
    yield made
    made.stop()


@pytest.mark.parametrize("saved", [True, False])
def test_pages_that_counted_count_through_all_later_starts(node: Node, saved: bool) -> None:
    """`saved`: the list was written at the first start; else the node was killed before."""
    node.start()
    node.check(1, 2, 4, 5)
    if saved:
        node.save()
    node.stop()
    node.start("" if saved else node.namespaces.dump())
    node.check(1, 2, 4, 5)
    node.save()
    node.settle()
    node.stop()
    node.start()
    node.check(1, 2, 4, 5)


def test_a_start_that_was_killed_before_the_list_was_saved_may_lose_pages_and_finds_no_void_ones(
    node: Node,
) -> None:
    node.start()
    node.stop()
    node.start()
    node.check(*([1, 2, 4, 5] if node.kind == "ssd" else []))


def test_pages_that_were_voided_after_the_upgrade_stay_so(node: Node) -> None:
    node.start()
    node.namespaces.clear(1)
    node.namespaces.drop("e")
    node.save()
    dropped, node.namespaces = node.namespaces, Namespaces()
    node.stop()
    node.start()
    assert node.found == node.pages_of(2, 4)
    assert dropped.tier_spaces == node.namespaces.tier_spaces


def test_a_version_1_tier_of_another_boot_has_pages_of_the_same_namespaces_only(node: Node) -> None:
    text = (node.path / "namespaces.json").read_text()
    file = msgspec.json.decode(text)
    for namespace in file["namespaces"]:
        if namespace["name"] == "d":
            namespace["name"] = "x"
        if namespace["name"] == "a":
            namespace["space"] = 3  # it was cleared meanwhile
    for record in file["records"]:
        record[1] = "x" if record[1] == "d" else record[1]
    node.start(msgspec.json.encode(file).decode())
    assert node.found == node.pages_of(2, 5)
    node.save()
    node.stop()
    node.start()
    assert node.found == node.pages_of(2, 5)


def test_new_pages_lie_beside_those_of_version_1_until_these_have_gone(tmp_path: Path) -> None:
    node = Node("ssd", tmp_path / "tier")
    write_version_1("ssd", node.path)
    node.start()
    node.save()
    assert node.tier is not None
    space = node.namespaces[4].tier_space
    one, data = page(60, 9 * KIB, space)
    assert node.tier.put([one], [data]).error == ""
    node.stop()
    node.start()
    node.check(1, 2, 4, 5)
    assert (node.path / "version1.json").exists()
    for number in PAGES:
        node.tier.forget_space(node.namespaces[number].tier_space)
    node.settle()
    assert node.tier.put([one], [data]).error == ""
    node.stop()
    node.start()
    node.stop()
    assert not (node.path / "version1.json").exists()
    node.start()
    assert node.tier.read([name(60, 9 * KIB, space)], [memory(9 * KIB)])[0].status == LOADED


def test_an_older_program_that_was_started_in_between_is_believed_and_the_first_upgrade_is_not(
    tmp_path: Path,
) -> None:
    """It leaves its own list and files: here, those of the first day."""
    node = Node("ssd", tmp_path / "tier")
    write_version_1("ssd", tmp_path / "old")
    shutil.copytree(tmp_path / "old", node.path)
    node.start()
    node.save()
    node.stop()
    assert msgspec.json.decode((node.path / "forgotten.json").read_bytes()).__class__ is str
    for file in ("namespaces.json", "origins.json"):
        shutil.copy(tmp_path / "old" / file, node.path)
    (node.path / "forgotten.json").write_text('{"1":1000,"2":100}')
    node.start()
    node.check(2, 4, 5)


@pytest.mark.parametrize("file", ["forgotten.json", "origins.json"])
def test_where_it_cannot_be_known_which_pages_of_version_1_are_void_all_are(
    tmp_path: Path, file: str
) -> None:
    node = Node("ssd", tmp_path / "tier")
    write_version_1("ssd", node.path)
    (node.path / file).write_text("{")
    node.start()
    node.check()
    node.save()
    node.stop()
    node.start()
    node.check()
