"""The node's memory: the arena and its slot table as files in a tmpfs, so that both outlive the process.

    <arena_dir>/<node name>/arena              the slots
                            table              table.py: header, slab classes, rows
                            namespaces.json    namespaces.py; replaced as a whole
                            lock               held by the node that uses the directory; holds its pid

The files are allocated in full at start, so that a tmpfs that is too small is an error then, and not a SIGBUS
later. What an earlier node left is taken over when its layout is this one's, page by page (recovery.py);
otherwise the files are replaced by new ones, never changed in size: clients may still have the old ones
mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import stat
import time
from pathlib import Path

import numpy as np

from pdserve.errors import FrameError, StartupError
from pdserve.kvpool.events import AssignSlab, FreeRow, SaveNamespaces, WriteRow
from pdserve.kvpool.messages import ArenaInfo
from pdserve.kvpool.namespaces import Namespaces
from pdserve.kvpool.recovery import TableContents, scan
from pdserve.kvpool.slots import SlotAllocator
from pdserve.kvpool.table import FREE, TABLE_MAGIC, TABLE_VERSION, RowWriter, TableLayout
from pdserve.kvpool.transports.base import Bytes1D

logger = logging.getLogger(__name__)

GIB = 1 << 30


class Arena:
    """One node's memory, opened and locked. `contents` is what an earlier node left; None at a
    fresh start.
    """

    def __init__(
        self, name: str, directory: Path, layout: TableLayout, incarnation: int, *, fresh: bool
    ) -> None:
        """Raises StartupError: the directory cannot be used, is in use, or the arena does not fit
        in memory.
        """
        self.layout = layout
        self._name = name
        self._directory = directory
        self._lock_fd = _lock(name, directory)
        try:
            kept = not fresh and self._reusable()
            if not kept:
                self._create_files()
            self._arena_map = _map(directory / "arena", layout.arena_bytes)
            self._table_map = _map(directory / "table", layout.table_bytes)
        except OSError as error:
            self._give_up()
            raise StartupError(f"node {name}: {directory}: {error.strerror or error}") from error
        except StartupError:
            self._give_up()
            raise
        self.memory: Bytes1D = np.frombuffer(self._arena_map, dtype=np.uint8)
        table = memoryview(self._table_map)
        self._slab_class = layout.slab_class(table)
        self._rows = RowWriter(table, layout)
        self.namespaces = Namespaces()
        self.contents = self._recover(table) if kept else None
        self._write_header(table, incarnation)
        # later than any sequence of an earlier incarnation, which gave out far less than one per microsecond
        self.first_sequence = time.time_ns() // 1000

    @property
    def info(self) -> ArenaInfo:
        """Where clients map it."""
        return ArenaInfo(
            str(self._directory / "arena"),
            self.layout.arena_bytes,
            str(self._directory / "table"),
            self.layout.table_bytes,
        )

    # the actions of NodeState that concern the memory

    def write_row(self, action: WriteRow) -> None:
        """Carry out the action."""
        self._rows.write(
            action.slot,
            action.state,
            action.key,
            action.namespace,
            action.length_bytes,
            action.checksum,
            action.sequence,
        )

    def free_row(self, action: FreeRow) -> None:
        """Carry out the action."""
        self._rows.free(action.slot)

    def assign_slab(self, action: AssignSlab) -> None:
        """Carry out the action."""
        self._slab_class[action.slab] = action.slot_bytes

    def save_namespaces(self, action: SaveNamespaces) -> None:
        """Carry out the action, or say why not (the memory is full, say): then a restart keeps fewer pages,
        and the clients are served all the same. A row of a namespace that was not saved is dropped then.
        """
        try:
            _replace(self._directory / "namespaces.json", action.text)
        except OSError as error:
            logger.warning(
                "node %s: the list of namespaces is not saved, their pages are lost at a restart: %s: %s",
                self._name,
                self._directory,
                error.strerror or error,
            )

    def adopt(self, slots: SlotAllocator) -> None:
        """After recovery: write the slab classes that were found right, as the allocator now has them."""
        self._slab_class[:] = np.frombuffer(slots.slab_class, dtype=np.uint64)

    def close(self, *, keep: bool) -> None:
        """Unlock; remove the files unless they are to be kept. The mapping lives as long as `memory` does."""
        if not keep:
            for name in ("table", "arena", "namespaces.json", "namespaces.new", "lock"):
                (self._directory / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody put something else there
                self._directory.rmdir()
        os.close(self._lock_fd)

    # --- starting

    def _reusable(self) -> bool:
        """Whether files of this very layout are there; says why not when there are others."""
        arena, table = self._directory / "arena", self._directory / "table"
        if not arena.exists() and not table.exists():
            return False
        reason = "its files are incomplete"
        if arena.exists() and table.exists():
            with table.open("rb") as file:
                found = TableLayout.from_header(file.read(64), os.fstat(file.fileno()).st_size)
            if found is None:
                reason = "the slot table is truncated, damaged, or of another version"
            elif found != self.layout:
                reason = "it was made for other sizes"
            elif arena.stat().st_size != self.layout.arena_bytes:
                reason = "the arena file has another size than its table says"
            else:
                return True
        logger.warning(
            "node %s: starting empty: cannot take over the pages in %s: %s",
            self._name,
            self._directory,
            reason,
        )
        return False

    def _give_up(self) -> None:
        """Unlock; an empty directory goes too."""
        if {path.name for path in self._directory.iterdir()} == {"lock"}:
            (self._directory / "lock").unlink()
            self._directory.rmdir()
        os.close(self._lock_fd)

    def _create_files(self) -> None:
        needed = self.layout.arena_bytes + self.layout.table_bytes
        old = [self._directory / name for name in ("table", "arena", "namespaces.json")]
        old = [path for path in old if path.exists()]
        _check_fits(self._name, self._directory, needed, sum(path.stat().st_blocks * 512 for path in old))
        for path in old:
            path.unlink()
        for name, size in (("arena", self.layout.arena_bytes), ("table", self.layout.table_bytes)):
            fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                (self._directory / name).unlink()
                raise _does_not_fit(self._name, self._directory, needed, None) from error
            finally:
                os.close(fd)

    def _recover(self, table: memoryview) -> TableContents:
        started_s = time.monotonic()
        try:
            self.namespaces = Namespaces.load((self._directory / "namespaces.json").read_bytes())
        except FileNotFoundError:
            pass  # the earlier node had none
        except FrameError as error:
            logger.warning("node %s: dropping all pages: %s", self._name, error)
        rows = self.layout.table_rows(table)
        contents = scan(self.layout, self._slab_class, rows, self.namespaces.numbers)
        rows["state"][contents.dropped] = FREE
        if len(contents.slots) or contents.dropped or contents.quarantined:
            logger.info(
                "node %s: took over %d pages in %.0f ms; %d bad rows dropped, %d unfinished quarantined",
                self._name,
                len(contents.slots),
                (time.monotonic() - started_s) * 1000,
                len(contents.dropped),
                len(contents.quarantined),
            )
        return contents

    def _write_header(self, table: memoryview, incarnation: int) -> None:
        header = self.layout.header(table)
        header["version"] = TABLE_VERSION
        header["arena_bytes"] = self.layout.arena_bytes
        header["slab_bytes"] = self.layout.slab_bytes
        header["min_slot_bytes"] = self.layout.min_slot_bytes
        header["incarnation"] = incarnation
        header["magic"] = TABLE_MAGIC  # last: before it, the file is no table


def _lock(name: str, directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(name, directory)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(f"node {name}: cannot use {directory} for the arena: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StartupError(
            f"node {name}: {directory} is in use by the pool node with pid {pid}: stop it, or choose another "
            "name or arena_dir"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _check_private(name: str, directory: Path) -> None:
    """Others may neither read the pages nor put files of theirs in the place of ours. /dev/shm is
    everybody's: who made our directory before us could hand us an arena that he reads and writes.
    """
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        directory.chmod(0o700)
        return
    raise StartupError(
        f"node {name}: {directory} is not a directory of this user's own: remove it, or choose another "
        "arena_dir"
    )


def _map(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def _check_fits(name: str, directory: Path, needed: int, replaced: int) -> None:
    """`replaced`: bytes of old files that will be gone."""
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize + replaced
    if needed > free:
        raise _does_not_fit(name, directory, needed, free)
    available = _available_memory_bytes() + replaced
    if needed > available:
        raise StartupError(
            f"node {name}: arena of {needed / GIB:.2f} GiB does not fit in memory ({available / GIB:.2f} GiB "
            "available): lower capacity_bytes"
        )


def _does_not_fit(name: str, directory: Path, needed: int, free: int | None) -> StartupError:
    space = "" if free is None else f" ({free / GIB:.2f} GiB free)"
    return StartupError(
        f"node {name}: arena of {needed / GIB:.2f} GiB does not fit in {directory}{space}: lower "
        "capacity_bytes or choose another arena_dir"
    )


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
