"""Common parts of tiers that keep files: an exclusive directory, and small files that survive a crash."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.tiers.base import TierSettings
from pdserve.private_directory import private_directory

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound=msgspec.Struct)
T = TypeVar("T")
GIB = 1 << 30


def read_options(settings: TierSettings, kind: str, wanted: type[Options]) -> Options:
    """The tier's own options as a struct. Raises ConfigError."""
    try:
        return msgspec.convert(dict(settings.options), wanted)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"node {settings.node}: tier {kind} at {settings.path}: options: {error}"
        ) from error


def claim_directory(settings: TierSettings) -> int:
    """Make the directory if it is missing, check that it is writable by this user alone, and lock it.

    Returns the file descriptor of the lock.

    Raises StartupError.
    """
    path, node = settings.path, settings.node
    try:
        private_directory(path)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(
            f"node {node}: cannot use {path} for a tier: {error.strerror}: make it a directory that this "
            "user may write to, or choose another path"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_capacity(settings)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
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
        with temporary.open("wb") as file:
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
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("cannot read %s: %s", path, error)
        return None


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
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return missing
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return None
