"""What every tier promises, the reference in memory and the example of docs/extending/tier.md included. To
add one, give its `Kind` here.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from docs.examples.tier import SqliteTier
from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    GONE,
    LOADED,
    REFUSED,
    STORED,
    Option,
    PageName,
    Tier,
    TierPage,
    TierSettings,
)
from pdserve.kvpool.tiers.directory import DirectoryTier
from pdserve.kvpool.tiers.ssd.tier import SegmentTier
from tests.support.kvpool.tier_tools import KIB, MemoryTier, contents, key, memory, name, page

MIB = KIB * KIB
CAPACITY = 4 * MIB


class Kind:
    """How the suite opens one kind of tier, damages it, and copies what a crash leaves."""

    def __init__(self, make: Callable[[TierSettings], Tier], **options: Option) -> None:
        self.make = make
        self.options = options

    def flip(self, path: Path, pattern: bytes) -> None:
        """Flip a bit of a page's stored bytes."""
        for file in path.rglob("*"):
            if file.is_file():
                data = bytearray(file.read_bytes())
                at = data.find(pattern)
                if at >= 0:
                    with file.open("r+b") as out:
                        out.seek(at)
                        out.write(bytes([data[at] ^ 1]))
                    return
        raise AssertionError("the page's bytes are in no file")

    def crash_copy(self, path: Path, to: Path) -> None:
        shutil.copytree(path, to)


