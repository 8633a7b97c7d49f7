"""Which directories are trusted with memory, pages and secrets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pdserve.security import private_directory as module
from pdserve.security.private_directory import private_directory

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to another user")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_directory(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for path in ("a", "a/b", "a/b/c"):
        assert mode_of(tmp_path / path) == 0o700
    private_directory(tmp_path / "a" / "b" / "c")


def give(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


@as_root
@pytest.mark.parametrize("place", ["first", "first/second"])
def test_a_directory_that_another_user_made_first_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "first" / "second").mkdir(parents=True, mode=0o700)
    give(tmp_path / place)
    with pytest.raises(PermissionError, match=f"{place} belongs to user {NOBODY}"):
        private_directory(tmp_path / "first" / "second")
    with pytest.raises(PermissionError, match="belongs to user"):
        private_directory(tmp_path / "first" / "second" / "third")
    assert not (tmp_path / "first" / "second" / "third").exists()


@as_root
def test_a_link_of_another_user_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    give(tmp_path / "link")
    for path in ("link", "link/below"):
        with pytest.raises(PermissionError, match="is a symbolic link"):
            private_directory(tmp_path / path)
    assert mode_of(tmp_path / "target") == 0o755
    assert not list((tmp_path / "target").iterdir())


def test_a_link_of_ours_is_followed_to_what_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    private_directory(tmp_path / "link" / "below")
    assert (tmp_path / "target" / "below").is_dir()
    (tmp_path / "target").chmod(0o777)
    with pytest.raises(PermissionError, match="link can be written by other users"):
        private_directory(tmp_path / "link" / "below")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(OSError, match="Too many levels"):
        private_directory(tmp_path / "one" / "below")


@pytest.mark.parametrize(
    ("mode", "as_parent", "as_last"),
    [
        (0o700, True, True),
        (0o755, True, True),
        (0o777, False, False),
        (0o1777, True, False),
        (0o702, False, False),
    ],
)
def test_who_else_may_write_to_a_directory(tmp_path: Path, mode: int, as_parent: bool, as_last: bool) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some").chmod(mode)
    for path, fine in (("some", as_last), ("some/below", as_parent)):
        if fine:
            private_directory(tmp_path / path)
            continue
        with pytest.raises(PermissionError, match="some can be written by other users"):
            private_directory(tmp_path / path)


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_may_write_that_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    def getgrgid(gid: int) -> object:
        members = ["alice"] if alone else ["alice", "bob"]
        return module.grp.struct_group(("alice", "x", gid, members))

    def getpwuid(uid: int) -> object:
        return module.pwd.struct_passwd(("alice", "x", uid, 0, "", "/", "/bin/sh"))

    monkeypatch.setattr(module.grp, "getgrgid", getgrgid)
    monkeypatch.setattr(module.pwd, "getpwuid", getpwuid)
    (tmp_path / "some").mkdir()
    (tmp_path / "some").chmod(0o775)
    if alone:
        private_directory(tmp_path / "some" / "below")
        return
    with pytest.raises(PermissionError, match="can be written by other users"):
        private_directory(tmp_path / "some" / "below")


@as_root
def test_parents_that_a_person_chose_are_not_checked_but_the_directory_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    give(tmp_path / "theirs")
    private_directory(tmp_path / "theirs" / "made" / "run", checks_parents=False)
    assert mode_of(tmp_path / "theirs" / "made" / "run") == 0o700
    give(tmp_path / "theirs" / "made" / "run")
    with pytest.raises(PermissionError, match="belongs to user"):
        private_directory(tmp_path / "theirs" / "made" / "run", checks_parents=False)
