"""What every tier promises, the reference in memory and the example of docs/extending/tier.md included. To
add one, give its `Kind` here.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

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
    SharedTier,
    Tier,
    TierPage,
    TierSettings,
)
from pdserve.kvpool.tiers.ssd.segment_format import BLOCK_BYTES, read_index
from pdserve.kvpool.tiers.ssd.tier import SegmentTier
from tests.support.kvpool.object_tiers import DirectoryObjectTier
from tests.support.kvpool.tier_tools import KIB, MemoryTier, contents, key, key_file, memory, name, page

MIB = KIB * KIB
CAPACITY = 4 * MIB
SIZES = {"segment_bytes": 256 * KIB, "spool_bytes": MIB, "flush_s": 0.001, "refresh_s": 0.01}
KEYS = str(key_file())


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


class ObjectKind(Kind):
    def crash_copy(self, path: Path, to: Path) -> None:
        """The spool first: what goes from there meanwhile is in the bucket already."""
        for folder in (path, path / "bucket"):
            for file in sorted(folder.rglob("*")):
                if file.is_relative_to(path / "bucket") and folder == path:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if file.is_file():
                        copy = to / file.relative_to(path)
                        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                        shutil.copy2(file, copy)


class CodedKind(ObjectKind):
    """Pages are not to be found by their bytes."""

    def flip(self, path: Path, pattern: bytes) -> None:
        [number] = [n for n in range(100) if contents(n, 8 * KIB)[4000:4100].tobytes() == pattern]
        for file in path.rglob("*.seg"):
            data = bytearray(file.read_bytes())
            found = read_index(lambda at, size, data=data: data[at : at + size], len(data))  # type: ignore[misc]
            for record in found.records if found else ():
                if record.page.key == key(number):
                    data[(record.block + 1) * BLOCK_BYTES + record.size_bytes // 2] ^= 1
                    file.write_bytes(data)
                    return
        raise AssertionError("the page is in no file")


KINDS = {
    "memory": MemoryKind(MemoryTier),
    "the documents' example": Kind(SqliteTier),
    "ssd": Kind(SegmentTier, segment_bytes=256 * KIB),
    "ssd, buffered": Kind(SegmentTier, segment_bytes=256 * KIB, direct=False),
    "ssd, compressed and encrypted": CodedKind(
        SegmentTier, segment_bytes=256 * KIB, compression="zstd", keys=KEYS
    ),
    "object": ObjectKind(DirectoryObjectTier, **SIZES),
    "object, compressed and encrypted": CodedKind(
        DirectoryObjectTier, **SIZES, compression="zstd", keys=KEYS
    ),
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


LENGTHS = [1, 4095, 4096, 4097, 9000]
SPACES = [1, (1 << 64) - 1]
NUMBERS = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
Name = tuple[int, int]


class TierMachine(RuleBasedStateMachine):
    """A tier through puts, reads, closes and kills, against what it promises.

    `there`: the length of each page that must be found. `perhaps`: lengths of pages that may be found after a
    restart, since they were forgotten without a trace. Both by space and number. `away`: pages of spaces
    that the last start did not know. A shared tier finds them again at any time after the space is opened.
    """

    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.place = Place(self.kind, self.directory / "0")
        self.copies = 0
        self.there: dict[Name, int] = {}
        self.perhaps: dict[Name, set[int]] = {}
        self.away: set[Name] = set()
        self.text: str | None = None
        self.tier, found = self.place.open(known=SPACES)
        assert found == {}

    @rule(
        numbers=NUMBERS,
        space=st.sampled_from(SPACES),
        length=st.sampled_from(LENGTHS),
        checksum=st.booleans(),
    )
    def put(self, numbers: list[int], space: int, length: int, checksum: bool) -> None:
        pages = [page(n, length + n, space, checksum=checksum) for n in numbers]
        result = self.tier.put([one for one, _ in pages], [data for _, data in pages])
        assert (result.statuses, result.error) == ([STORED] * len(numbers), "")
        for n, (one, _) in zip(numbers, pages, strict=True):
            if (space, n) in self.there:
                self.perhaps.setdefault((space, n), set()).add(self.there[space, n])
            self.there[space, n] = length + n
            into = memory(length + n)
            [read_back] = self.tier.read([name(n, length + n, space)], [into])
            assert read_back.page == one

    @rule(names=st.lists(st.tuples(st.sampled_from(SPACES), st.integers(0, 7)), min_size=1, max_size=3))
    def forget(self, names: list[Name]) -> None:
        self.tier.forget([name(n, self.there.get((space, n), 1), space) for space, n in names])
        for one in names:
            self.lose(one)

    @rule(space=st.sampled_from(SPACES))
    def forget_space(self, space: int) -> None:
        self.tier.forget_space(space)
        for one in [one for one in self.there if one[0] == space]:
            self.lose(one)
        self.away = {one for one in self.away if one[0] != space}

    def lose(self, one: Name) -> None:
        length = self.there.pop(one, None)
        if length is not None:
            self.perhaps.setdefault(one, set()).add(length)

    @rule()
    def maintain(self) -> None:
        settle(self.tier)

    @rule(text=st.none() | st.text(max_size=20))
    def save(self, text: str | None) -> None:
        assert self.tier.save_namespaces(text) == ""
        self.text = text

    @rule(known=st.sampled_from([SPACES, SPACES, SPACES[:1]]), kill=st.booleans())
    def restart(self, known: list[int], kill: bool) -> None:
        path = self.place.path
        if kill:  # what is on the disk is all that is left
            self.copies += 1
            self.place.path = self.directory / str(self.copies)
            self.kind.crash_copy(path, self.place.path)
        self.tier.close()
        self.tier, found = self.place.open(known=known)
        assert self.tier.namespaces() == self.text
        numbers = {key(n): n for n in range(8)}
        lengths = {(one.space, numbers[one.key]): one.length_bytes for one in found.values()}
        assert {space for space, _ in lengths} <= set(known)
        for one in [one for one in self.there if one[0] not in known]:
            self.lose(one)
        assert self.there.items() <= lengths.items()
        for one in lengths.keys() - self.there.keys():
            assert lengths[one] in self.perhaps[one]
        self.there = lengths
        shared = isinstance(self.tier, SharedTier)
        self.away = {one for one in self.perhaps if shared and one[0] not in known}

    @invariant()
    def holds_what_it_must_and_nothing_else(self) -> None:
        assert self.tier.used_bytes <= CAPACITY
        pages = [(space, n) for space in SPACES for n in range(8)]
        wanted = [(one, length) for one in pages for length in self.asked(one)]
        into = [memory(length) for _, length in wanted]
        names = [name(n, length, space) for (space, n), length in wanted]
        results = self.tier.read(names, into)
        for (one, length), data, result in zip(wanted, into, results, strict=True):
            must = self.there.get(one) == length
            if must or one in self.there or one not in self.away:
                assert result.status == (LOADED if must else GONE)
            if result.status == LOADED:
                assert result.page is not None
                assert (result.page.space, result.page.key) == (one[0], key(one[1]))
                assert np.array_equal(data[:length], contents(one[1], length))
            else:
                assert result.status == GONE

    def asked(self, one: Name) -> set[int]:
        """Lengths that the page has or had, and one that it never had."""
        now = self.there.get(one, 0)
        return {now, *self.perhaps.get(one, ()), 10_000} - {0}

    def teardown(self) -> None:
        self.place.close()
        shutil.rmtree(self.directory)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_whatever_happens_a_tier_keeps_its_promises(kind: str) -> None:
    machine = type("Machine", (TierMachine,), {"kind": KINDS[kind]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None)
    )


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


def test_what_cannot_be_opened_is_refused_and_close_twice_is_close(place: Place, tmp_path: Path) -> None:
    tier, _ = place.open()
    with pytest.raises(StartupError, match="in use"):
        place.open()
    tier.close()
    tier.close()
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StartupError, match=r"file"):
        place.open(path)
    assert path.read_text() == "mine"
    if place.kind.make is not MemoryTier:
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
                statuses = read(tier, *random.integers(0, 448, 8).tolist(), length=16 * KIB)
                assert set(statuses) <= {LOADED, GONE}
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for first in range(64, 448, 16):
        put(tier, *range(first, first + 16), length=16 * KIB)
        tier.forget([name(first, 16 * KIB)])
        tier.maintain()
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []


def holding(path: Path, numbers: Iterable[int]) -> list[int]:
    """Which of these pages' bytes are in any file below the path."""
    files = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    return [n for n in numbers if any(contents(n, 8 * KIB)[4000:4100].tobytes() in data for data in files)]


