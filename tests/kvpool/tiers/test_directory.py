"""The directory tier: what lies in its directory that it cannot use, and cannot remove."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.tiers.base import TierSettings
from pdserve.kvpool.tiers.directory import DirectoryTier
from tests.support.kvpool.tier_tools import page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a tier that was used before."""
    (tmp_path / "tier" / "pages").mkdir(parents=True)
    return tmp_path / "tier"


@pytest.fixture
def tiers() -> Iterator[list[DirectoryTier]]:
    """Are closed at the end."""
    opened: list[DirectoryTier] = []
    yield opened
    for tier in opened:
        tier.close()


def start(path: Path, tiers: list[DirectoryTier]) -> DirectoryTier:
    """A tier that knows of space 1, and has its pages 0 to 9."""
    tier = DirectoryTier(TierSettings("n0", path, 4 << 20, {}, lambda names: None))
    tiers.append(tier)
    assert list(tier.scan([1])) == []
    for n in range(10):
        assert not tier.put(*([one] for one in page(n))).error
    return tier


def settle(tier: DirectoryTier) -> None:
    for _ in range(1000):
        if not tier.maintain():
            return
    raise AssertionError("maintenance does not end")


def trash(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "trash").rglob("*") if not file.is_dir())


def test_a_stray_file_is_removed_and_keeps_no_dropped_space_on_the_disk(
    path: Path, tiers: list[DirectoryTier]
) -> None:
    for name in "abcdefgh":
        (path / "pages" / name).write_text("stray")
    tier = start(path, tiers)
    tier.forget_space(1)
    settle(tier)
    assert list((path / "trash").iterdir()) == []


def test_what_cannot_be_removed_is_passed_over_and_tried_again_later(
    path: Path, tiers: list[DirectoryTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcdefgh":
        (path / "pages" / name / "00").mkdir(parents=True)
        (path / "pages" / name / "00" / "stuck").write_text("stuck")
    tries = []
    unlink = os.unlink

    def refusing(file: Any, **options: Any) -> None:
        if Path(file).name == "stuck":
            tries.append(file)
            raise PermissionError
        unlink(file, **options)

    monkeypatch.setattr(os, "unlink", refusing)
    tier = start(path, tiers)
    tier.forget_space(1)
    settle(tier)
    assert trash(path) == ["stuck"] * 8
    tries.clear()
    settle(tier)
    assert tries == []
    monkeypatch.setattr(os, "unlink", unlink)
    tier._empty_at_s = 0.0  # the time has come
    settle(tier)
    assert list((path / "trash").iterdir()) == []


def test_a_space_dropped_while_the_trash_is_emptied_goes_too(path: Path, tiers: list[DirectoryTier]) -> None:
    (path / "pages" / "2" / "00").mkdir(parents=True)
    tier = start(path, tiers)
    assert tier.maintain()
    tier.forget_space(1)
    settle(tier)  # the pass that had begun
    settle(tier)
    assert list((path / "trash").iterdir()) == []


def test_a_link_is_removed_and_what_it_leads_to_is_left_alone(
    path: Path, tiers: list[DirectoryTier], tmp_path: Path
) -> None:
    (tmp_path / "home" / "folder").mkdir(parents=True)
    (tmp_path / "home" / "folder" / "file").write_text("mine")
    (path / "pages" / "link").symlink_to(tmp_path / "home")
    tier = start(path, tiers)
    settle(tier)
    assert (tmp_path / "home" / "folder" / "file").read_text() == "mine"
    assert list((path / "trash").iterdir()) == []
