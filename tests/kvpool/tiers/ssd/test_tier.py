"""What the SSD tier does beyond the contract of tiers: segments, compaction, trouble with the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.tiers import open_tier
from pdserve.kvpool.tiers.base import CORRUPT, GONE, LOADED, STORED, WRITE_FAILED, PageName, TierSettings
from pdserve.kvpool.tiers.ssd.tier import SegmentTier
from tests.support.kvpool.tier_tools import KIB, memory, name, page

SEGMENT = 256 * KIB
LENGTH = 12 * KIB  # with its header 16 KiB: 15 records per segment


class Rig:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.left: list[PageName] = []
        self.tier = self.open()

    def open(self, capacity: int = 8 * SEGMENT, known: Sequence[int] = (1,), **options: int) -> SegmentTier:
        settings = TierSettings(
            "n0", self.path, capacity, {"segment_bytes": SEGMENT, **options}, self.left.extend
        )
        self.tier = SegmentTier(settings)
        self.found = [one for batch in self.tier.scan(known) for one in batch]
        return self.tier

    def put(self, numbers: Sequence[int]) -> list[int]:
        pages, data = zip(*(page(n, LENGTH) for n in numbers), strict=True)
        return self.tier.put(pages, data).statuses

    def read(self, numbers: Sequence[int]) -> list[int]:
        results = self.tier.read([name(n, LENGTH) for n in numbers], [memory(LENGTH) for _ in numbers])
        return [result.status for result in results]

    def settle(self) -> None:
        while self.tier.maintain():
            pass

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.seg"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "ssd")
    yield made
    made.tier.close()


def test_pages_that_are_read_outlive_many_times_the_capacity(rig: Rig) -> None:
    for first in range(0, 15 * 8 * 5, 15):
        rig.put(range(first, first + 15))
        assert rig.read([0, 1, 2]) == [LOADED] * 3
        rig.settle()
    assert rig.read([3, 4, 5]) == [GONE] * 3


def test_space_of_forgotten_pages_is_used_again_before_anything_leaves(rig: Rig) -> None:
    rig.put(range(90))
    rig.tier.forget([name(n, LENGTH) for n in range(90) if n % 3])
    for first in range(90, 130, 10):
        rig.put(range(first, first + 10))
        rig.settle()
    assert rig.left == []
    assert rig.read(range(0, 90, 3)) == [LOADED] * 30
    assert rig.read(range(90, 130)) == [LOADED] * 40


def test_compaction_after_a_kill_in_its_middle_loses_nothing(rig: Rig, tmp_path: Path) -> None:
    """Both copies of what was moved are there."""
    rig.put(range(105))
    rig.tier.forget([name(n, LENGTH) for n in range(15) if n % 3])
    kept = [n for n in range(105) if n >= 15 or n % 3 == 0]
    for _ in range(3):
        rig.tier.maintain()
        import shutil

        copy = tmp_path / f"copy{_}"
        shutil.copytree(rig.path, copy)
        other = Rig(copy)
        assert other.read(kept) == [LOADED] * len(kept)
        other.tier.close()


def test_a_torn_last_record_is_left_out(rig: Rig) -> None:
    rig.put(range(5))
    [file] = rig.files
    data = bytearray(file.read_bytes())
    os.close(rig.tier._lock_fd)  # as if it had been killed
    rig.tier._closed = True
    torn = 4096 + 4 * 16 * KIB + 4096 + 5000  # in the fifth record's bytes
    file.write_bytes(bytes(data[:torn]) + bytes(len(data) - torn))
    rig.open()
    assert [one.key for one in rig.found] == [page(n, LENGTH)[0].key for n in range(4)]
    assert rig.read(range(5)) == [LOADED] * 4 + [GONE]
    assert rig.put([4]) == [STORED]
    assert rig.read(range(5)) == [LOADED] * 5


def test_a_file_that_is_no_segment_is_removed_and_harms_nobody(rig: Rig) -> None:
    rig.put(range(5))
    rig.tier.close()
    (rig.path / "00000099.seg").write_bytes(os.urandom(100_000))
    (rig.path / "00000098.seg").write_bytes(b"")
    rig.open()
    assert len(rig.files) == 1
    assert rig.read(range(5)) == [LOADED] * 5
    assert rig.tier.used_bytes == sum(file.stat().st_size for file in rig.files)


def test_a_segment_that_cannot_be_read_for_a_moment_is_left_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put(range(15))
    rig.tier.close()
    [file] = rig.files
    saved = file.read_bytes()

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        rig.open()
    assert rig.found == []
    assert rig.put([20]) == [STORED]
    assert file.read_bytes() == saved
    rig.tier.close()
    rig.open()
    assert len(rig.found) == 16


def test_a_file_that_is_in_the_way_of_a_new_segment_is_not_removed(rig: Rig) -> None:
    file = rig.path / "00000001.seg"
    file.write_bytes(b"mine")
    pages, data = zip(page(1, LENGTH), strict=True)
    assert "File exists" in rig.tier.put(pages, data).error
    assert file.read_bytes() == b"mine"


def test_a_lower_capacity_holds_soon_after_a_start(rig: Rig) -> None:
    rig.put(range(100))
    rig.tier.close()
    rig.open(capacity=4 * SEGMENT)
    rig.settle()
    assert rig.tier.used_bytes <= 4 * SEGMENT
    assert rig.read([99]) == [LOADED]
    assert rig.left


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, 0])
def test_a_disk_that_cannot_write_fails_writes_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """0: a short write, which is taken for a full disk."""
    rig.put(range(10))

    def fail(*_: object) -> int:
        if number:
            raise OSError(number, os.strerror(number))
        return 4096

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        pages, data = zip(*(page(n, LENGTH) for n in range(10, 40)), strict=True)
        result = rig.tier.put(pages, data)
        assert result.statuses == [WRITE_FAILED] * 30
        assert os.strerror(number or errno.ENOSPC) in result.error
        assert rig.read(range(12)) == [LOADED] * 10 + [GONE] * 2
        rig.settle()
    assert rig.put(range(10, 40)) == [STORED] * 30
    assert rig.read(range(40)) == [LOADED] * 40


def test_a_disk_that_cannot_read_is_a_miss(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put([1])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert rig.read([1]) not in ([LOADED], [CORRUPT])
    assert rig.read([1]) == [LOADED]


def test_a_file_system_without_direct_io_is_used_without(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    assert rig.put(range(20)) == [STORED] * 20
    assert rig.read(range(20)) == [LOADED] * 20
    assert sum("direct I/O" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("kind", "capacity", "options", "error", "said"),
    [
        ("ssd", 3 * SEGMENT, {"segment_bytes": SEGMENT}, StartupError, "4 segments"),
        ("ssd", 1 << 60, {}, StartupError, "file system"),
        ("tape", 1 << 30, {}, ConfigError, r"no tier of kind 'tape'; installed are: .*ssd"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(
    tmp_path: Path, kind: str, capacity: int, options: dict[str, int], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_tier(kind, TierSettings("n0", tmp_path, capacity, options, lambda names: None))
