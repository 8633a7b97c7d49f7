"""Files in the directories of tiers that no tier wrote there: they cost pages at most.

Who puts them there is a process of our user, or a disk that comes from elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.kvpool.tiers.base import GONE, LOADED, STORED, PageName, TierPage, TierSettings
from pdserve.kvpool.tiers.durable_files import MAX_TEXT_BYTES, save_text
from pdserve.kvpool.tiers.ssd.segment_file import segment_name
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    MAX_SEGMENT_BYTES,
    SCAN_PIECE_BYTES,
    SegmentHeader,
    encode_record_header,
    encode_segment_header,
    read_index,
    scan_records,
)
from pdserve.kvpool.tiers.ssd.tier import SegmentTier
from tests.support.kvpool.false_segments import footers
from tests.support.kvpool.tier_tools import KIB, key, memory, name, page

NOBODY = 65534
SEGMENT = 256 * KIB
LENGTH = 12 * KIB
COUNT = 5
MINE = b"what is mine, and no tier's"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


class Place:
    """A tier, opened as often as wanted. It holds `COUNT` pages of space 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tier: SegmentTier | None = None
        self.open()
        pages, data = zip(*(page(n, LENGTH) for n in range(COUNT)), strict=True)
        assert self.tier is not None
        assert set(self.tier.put(pages, data).statuses) == {STORED}
        self.close()

    def open(self, capacity: int = 16 * SEGMENT) -> list[TierPage]:
        """The pages that are found."""
        options = {"segment_bytes": SEGMENT}
        self.tier = SegmentTier(TierSettings("n0", self.path, capacity, options, lambda _: None))
        return [one for batch in self.tier.scan([1]) for one in batch]

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def read(self, *names: PageName) -> list[int]:
        assert self.tier is not None
        wanted = names or [name(n, LENGTH) for n in range(COUNT)]
        return [one.status for one in self.tier.read(wanted, [memory(one.length_bytes) for one in wanted])]

    def put(self, number: int) -> int:
        assert self.tier is not None
        (status,) = self.tier.put(*([one] for one in page(number, LENGTH))).statuses
        return status

    @property
    def file(self) -> Path:
        (found,) = self.path.glob("*.seg")
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "tier")
    yield made
    made.close()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the user, outside of every tier."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "file").write_bytes(MINE)
    return tmp_path / "home" / "file"


# --- links, pipes, and files of others


def test_a_link_in_place_of_a_segment_is_not_followed(place: Place, tmp_path: Path) -> None:
    """Its target is a right one, and of this user."""
    moved = place.file.rename(tmp_path / place.file.name)
    before = moved.read_bytes()
    (place.path / moved.name).symlink_to(moved)
    assert place.open() == []
    assert place.read() == [GONE] * COUNT
    assert place.put(0) == STORED
    assert place.read(name(0, LENGTH)) == [LOADED]
    assert moved.read_bytes() == before


def test_a_link_is_not_sealed_as_a_segment(place: Place, tmp_path: Path) -> None:
    """It may lead to the segment that another node is writing."""
    other = tmp_path / segment_name(7)
    other.write_bytes(encode_segment_header(SegmentHeader(7, 1)) + bytes(SEGMENT - BLOCK_BYTES))
    (place.path / other.name).symlink_to(other)
    assert len(place.open()) == COUNT
    assert other.stat().st_size == SEGMENT


def test_a_link_that_leads_nowhere_and_a_folder_do_not_end_the_start(place: Place) -> None:
    (place.path / segment_name(8)).symlink_to(place.path / "nowhere")
    (place.path / segment_name(9)).mkdir()
    assert len(place.open()) == COUNT
    assert [place.put(n) for n in range(20, 40)] == [STORED] * 20


def test_a_pipe_in_place_of_a_file_is_not_waited_for(place: Place) -> None:
    file = place.file
    file.unlink()
    os.mkfifo(file)
    os.mkfifo(place.path / "namespaces.json")
    assert place.open() == []
    assert place.tier is not None
    assert place.tier.namespaces() is None
    assert place.read(name(0, LENGTH)) == [GONE]


@as_root
def test_a_segment_of_another_user_is_not_read(place: Place) -> None:
    os.chown(place.file, NOBODY, NOBODY)
    assert place.open() == []
    assert place.read() == [GONE] * COUNT
    assert place.put(9) == STORED


