"""What tiers that keep files have in common: a directory that is ours alone, small files that outlive a
crash.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.tiers.base import TierSettings

logger = logging.getLogger(__name__)

Options = TypeVar("Options", bound=msgspec.Struct)
T = TypeVar("T")
GIB = 1 << 30


def read_options(settings: TierSettings, kind: str, wanted: type[Options]) -> Options:
    """The tier's own options, typed. Raises ConfigError."""
    try:
        return msgspec.convert(dict(settings.options), wanted)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"node {settings.node}: tier {kind} at {settings.path}: options: {error}"
        ) from error


def claim_directory(settings: TierSettings) -> int:
    """Make the directory if need be, see that it can be written, lock it; the lock's file descriptor.

    Raises StartupError.
    """
    path, node = settings.path, settings.node
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    if total and settings.capacity_bytes > total:  # some file systems do not know
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
    """Replace a small file as a whole, through a crash too; "" or what went wrong, in words."""
    temporary = path.with_suffix(".new")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def sync_directory(path: Path) -> None:
    """Make names made or removed in it durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_text(path: Path) -> str | None:
    """None when it is not there or cannot be read."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("cannot read %s: %s", path, error)
        return None


def _load(path: Path, kind: type[T], missing: T) -> T | None:
    """From JSON; `missing` where there is no file, None where it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return missing
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read: no page of before is believed: %s", path, error)
        return None


class Forgotten:
    """Which pages of which namespaces were forgotten, durably: those with a sequence below the number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = _load(path, dict[int, int], {})
        self.readable = found is not None
        self.before = found or {}

    def covers(self, namespace: int, sequence: int) -> bool:
        return sequence < self.before.get(namespace, 0)

    def add(self, namespace: int, before_sequence: int) -> str:
        """ "" or why it could not be saved."""
        self.before[namespace] = max(before_sequence, self.before.get(namespace, 0))
        return self._save()

    def keep_only(self, namespaces: set[int]) -> None:
        """What is said of others is of no use once nothing of theirs is believed (`Origins`)."""
        if not self.readable or not self.before.keys() <= namespaces:
            self.before = {number: before for number, before in self.before.items() if number in namespaces}
            self._save()

    def _save(self) -> str:
        return write_durably(self._path, msgspec.json.encode(self.before).decode())


class OriginsFile(msgspec.Struct, frozen=True):
    """The persistent form: a first segment by namespace, and that of all others. Segments count from 1."""

    numbers: dict[int, int] = {}
    others: int = 1


class Origins:
    """From which segment on a namespace's number means this namespace, durably. In an older segment it may
    mean another, of a list of namespaces that was not believed any more (names.py), whatever lists say later.
    """

    def __init__(self, path: Path, *, believe: bool) -> None:
        """`believe`: whether what is there counts at all."""
        self._path = path
        self._saved = _load(path, OriginsFile, OriginsFile()) if believe else None
        self._file = self._saved

    @property
    def next_segment(self) -> int:
        """No new segment's number is below this."""
        return 1 if self._file is None else self._file.others

    def has(self, namespace: int, segment: int) -> bool:
        """Whether the segment's records of this number are the namespace's."""
        file = self._file
        return file is not None and segment >= file.numbers.get(namespace, file.others)

    def settle(self, known: set[int], next_segment: int) -> str:
        """Of the segments there are now only records of `known` count from here on; "" or why that may not
        last through a restart, in words: see `save`.
        """
        file = self._file or OriginsFile(others=next_segment)
        numbers = {number: file.numbers.get(number, file.others) for number in known}
        self._file = OriginsFile(numbers, max(next_segment, file.others))
        return self.save()

    def save(self) -> str:
        """ "" once what was settled is durable, or why it is not."""
        if self._file is None or self._file == self._saved:
            return ""
        problem = write_durably(self._path, msgspec.json.encode(self._file).decode())
        if not problem:
            self._saved = self._file
        return problem
