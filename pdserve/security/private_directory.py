"""Directories that only this user can change: of memory, stored pages, sockets, and files with secrets.

Every user may write to /dev/shm and /tmp. So another user could make a directory there first, and read or
replace what we put into it; or keep the parent of ours, and put another in its place. Hence each component of
such a path must be as follows:

    owner             this user, or root; the last component: this user
    writable by       its owner; also by a group that is the owner's alone. Other users may write to a
                      parent that is sticky (/tmp, /dev/shm): they add names there, and replace none of ours
    symbolic link     of this user or of root; never the last component
    missing           is made, with mode 0700

Every component is opened in its parent's descriptor without following links, and checked as opened. What
passed can be changed by this user and root alone, so its files may be opened by their paths afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path, PurePath
from typing import Final

MAX_LINKS: Final = 40  # as the kernel
_OPEN: Final = os.O_PATH | os.O_NOFOLLOW


def private_directory(path: Path, *, checks_parents: bool = True) -> None:
    """Make the directory and its parents where they are missing, and check that they are ours as said above.

    `checks_parents` False: for a place that a person chose, whose parents he trusts; only the last component
    is checked. Raises OSError with the reason in `strerror`.
    """
    path = path.absolute()
    if not checks_parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    start = Path("/") if checks_parents else path.parent
    at = os.open(start, os.O_PATH | os.O_DIRECTORY)
    try:
        _walk(at, start, path)
    finally:
        os.close(at)


def _walk(at: int, where: Path, path: Path) -> None:
    """Check and make what is below `where`. `at`: its descriptor, which becomes the last component's."""
    names = list(reversed(path.relative_to(where).parts))
    links = 0
    while names:
        name = names.pop()
        found = _enter(at, name, where / name)
        try:
            info = os.fstat(found)
            if stat.S_ISLNK(info.st_mode):
                links += 1
                target = PurePath(_target(found, info, where / name, is_last=not names, links=links))
                names += reversed(target.parts[target.is_absolute() :])
                if target.is_absolute():
                    where = Path("/")
                    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
                    os.dup2(root, at, inheritable=False)
                    os.close(root)
                continue
            where /= name
            _check(info, where, is_last=not names)
            os.dup2(found, at, inheritable=False)
        finally:
            os.close(found)


def _enter(at: int, name: str, where: Path) -> int:
    try:
        return os.open(name, _OPEN, dir_fd=at)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # whoever made it meanwhile: it is checked
            os.mkdir(name, 0o700, dir_fd=at)
        return os.open(name, _OPEN, dir_fd=at)


def _target(link: int, info: os.stat_result, where: Path, *, is_last: bool, links: int) -> str:
    """What a symbolic link points to. Raises OSError."""
    if is_last:
        raise _refused(f"{where} is a symbolic link, and its target has to be named instead")
    if info.st_uid not in (os.geteuid(), 0):
        raise _refused(f"{where} is a symbolic link of user {info.st_uid}")
    if links > MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(where))
    return os.readlink("", dir_fd=link)


def _check(info: os.stat_result, where: Path, *, is_last: bool) -> None:
    """Raises OSError."""
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{where} is no directory")
    own = os.geteuid()
    if info.st_uid != own and (is_last or info.st_uid != 0):
        raise _refused(f"{where} belongs to user {info.st_uid}")
    if info.st_mode & stat.S_ISVTX and not is_last:
        return
    others = info.st_mode & stat.S_IWOTH
    if others or (info.st_mode & stat.S_IWGRP and not _has_private_group(info)):
        raise _refused(f"{where} can be written by other users (chmod go-w helps)")


def _has_private_group(info: os.stat_result) -> bool:
    """Whether the directory's group is its owner's alone, as many systems make one for each user."""
    try:
        owner, group = pwd.getpwuid(info.st_uid).pw_name, grp.getgrgid(info.st_gid)
    except KeyError:
        return False
    return group.gr_name == owner and set(group.gr_mem) <= {owner}


def _refused(text: str) -> PermissionError:
    return PermissionError(errno.EACCES, text)