@pytest.mark.parametrize("reopened", [False, True])
def test_no_byte_of_an_erased_page_is_left(place: Place, reopened: bool) -> None:
    tier, _ = place.open()
    put(tier, *range(6))
    put(tier, *range(6))  # also what was replaced
    put(tier, 10, 11, space=2)
    if reopened:
        tier.close()
        tier, _ = place.open()
    settle(tier)
    keys = [key(0), key(1), key(99)]
    assert tier.erase(1, keys) == ""
    assert read(tier, 0, 1) == [GONE, GONE]
    assert holding(place.path, range(2)) == []
    assert set(read(tier, 2, 3, 4, 5)) <= ({LOADED, GONE} if isinstance(tier, SharedTier) else {LOADED})
    assert read(tier, 10, 11, space=2) == [LOADED, LOADED]
    put(tier, 0)
    assert read(tier, 0) == [LOADED]
    assert tier.erase(2) == ""
    assert read(tier, 10, 11, space=2) == [GONE, GONE]
    assert holding(place.path, (10, 11)) == []
    assert read(tier, 0) == [LOADED]


def test_a_start_erases_what_an_earlier_one_may_not_have_erased_to_the_end(tmp_path: Path) -> None:
    place = Place(KINDS["ssd"], tmp_path / "tier")
    tier, _ = place.open()
    put(tier, 1, 2)
    put(tier, 3, space=2)
    place.close()
    assert holding(place.path, (1, 2, 3)) == [1, 2, 3]
    tier, _ = place.open(known=[2])
    assert holding(place.path, (1, 2, 3)) == [3]
    assert read(tier, 3, space=2) == [LOADED]
    place.close()
