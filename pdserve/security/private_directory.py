"""Directories that only this user can change: of memory, stored pages, sockets, and files with secrets.

Every user may write to /dev/shm and /tmp. So another user could make a directory there first, and read or
replace what we put into it; or keep the parent of ours, and put another in its place. Hence each component of
such a path must be as follows:

    owner             this user, or root; the last component: this user
    writable by       its owner; also by a group that is the owner's alone. Other users may write to a parent
                      that is sticky (/tmp, /dev/shm), where they replace nothing of ours, and to one where a
                      volume is mounted (Kubernetes mounts them with mode 0777): who mounts it decides who
                      reaches it
    symbolic link     of this user or of root; never the last component
    missing           is made, with mode 0700

A component is checked before anything is made below it. What passed can be changed by this user and root
alone, so its files may be opened by their paths afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from pathlib import Path

from pdserve.errors import StartupError


def private_directory(path: Path, *, checks_parents: bool = True) -> None:
    """Make the directory and its parents where they are missing, and check that they are ours as said above.

    `checks_parents` False: for a place that a person chose, whose parents he trusts; only the last component
    is checked. Raises OSError with the reason in `strerror`.
    """
    path = path.absolute()
    for parent in reversed(path.parents):
        _make(parent)
        if checks_parents:
            _check(parent, is_last=False)
    _make(path)
    _check(path, is_last=True)


def _make(where: Path) -> None:
    if not os.path.lexists(where):
        with contextlib.suppress(FileExistsError):  # whoever made it meanwhile: it is checked
            where.mkdir(0o700)


def _check(where: Path, *, is_last: bool) -> None:
    """Raises OSError."""
    own = os.geteuid()
    info = where.lstat()
    if stat.S_ISLNK(info.st_mode):
        if is_last:
            raise _refused(f"{where} is a symbolic link, and its target has to be named instead")
        if info.st_uid not in (own, 0):
            raise _refused(f"{where} is a symbolic link of user {info.st_uid}")
        info = where.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{where} is no directory")
    if info.st_uid != own and (is_last or info.st_uid != 0):
        raise _refused(f"{where} belongs to user {info.st_uid}")
    if not is_last and (info.st_mode & stat.S_ISVTX or os.path.ismount(where)):
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


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: configuration can hold access tokens. Who reads meanwhile
    gets the old one. Raises StartupError.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: cannot be written: {error.strerror}") from None