class MemoryKind(Kind):
    def flip(self, path: Path, pattern: bytes) -> None:
        pages = MemoryTier.DISKS[path]["pages"]
        for where, (found, data) in pages.items():
            if pattern in data:
                at = data.find(pattern)
                pages[where] = (found, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    def crash_copy(self, path: Path, to: Path) -> None:
        disk = MemoryTier.DISKS[path]
        MemoryTier.DISKS[to] = {"pages": disk["pages"].copy(), "text": disk["text"]}


KINDS = {
    "memory": MemoryKind(MemoryTier),
    "directory": Kind(DirectoryTier),
    "the documents' example": Kind(SqliteTier),
    "ssd": Kind(SegmentTier, segment_bytes=256 * KIB),
    "ssd, buffered": Kind(SegmentTier, segment_bytes=256 * KIB, direct=False),
}


class Place:
    """A directory and the tier in it; what left it is kept in `left`."""

    def __init__(self, kind: Kind, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.left: list[PageName] = []
        self.readable_when_leaving: list[bool] = []
        self._open: list[Tier] = []

    def open(
        self, path: Path | None = None, known: Sequence[int] = (1, 2), capacity: int = CAPACITY
    ) -> tuple[Tier, dict[tuple[int, bytes], TierPage]]:
        settings = TierSettings("n0", path or self.path, capacity, self.kind.options, self._leaving)
        tier = self.kind.make(settings)
        self._open.append(tier)
        found = [found for batch in tier.scan(known) for found in batch]
        by_name = {(one.space, one.key): one for one in found}
        return tier, by_name

    def _leaving(self, names: Sequence[PageName]) -> None:
        self.left.extend(names)
        for one in names:
            [result] = self._open[-1].read([one], [memory(one.length_bytes)])
            self.readable_when_leaving.append(result.status == LOADED)

    def close(self) -> None:
        for tier in self._open:
            tier.close()


@pytest.fixture(params=sorted(KINDS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(KINDS[request.param], tmp_path / "tier")
    yield made
    made.close()


def put(tier: Tier, *numbers: int, length: int = 8 * KIB, space: int = 1, checksum: bool = True) -> None:
    pages, data = zip(*(page(n, length, space, checksum=checksum) for n in numbers), strict=True)
    result = tier.put(pages, data)
    assert (result.statuses, result.error) == ([STORED] * len(numbers), "")


def read(tier: Tier, *numbers: int, length: int = 8 * KIB, space: int = 1) -> list[int]:
    """The statuses; what is LOADED is compared byte for byte."""
    into = [memory(length) for _ in numbers]
    results = tier.read([name(n, length, space) for n in numbers], into)
    for n, data, result in zip(numbers, into, results, strict=True):
        if result.status == LOADED:
            assert np.array_equal(data[:length], contents(n, length))
            assert result.page is not None
            assert (result.page.space, result.page.key) == (space, key(n))
    return [result.status for result in results]


def settle(tier: Tier) -> None:
    for _ in range(10_000):
        if not tier.maintain():
            return
    raise AssertionError("maintenance does not end")


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 100_000])
def test_what_was_put_is_read_back(place: Place, length: int) -> None:
    tier, _ = place.open()
    put(tier, 1, 2, 3, length=length)
    assert read(tier, 3, 1, 2, length=length) == [LOADED] * 3
    [result] = tier.read([name(2, length)], [memory(length)])
    assert result.page == page(2, length)[0]


def test_pages_of_two_namespaces_and_many_lengths_share_a_batch(place: Place) -> None:
    tier, _ = place.open()
    many = [page(n, 1 + 3000 * n, space=1 + n % 2) for n in range(20)]
    assert tier.put([p for p, _ in many], [d for _, d in many]).statuses == [STORED] * 20
    for n in range(20):
        assert read(tier, n, length=1 + 3000 * n, space=1 + n % 2) == [LOADED]
        assert read(tier, n, length=1 + 3000 * n, space=2 - n % 2) == [GONE]


def test_a_page_without_a_checksum_of_its_writer_stays_without(place: Place) -> None:
    tier, _ = place.open()
    put(tier, 1, checksum=False)
    [result] = tier.read([name(1)], [memory(8 * KIB)])
    assert result.status == LOADED
    assert result.page is not None
    assert result.page.checksum == 0


def test_what_is_not_there_spoils_no_batch(place: Place) -> None:
    tier, _ = place.open()
    put(tier, 1, 2)
    assert read(tier, 7, 1, 8, 2) == [GONE, LOADED, GONE, LOADED]


def test_a_page_of_another_length_is_not_there(place: Place) -> None:
    tier, _ = place.open()
    put(tier, 1, length=8 * KIB)
    assert read(tier, 1, length=8 * KIB - 1) == [GONE]
    assert read(tier, 1, length=64 * KIB) == [GONE]


def test_a_page_put_twice_is_one_page(place: Place) -> None:
    tier, _ = place.open()
    put(tier, 1)
    put(tier, 1)
    assert read(tier, 1) == [LOADED]
    tier.close()
    tier, found = place.open()
    assert list(found) == [(1, key(1))]


def test_pages_survive_a_close(place: Place) -> None:
    tier, found = place.open()
    assert found == {}
    put(tier, *range(10))
    put(tier, *range(10, 20), space=2, length=5000)
    [before] = tier.read([name(3)], [memory(8 * KIB)])
    tier.close()
    tier, found = place.open()
    assert tier.read([name(3)], [memory(8 * KIB)]) == [before]
    assert {(one.space, one.key, one.length_bytes) for one in found.values()} == {
        *((1, key(n), 8 * KIB) for n in range(10)),
        *((2, key(n), 5000) for n in range(10, 20)),
    }
    assert read(tier, *range(10)) == [LOADED] * 10
    assert read(tier, *range(10, 20), space=2, length=5000) == [LOADED] * 10
    put(tier, 30)
    assert read(tier, 30) == [LOADED]


def test_pages_survive_a_process_that_was_killed(place: Place) -> None:
    tier, _ = place.open()
    put(tier, *range(40))
    put(tier, *range(40, 45))
    copy = place.path.with_name("copy")
    place.kind.crash_copy(place.path, copy)
    after, found = place.open(copy)
    assert {key for _, key in found} == {key(n) for n in range(45)}
    assert read(after, *range(45)) == [LOADED] * 45


def test_a_page_forgotten_is_gone_and_can_be_put_again(place: Place) -> None:
    tier, _ = place.open()
    put(tier, 1, 2)
    tier.forget([name(1), name(9)])
    assert read(tier, 1, 2) == [GONE, LOADED]
    put(tier, 1)
    assert read(tier, 1, 2) == [LOADED, LOADED]


def test_a_space_forgotten_is_gone_and_can_be_used_again(place: Place) -> None:
    tier, _ = place.open()
    put(tier, *range(10))
    put(tier, *range(10), space=2)
    tier.forget_space(1)
    assert read(tier, *range(10)) == [GONE] * 10
    put(tier, 3)
    settle(tier)
    assert read(tier, 3, 4) == [LOADED, GONE]
    assert read(tier, *range(10), space=2) == [LOADED] * 10


def test_pages_of_unknown_spaces_are_dropped_at_a_start(place: Place) -> None:
    far = (1 << 64) - 1
    tier, _ = place.open()
    put(tier, 1)
    put(tier, 1, 2, space=far)
    tier.close()
    tier, found = place.open(known=[far])
    assert set(found) == {(far, key(1)), (far, key(2))}
    assert read(tier, 1) == [GONE]
    settle(tier)
    put(tier, 3)
    tier.close()
    _, found = place.open(known=[far])
    assert set(found) == {(far, key(1)), (far, key(2))}


def test_the_list_of_namespaces_is_kept(place: Place) -> None:
    tier, _ = place.open()
    assert tier.namespaces() is None
    assert tier.save_namespaces('{"one": "ä"}') == ""
    assert tier.save_namespaces('{"two": "ö"}') == ""
    copy = place.path.with_name("copy")
    place.kind.crash_copy(place.path, copy)
    tier, _ = place.open(copy)
    assert tier.namespaces() == '{"two": "ö"}'
    assert tier.save_namespaces(None) == tier.save_namespaces(None) == ""
    assert tier.namespaces() is None


def test_the_capacity_holds_and_what_leaves_is_reported_while_it_can_be_read(place: Place) -> None:
    tier, _ = place.open()
    pages = 2 * CAPACITY // (16 * KIB)
    for first in range(0, pages, 8):
        put(tier, *range(first, first + 8), length=16 * KIB)
        assert tier.used_bytes <= CAPACITY
        tier.maintain()
        assert tier.used_bytes <= CAPACITY
    settle(tier)
    left = {one.key for one in place.left}
    assert len(left) == len(place.left), "a page left twice"
    assert all(place.readable_when_leaving)
    statuses = read(tier, *range(pages), length=16 * KIB)
    assert [status == GONE for status in statuses] == [key(n) in left for n in range(pages)]
    assert sum(status == LOADED for status in statuses) >= pages // 4
    assert statuses[-1] == LOADED


def test_a_page_too_large_for_the_tier_is_refused_alone(place: Place) -> None:
    tier, _ = place.open()
    pages = [page(1), page(2, 2 * CAPACITY), page(3)]
    result = tier.put([p for p, _ in pages], [d for _, d in pages])
    assert result.statuses == [STORED, REFUSED, STORED]
    assert read(tier, 1, 3) == [LOADED, LOADED]


def test_a_flipped_bit_is_found_and_spoils_one_page(place: Place) -> None:
    for checksum, number in ((True, 5), (False, 15)):
        path = place.path.with_name(f"flip{number}")
        tier, _ = place.open(path)
        put(tier, *range(number - 3, number + 3), checksum=checksum or place.kind.make is MemoryTier)
        tier.close()
        place.kind.flip(path, contents(number, 8 * KIB)[4000:4100].tobytes())
        tier, _ = place.open(path)
        statuses = read(tier, *range(number - 3, number + 3))
        assert statuses[3] in (CORRUPT, GONE)
        assert [*statuses[:3], *statuses[4:]] == [LOADED] * 5
        put(tier, number)
        assert read(tier, number) == [LOADED]
        tier.close()


def test_a_directory_in_use_is_refused(place: Place) -> None:
    place.open()
    with pytest.raises(StartupError, match="in use"):
        place.open()


def test_a_path_that_is_no_directory_is_refused(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StartupError, match=r"file"):
        place.open(path)
    assert path.read_text() == "mine"


def test_unknown_options_are_refused(place: Place) -> None:
    if place.kind.make is MemoryTier:
        return
    settings = TierSettings("n0", place.path, CAPACITY, {"colour": "red"}, lambda names: None)
    with pytest.raises(ConfigError, match="colour"):
        place.kind.make(settings)


def test_readers_read_while_the_writer_writes_and_drops(place: Place) -> None:
    tier, _ = place.open()
    put(tier, *range(64), length=16 * KIB)
    stop = threading.Event()
    problems: list[BaseException] = []

    def reads(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                statuses = read(tier, *random.integers(0, 700, 8).tolist(), length=16 * KIB)
                assert set(statuses) <= {LOADED, GONE}
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for first in range(64, 704, 16):
        put(tier, *range(first, first + 16), length=16 * KIB)
        tier.forget([name(first, 16 * KIB)])
        tier.maintain()
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


def test_close_twice_is_close(place: Place) -> None:
    tier, _ = place.open()
    put(tier, 1)
    tier.close()
    tier.close()
