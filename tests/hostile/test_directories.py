"""Another user of the host makes pdserve's directories first, or links them elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StartupError
from pdserve.kvpool.node.bootstrap import take_memory
from pdserve.kvpool.node.config import TierConfig
from pdserve.kvpool.node.serving.listeners import listen
from pdserve.up.locks import claimed, run_directory
from tests.support.kvpool.mounts import mounted
from tests.support.kvpool.nodes import small_config, start_fails

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to another user")


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A directory in memory that another user made where ours should be."""
    path = Path(f"/dev/shm/pdserve-hostile-{os.getpid()}")
    path.mkdir(mode=0o755)
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def linked(theirs: Path, tmp_path: Path) -> Path:
    """Their link, in a directory that all may write to, to a directory of ours."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    return link


@pytest.fixture(params=["theirs", "linked"])
def place(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_no_arena_is_made_there(place: Path) -> None:
    line = start_fails(arena_dir=place / "cluster")
    assert f"{place} " in line
    assert f"user {NOBODY}" in line
    assert not (place / "cluster").exists()


def test_no_tier_is_made_there(place: Path, tmp_path: Path) -> None:
    tier = TierConfig(kind="ssd", path=place / "pages", capacity_bytes=64 << 20)
    line = start_fails(arena_dir=tmp_path / "arena", tiers=[tier])
    assert f"user {NOBODY}" in line
    assert not (place / "pages").exists()


def test_no_socket_is_made_there(place: Path) -> None:
    with pytest.raises(StartupError, match=f"user {NOBODY}"):
        asyncio.run(listen(f"unix:{place}/made/s", asyncio.Protocol))
    assert not (place / "made").exists()


def test_no_secrets_are_written_there(theirs: Path) -> None:
    with pytest.raises(StartupError, match=f"user {NOBODY}"), claimed(theirs):
        pass
    assert not list(theirs.iterdir())


def test_no_secrets_are_written_where_the_link_of_another_user_points_to(linked: Path) -> None:
    """`pdserve up` followed it, though the kernel would not have in /tmp."""
    before = list(linked.resolve().iterdir())
    with pytest.raises(StartupError, match="is a symbolic link"), claimed(run_directory(linked)):
        pass
    assert list(linked.resolve().iterdir()) == before


def test_a_run_directory_below_links_of_ones_own_is_used(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with claimed(run_directory(tmp_path / "link" / "run")):
        assert (tmp_path / "there/run/lock").exists()


def test_an_arena_that_others_could_replace_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    line = start_fails(arena_dir=tmp_path / "open" / "arena")
    assert "can be written by other users" in line
    assert not small_config(arena_dir=tmp_path / "open" / "arena").arena_dir.exists()


def test_a_volume_that_all_may_write_to_is_used(tmp_path: Path) -> None:
    """Kubernetes mounts volumes with mode 0777. Whatever lies in them must still be this user's own."""
    with mounted(tmp_path / "volume", "tmpfs", "size=64m,mode=777") as volume:
        theirs = volume / "arena" / "second"
        theirs.mkdir(parents=True)
        os.chown(theirs, NOBODY, NOBODY)
        assert f"user {NOBODY}" in start_fails(arena_dir=volume / "arena")
        theirs.rmdir()
        tier = TierConfig(kind="ssd", path=volume / "tier" / "pages", capacity_bytes=32 << 20)
        arena, tiers = take_memory(small_config(arena_dir=volume / "arena", tiers=[tier]), 1, None)
        try:
            assert (volume / "arena").exists()
            assert (tier.path.stat().st_mode & 0o777) == 0o700
        finally:
            tiers.stop()
            arena.close(keep=False)
