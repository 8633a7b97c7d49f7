"""Common parts of tiers that keep files: an exclusive directory, and small files that survive a crash."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.tiers.base import TierSettings
from pdserve.security.private_directory import private_directory

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound=msgspec.Struct)
T = TypeVar("T")
GIB = 1 << 30
MAX_TEXT_BYTES: Final = 64 << 20  # of a small file; 4,096 namespaces take a few MiB


def read_options(settings: TierSettings, kind: str, wanted: type[Options]) -> Options:
    """The tier's own options as a struct. Raises ConfigError."""
    try:
        return msgspec.convert(dict(settings.options), wanted)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"node {settings.node}: tier {kind} at {settings.path}: options: {error}"
        ) from error


class NotOurs(PermissionError):
    """A file that is no regular one of this user, or that others may write to."""


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user that no other user may write to; with O_CREAT it may be new, and is
    for this user alone. A link is not followed, and a pipe not waited for. Raises OSError; NotOurs says why
    in `strerror`.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(errno.EPERM, f"{path} is a symbolic link") from None
        if error.errno == errno.ENXIO:  # a pipe or socket
            raise NotOurs(errno.EPERM, f"{path} is no regular file") from None
        raise
    info = os.fstat(fd)
    wrong = ""
    if not stat.S_ISREG(info.st_mode):
        wrong = "is no regular file"
    elif info.st_uid != os.geteuid():
        wrong = f"belongs to user {info.st_uid}"
    elif info.st_mode & stat.S_IWOTH:
        wrong = "can be written by other users"
    if wrong:
        os.close(fd)
        raise NotOurs(errno.EPERM, f"{path} {wrong}")
    return fd


def open_new(path: Path) -> int:
    """Make the file, to be written by this user alone; what has this name is removed, and not written to.
    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:  # of a process that was killed
        path.unlink()
        return os.open(path, flags, 0o600)


def claim_directory(settings: TierSettings) -> int:
    """Make the directory if it is missing, check that it is this user's own, and lock it.

    Returns the file descriptor of the lock.

    Raises StartupError.
    """
    path, node = settings.path, settings.node
    try:
        private_directory(path)
        fd = open_own(path / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise StartupError(
            f"node {node}: cannot use {path} for a tier: {error.strerror}: make it a directory that this "
            "user may write to, or choose another path"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_capacity(settings)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip()
        pid = pid if pid.isdecimal() else "unknown"
        os.close(fd)
        raise StartupError(
            f"node {node}: the tier's directory {path} is in use by the process {pid}: give each node a "
            "directory of its own"
        ) from None
    except StartupError:
        os.close(fd)
        raise
    except OSError as error:  # a file system without locks
        logger.warning("node %s: tier at %s is not locked: %s", node, path, error.strerror)
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _check_capacity(settings: TierSettings) -> None:
    space = os.statvfs(settings.path)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if total and settings.capacity_bytes > total:  # 0: the file system does not report its size
        raise StartupError(
            f"node {settings.node}: tier at {settings.path}: capacity_bytes of "
            f"{settings.capacity_bytes / GIB:.2f} GiB is more than its file system has "
            f"({total / GIB:.2f} GiB): lower it, or choose another path"
        )
    ours = sum(entry.stat().st_blocks * 512 for entry in os.scandir(settings.path) if entry.is_file())
    if total and settings.capacity_bytes > free + ours:
        logger.warning(
            "node %s: tier at %s: only %.2f GiB of its capacity_bytes of %.2f GiB are free: when they are "
            "used up, pages are no longer written there",
            settings.node,
            settings.path,
            free / GIB,
            settings.capacity_bytes / GIB,
        )


def write_durably(path: Path, text: str) -> str:
    """Replace a small file atomically and durably. Returns "" or an error text."""
    temporary = path.with_suffix(".new")
    try:
        with os.fdopen(open_new(temporary), "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def sync_directory(path: Path) -> None:
    """Make created and removed names of the directory durable (fsync). Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_text(path: Path) -> str | None:
    """The file's text. None if the file is missing or unreadable."""
    try:
        return _whole(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("cannot read %s: %s", path, error)
        return None


def _whole(path: Path) -> bytes:
    """A small file. Raises OSError, also for one that is not small."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        found = file.read(MAX_TEXT_BYTES + 1)
    if len(found) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return found


def remove_durably(path: Path) -> str:
    """Remove a small file durably. Returns "" or an error text."""
    try:
        path.unlink()
        sync_directory(path.parent)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def save_text(path: Path, text: str | None) -> str:
    """Write this text durably, or remove the file (None). Returns "" or an error text."""
    return remove_durably(path) if text is None else write_durably(path, text)


def load_json(path: Path, kind: type[T], missing: T) -> T | None:
    """The decoded JSON file. `missing` if there is no file, None if it is unreadable."""
    try:
        return msgspec.json.decode(_whole(path), type=kind)
    except FileNotFoundError:
        return missing
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return None