def test_a_segment_that_others_may_write_to_is_not_read(place: Place) -> None:
    place.file.chmod(0o666)
    assert place.open() == []
    assert place.put(9) == STORED


@pytest.mark.parametrize("small", ["lock", "namespaces.new"])
def test_a_link_in_place_of_a_small_file_is_not_written_through(place: Place, mine: Path, small: str) -> None:
    (place.path / small).unlink(missing_ok=True)
    (place.path / small).symlink_to(mine)
    if small == "lock":
        with pytest.raises(StartupError, match="symbolic link"):
            place.open()
    else:
        place.open()
        assert place.tier is not None
        assert place.tier.save_namespaces("{}") == ""
        assert place.tier.namespaces() == "{}"
    assert mine.read_bytes() == MINE


def test_the_list_of_namespaces_is_for_this_user_alone(place: Place) -> None:
    """It has digests of tokens."""
    place.open()
    assert place.tier is not None
    assert place.tier.save_namespaces("{}") == ""
    assert (place.path / "namespaces.json").stat().st_mode & 0o777 == 0o600


def test_a_list_of_namespaces_without_an_end_is_not_read_into_memory(place: Place) -> None:
    with (place.path / "namespaces.json").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    place.open()
    assert place.tier is not None
    assert place.tier.namespaces() is None


def test_words_in_the_lock_do_not_reach_the_terminal(place: Place) -> None:
    place.open()
    (place.path / "lock").write_text("\x1b[2J 1\n")
    with pytest.raises(StartupError, match="in use by the process unknown"):
        SegmentTier(TierSettings("n1", place.path, 16 * SEGMENT, {}, lambda _: None))


# --- what the files say


def test_a_segment_in_place_of_another_is_removed(place: Place) -> None:
    copied = place.file.read_bytes()
    (place.path / segment_name(5)).write_bytes(copied)
    assert len(place.open()) == COUNT
    assert place.read() == [LOADED] * COUNT
    assert place.tier is not None
    assert place.tier.used_bytes == len(copied)


@pytest.mark.parametrize("number", [(1 << 64) - 1, 1 << 63, (1 << 63) - 1])
def test_a_segment_with_the_last_number_ends_no_writing(place: Place, number: int) -> None:
    """A number that no next one fits behind ended each write, and left a file of each."""
    header = encode_segment_header(SegmentHeader(number, 1))
    (place.path / segment_name(number)).write_bytes(header)
    (place.path / f"{number}9.seg").write_bytes(header)
    place.open()
    assert [place.put(n) for n in range(20, 40)] == [STORED] * 20
    assert place.tier is not None
    assert place.tier.used_bytes == sum(file.stat().st_size for file in place.path.glob("*.seg"))


def test_a_segment_longer_than_any_is_removed_unread(place: Place) -> None:
    path = place.path / segment_name(5)
    path.write_bytes(encode_segment_header(SegmentHeader(5, 1)))
    with path.open("r+b") as file:
        file.truncate(MAX_SEGMENT_BYTES + BLOCK_BYTES)
    assert len(place.open()) == COUNT
    assert not path.exists()


@pytest.mark.parametrize(("what", "footer"), list(footers()))
def test_a_footer_that_says_what_cannot_be_is_not_believed(what: str, footer: bytes) -> None:
    file = encode_segment_header(SegmentHeader(5, 1)) + bytes(8 * BLOCK_BYTES) + footer
    found = read_index(lambda offset, size: file[offset : offset + size], len(file))
    assert found is not None
    assert (found.sealed, found.records) == (False, [])


def test_a_record_of_a_huge_length_is_not_read_at_once() -> None:
    """Its bytes are compared piece by piece."""
    length = 1 << 30
    head = bytearray(BLOCK_BYTES)
    encode_record_header(head, 0, 1, 1, TierPage(1, key(0), length, 0, 1), 1)
    asked = []

    def read(offset: int, size: int) -> bytes:
        asked.append(size)
        return bytes(head) if offset == BLOCK_BYTES else bytes(min(size, SCAN_PIECE_BYTES))

    assert list(scan_records(read, length + 2 * BLOCK_BYTES, SegmentHeader(5, 1))) == []
    assert max(asked) <= SCAN_PIECE_BYTES


def test_a_small_file_that_was_left_half_written_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "small.new").write_text("half")
    assert save_text(tmp_path / "small.json", "whole") == ""
    assert (tmp_path / "small.json").read_text() == "whole"
