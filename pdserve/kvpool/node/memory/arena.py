"""The node's memory: the arena and its slot table as files in a tmpfs, so both outlive the process.

    <arena_dir>/<node name>/arena              the slots, or a link to them (placement.py)
                            table              header, slab classes, rows (protocol/slot_table.py)
                            namespaces.json    list of namespaces (namespaces/catalog.py)
                            readers, writers   sockets that give clients the memory
                            lock               locked by the node that uses the directory; holds its pid

The files are allocated completely at the start: if the tmpfs is too small, this is an error then, and no
SIGBUS later. If an earlier node left files with the same layout, its pages are taken over one by one
(core/store/table_scan.py). Otherwise new files replace them. Their size never changes, because clients may
still have the old files mapped.

A node gives its memory to the clients of its host: descriptors, at two Unix sockets in its directory.

    <arena_dir>/<node name>/readers    the arena, opened for reading, and the slot table
                            writers    the arena, opened for reading and writing, and the slot table

Welcome names one of the two to a client, by the client's rights. Who connects says nothing, gets two
descriptors if he is of this node's user, and is disconnected at once (transports/shm.py). So no
connection stays open, and nothing waits: the descriptors are the first bytes on a fresh socket.

The sockets keep a reader's faults from the pages of others. They are no bar to a hostile process of the same
user. It can connect to `writers`, open the files by their paths, or attach to this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pdserve.errors import FrameError, StartupError
from pdserve.kvpool.core.events import AssignSlab, CommitRows, FreeRows, ReserveRows, SaveNamespaces
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.store.table_scan import TableContents, scan
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.memory.placement import Placement, does_not_fit, wastes
from pdserve.kvpool.protocol.messages import ArenaInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.protocol.slot_table import FREE, TABLE_MAGIC, TABLE_VERSION, RowWriter, TableLayout
from pdserve.kvpool.transports.dial import peer_uid
from pdserve.kvpool.transports.shm import GREETING
from pdserve.security.private_directory import private_directory

READERS: Final = "readers"
WRITERS: Final = "writers"
BACKLOG: Final = 4096  # as at the node's other sockets
ACCEPTS_A_TURN: Final = 64  # of one socket; clients with a connection are served before the next
RETRY_ACCEPT_S: Final = 1.0  # when this process has no descriptor left
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class DescriptorSockets:
    """The two sockets of one node, in its loop."""

    def __init__(self, node: str, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        """`directory`: of the node's memory, locked by it. Sockets that are left there are replaced.

        Raises StartupError.
        """
        self._directory = directory
        self._loop = loop
        self._files: list[int] = []
        self._listening: dict[str, socket.socket] = {}
        try:
            table = self._file("table", os.O_RDONLY)
            self._listen(READERS, [self._file("arena", os.O_RDONLY), table])
            self._listen(WRITERS, [self._file("arena", os.O_RDWR), table])
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise StartupError(
                f"node {node}: cannot listen in {directory} for clients of this host: {reason}: choose "
                "another arena_dir"
            ) from error

    def close(self) -> None:
        """Give out nothing more. Idempotent."""
        while self._listening:
            name, listener = self._listening.popitem()
            self._loop.remove_reader(listener.fileno())
            listener.close()
            (self._directory / name).unlink(missing_ok=True)
        while self._files:
            os.close(self._files.pop())

    def _file(self, name: str, flags: int) -> int:
        self._files.append(os.open(self._directory / name, flags))
        return self._files[-1]

    def _listen(self, name: str, files: Sequence[int]) -> None:
        listener = self._listening[name] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        (self._directory / name).unlink(missing_ok=True)
        at = os.open(self._directory, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{at}/{name}")  # a socket's path must be short
        finally:
            os.close(at)
        listener.listen(BACKLOG)
        self._watch(listener, files)

    def _watch(self, listener: socket.socket, files: Sequence[int]) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._serve, listener, files)

    def _serve(self, listener: socket.socket, files: Sequence[int]) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                client, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._loop.remove_reader(listener.fileno())
                    self._loop.call_later(RETRY_ACCEPT_S, self._watch, listener, files)
                return
            with client, contextlib.suppress(OSError):  # it is gone already
                client.setblocking(False)
                if peer_uid(client) == os.geteuid():
                    socket.send_fds(client, [GREETING], files)


logger = logging.getLogger(__name__)


class Arena:
    """One node's memory, opened and locked.

    `namespaces` is the list that an earlier node left. `kept`: there is memory of an earlier node; its pages
    are in `contents` after `recover`.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        layout: TableLayout,
        incarnation: int,
        *,
        fresh: bool,
        placement: Placement = Placement(),  # noqa: B008 (frozen)
        lock_fd: int | None = None,
    ) -> None:
        """`lock_fd`: the lock that this process's earlier program held already.

        Raises StartupError if the directory cannot be used or is in use, or the arena does not fit in memory.
        """
        self.layout = layout
        self._name = name
        self._warned_of_waste = False
        self.directory = directory
        self._placement = placement
        self._home = home = placement.home(directory)
        self._lock_fd = _lock(name, directory, lock_fd)
        try:
            self.kept = not fresh and self._reusable(home)
            if not self.kept:
                self._create_files(home)
            self._arena_map = _map(home, layout.arena_bytes)
            placement.apply(name, self._arena_map)
            self._table_map = _map(directory / "table", layout.table_bytes)
        except OSError as error:
            self._give_up()
            raise StartupError(f"node {name}: {directory}: {error.strerror or error}") from error
        except StartupError:
            self._give_up()
            raise
        self.memory: Bytes1D = np.frombuffer(self._arena_map, dtype=np.uint8)
        self._table = table = memoryview(self._table_map)
        self._slab_class = layout.slab_class(table)
        self._rows = RowWriter(table, layout)
        self.namespaces = self._saved_namespaces(incarnation) if self.kept else Namespaces(incarnation)
        self.contents: TableContents | None = None
        self._write_header(table, incarnation)

    def info(self, *, may_write: bool) -> ArenaInfo:
        """With which a client maps the memory."""
        directory = self.directory.absolute()
        socket_path = str(directory / (WRITERS if may_write else READERS))
        return ArenaInfo(socket_path, self.layout.arena_bytes, self.layout.table_bytes)

    # the actions of NodeState that concern the memory

    def reserve_rows(self, action: ReserveRows) -> None:
        """Carry out the action."""
        self._rows.reserve(action.slots, action.space)
        for start, end in action.wipe:  # after the rows, so a reader of the old page sees that it is gone
            self.memory[start:end] = 0

    def commit_rows(self, action: CommitRows) -> None:
        """Carry out the action."""
        self._rows.commit(*msgspec.structs.astuple(action))

    def free_rows(self, action: FreeRows) -> None:
        """Carry out the action."""
        self._rows.free(action.slots)
        for start, end in action.wipe:
            self.memory[start:end] = 0

    def assign_slab(self, action: AssignSlab) -> None:
        """Carry out the action."""
        self._slab_class[action.slab] = action.slot_bytes
        self._warn_of_waste(action.slot_bytes)

    def save_namespaces(self, action: SaveNamespaces) -> None:
        """Carry out the action. If that fails (memory is full, say), log it; clients are still served.

        After a failure a restart drops pages of namespaces that are not in the file. Pages of namespaces that
        are dropped or cleared now, but not in the file, are freed at once: no restart may bring them back.
        """
        try:
            _replace(self.directory / "namespaces.json", action.text)
        except OSError as error:
            self._rows.free_all_but(Namespaces.load(action.text).numbers_of_spaces)
            logger.warning(
                "node %s: the list of namespaces is not saved, their pages are lost at a restart: %s: %s",
                self._name,
                self.directory,
                error.strerror or error,
            )

    def adopt(self, slots: SlotAllocator) -> None:
        """After recovery: write the allocator's slab classes to the table."""
        self._slab_class[:] = np.frombuffer(slots.slab_class, dtype=np.uint64)
        for slot_bytes in sorted(set(slots.slab_class)):
            self._warn_of_waste(slot_bytes)

    def _warn_of_waste(self, slot_bytes: int) -> None:
        """Say it once if pages of this size leave much of the memory unused. Clients choose sizes."""
        slab_bytes = self.layout.slab_bytes
        if not slot_bytes or self._warned_of_waste or not wastes(slab_bytes, slot_bytes):
            return
        self._warned_of_waste = True
        text = (
            "node %s: pages of %s bytes leave %d %% of each slab of %s bytes unused: "
            "set page_bytes = %d (the node then starts empty)"
        )
        share = 100 * (slab_bytes % slot_bytes) // slab_bytes
        logger.warning(text, self._name, f"{slot_bytes:,}", share, f"{slab_bytes:,}", slot_bytes)

    def pass_lock(self) -> int:
        """A descriptor that keeps the directory locked after `close`."""
        return os.dup(self._lock_fd)

    def close(self, *, keep: bool) -> None:
        """Unlock. Remove the files unless `keep`. The mapping lives as long as `memory`."""
        if not keep:
            _unlink_arena(self.directory / "arena")
            for name in ("table", "namespaces.json", "namespaces.new", "lock"):
                (self.directory / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another program put something else there
                self.directory.rmdir()
        os.close(self._lock_fd)

    # --- starting

    def _reusable(self, home: Path) -> bool:
        """Whether there are files of exactly this layout. Logs the reason if there are other files."""
        arena, table = self.directory / "arena", self.directory / "table"
        if not arena.exists() and not table.exists():
            return False  # a link may be left whose hugetlbfs a restart of the machine has emptied
        reason = why_not_reusable(self.directory, home, self.layout)
        if not reason:
            return True
        logger.warning(
            "node %s: starting empty: cannot take over the pages in %s: %s",
            self._name,
            self.directory,
            reason,
        )
        return False

    def _give_up(self) -> None:
        """Unlock, and remove empty directories."""
        if self._home.parent != self.directory:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                self._home.parent.rmdir()
        if {path.name for path in self.directory.iterdir()} == {"lock"}:
            (self.directory / "lock").unlink()
            self.directory.rmdir()
        os.close(self._lock_fd)

    def _create_files(self, home: Path) -> None:
        arena, table = self.directory / "arena", self.directory / "table"
        old = [path for path in (table, arena, self.directory / "namespaces.json") if path.exists()]
        replaced = sum(_allocated_bytes(path) for path in old if _home_of(path).parent == home.parent)
        needed = self.layout.arena_bytes
        if not self._placement.huge_page_bytes:
            needed += self.layout.table_bytes
        if home != arena:
            _make_private(home.parent)
        self._placement.check_fits(self._name, home, needed, replaced)
        _unlink_arena(arena)
        for path in old:
            path.unlink(missing_ok=True)
        try:
            self._create(home, self.layout.arena_bytes, self._placement)
            if home != arena:
                arena.symlink_to(home)
            self._create(table, self.layout.table_bytes, Placement())
        except (OSError, StartupError):
            _unlink_arena(arena)
            raise

    def _create(self, path: Path, size: int, placement: Placement) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            placement.allocate(self._name, fd, size)
        except (OSError, StartupError) as error:
            path.unlink()
            if isinstance(error, StartupError):
                raise
            raise does_not_fit(self._name, path.parent, size, None) from error
        finally:
            os.close(fd)

    def _saved_namespaces(self, incarnation: int) -> Namespaces:
        try:
            return Namespaces.load((self.directory / "namespaces.json").read_bytes(), incarnation)
        except FileNotFoundError:
            pass  # the earlier node had none
        except FrameError as error:
            logger.warning("node %s: %s: %s", self._name, self.directory, error)
        return Namespaces(incarnation)

    def recover(self, namespaces: Namespaces) -> None:
        """Find the pages of these namespaces that an earlier node left, into `contents`. Only once."""
        self.namespaces = namespaces
        if not self.kept:
            return
        started_s = time.monotonic()
        rows = self.layout.table_rows(self._table)
        self.contents = contents = scan(self.layout, self._slab_class, rows, namespaces.numbers_of_spaces)
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

    def _write_header(self, table: memoryview, incarnation: int) -> None:
        header = self.layout.header(table)
        header["version"] = TABLE_VERSION
        header["arena_bytes"] = self.layout.arena_bytes
        header["slab_bytes"] = self.layout.slab_bytes
        header["min_slot_bytes"] = self.layout.min_slot_bytes
        header["incarnation"] = incarnation
        header["magic"] = TABLE_MAGIC  # written last: without it the file is no table


def why_not_reusable(directory: Path, home: Path, layout: TableLayout) -> str:
    """The reason why a node with this layout and its arena at `home` cannot take over the directory's pages.

    Empty: it can.
    """
    arena, table = directory / "arena", directory / "table"
    if not (arena.exists() and table.exists()):
        return "its files are incomplete"
    with table.open("rb") as file:
        found = TableLayout.from_header(file.read(64), os.fstat(file.fileno()).st_size)
    if found is None:
        return "the slot table is truncated, damaged, or of another version"
    if found != layout:
        return "it was made for other sizes (capacity_bytes, page_bytes)"
    if _home_of(arena) != home:
        return "its memory is of another kind: huge_pages has changed"
    if arena.stat().st_size != layout.arena_bytes:
        return "the arena file has another size than its table says"
    return ""


def _lock(name: str, directory: Path, held_fd: int | None) -> int:
    if held_fd is not None:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held_fd), (directory / "lock").stat()):
                return held_fd
        os.close(held_fd)  # of another directory: the configuration has changed
    try:
        _make_private(directory)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupError(
            f"node {name}: cannot use {directory} for the arena: {error.strerror}: make it this user's own, "
            "or choose another arena_dir"
        ) from error
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


def _make_private(directory: Path) -> None:
    """Raises OSError if other users could read the pages or replace our files."""
    private_directory(directory)
    directory.chmod(0o700)


def _map(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # its first part takes scarce memory
        raise


def _home_of(path: Path) -> Path:
    """The real path of one of our files."""
    return path.readlink() if path.is_symlink() else path


def _unlink_arena(arena: Path) -> None:
    """Remove the arena. If it is a link, remove its target and the target's directory too."""
    if arena.is_symlink():
        home = arena.readlink()
        home.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another program put something else there
            home.parent.rmdir()
    arena.unlink(missing_ok=True)


def _allocated_bytes(path: Path) -> int:
    found = path.stat()
    return found.st_blocks * 512 or found.st_size  # hugetlbfs counts no blocks
